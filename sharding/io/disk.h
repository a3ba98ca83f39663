#pragma once
/// Names, locks and durability of files and folders.

#include <string>

namespace rz {

/// Throws Errc::io, "PATH: what: " and the text of errno.
[[noreturn]] void fail_on_disk(const std::string& path, const char* what);
/// The folder of a file; "." if the path has none.
std::string folder_of(const std::string& path);
/// Whether a path exists. A link does, whatever it refers to.
bool path_exists(const std::string& path);
/// Whether a path, or what it links to, is a folder. False if that cannot be found out.
bool is_folder(const std::string& path);
/// Removes a file, or a folder and all that is in it. No error if there is none. Errc::io.
void remove_path(const std::string& path);
/// Replaces a file, or an empty folder, of the new name. Errc::io.
void rename_path(const std::string& from, const std::string& to);
/// Locks a file without waiting. The lock is held while the file is open. The kernel releases it when the
/// process ends.
bool lock(int fd);
/// False if the file has no name.
bool is_linked(int fd);
/// Makes the names in a folder durable. Errc::io.
void sync_folder(const std::string& folder);

}  // namespace rz
