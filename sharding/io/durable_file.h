#pragma once
/// Files that appear whole under their names, or not at all.

#include <cstddef>
#include <memory>
#include <string>
#include <string_view>

namespace rz {

/// Writes a file from its beginning. commit() puts its bytes on the disk, gives it its name in the place of
/// what had it, and puts the folder on the disk: after a crash of the machine there is the old file or the
/// new one, whole. Without commit() nothing changes, and nothing is left behind. Until then the file has no
/// name, where the file system can do that (O_TMPFILE); else it has a temporary one, which a process that is
/// killed leaves: the next DurableFile of the same name removes those whose processes ended. Errors are
/// Errc::io, "FILE: …".
class DurableFile {
 public:
  enum class Temporary { automatic, named };
  explicit DurableFile(std::string path, Temporary = Temporary::automatic);
  ~DurableFile();
  DurableFile(const DurableFile&) = delete;
  DurableFile& operator=(const DurableFile&) = delete;

  void write(const void* data, std::size_t bytes);
  void write(std::string_view text) { write(text.data(), text.size()); }
  void commit();

 private:
  struct State;
  std::unique_ptr<State> state_;
};

/// Makes the folder and those above it that are missing, on the disk too. Errc::io if one cannot be made.
void make_folders(const std::string& path);

}  // namespace rz
