#pragma once
/// Files that are read by range, and files and folders that become visible under their names complete, or not
/// at all.

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>

namespace rz {

/// A regular file open for reading. Copies share the descriptor; concurrent reads are safe. Errors are
/// Errc::io, "FILE: …".
class InputFile {
 public:
  /// Errc::io if the path cannot be opened or is no regular file.
  static InputFile open(const std::string& path);

  const std::string& path() const;
  /// Bytes when the file was opened.
  std::uint64_t size() const;
  /// Reads the bytes [offset, offset + out.size()). Errc::io names the byte at which the file ends if it is
  /// shorter.
  void read(std::uint64_t offset, std::span<std::byte> out) const;

 private:
  struct State;
  std::shared_ptr<const State> state_;
};

/// Writes a file from its beginning. commit() syncs the data, renames the file over any existing one, and
/// syncs the directory: after a crash of the machine either the old or the new file exists, complete. Without
/// commit() nothing changes, and no file remains. Before commit() the file has no name where the file system
/// supports that (O_TMPFILE). Elsewhere it has a temporary name, which remains if the process is killed; the
/// next DurableFile of the same name removes temporary files of processes that have ended. Errors are
/// Errc::io, "FILE: …".
class DurableFile {
 public:
  enum class Temporary { automatic, named };
  /// `named` forces a temporary name, for tests. Errc::io if the file cannot be created.
  explicit DurableFile(std::string path, Temporary = Temporary::automatic);
  ~DurableFile();
  DurableFile(const DurableFile&) = delete;
  DurableFile& operator=(const DurableFile&) = delete;

  /// Appends bytes. Errc::io on failure. Large ones whose address is that of their place in the file, modulo
  /// direct_alignment, are written from this memory without the page cache, if the file system can
  /// (O_DIRECT).
  void write(const void* data, std::size_t bytes);
  void write(std::string_view text) { write(text.data(), text.size()); }
  /// Makes the file durable and visible. Errc::io on failure; call at most once.
  void commit();

  static constexpr std::size_t direct_alignment = 4096;
  /// From so many bytes on a write is large.
  static constexpr std::size_t min_direct = std::size_t{1} << 20;
  /// Bytes that were written without the page cache.
  std::size_t direct_bytes() const;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

/// Writes a text as a DurableFile.
void write_durably(const std::string& path, std::string_view text);
/// Copies a file, which becomes visible complete; `to` may be the same file. Errc::io names the file that
/// cannot be read or written.
void copy_durably(const std::string& from, const std::string& to);

/// Removes temporary files of this path that killed processes left. The constructor does the same.
void remove_stale_temporary_files(const std::string& path);

/// Creates the directory and its missing parents, and syncs them. Errc::io if one cannot be created.
void make_folders(const std::string& path);

/// A folder that is written under a temporary name beside its own. commit() renames it. Without commit()
/// nothing remains; what a killed process left is removed by the next DurableFolder of the same path. Errors
/// are Errc::io, "PATH: …".
class DurableFolder {
 public:
  /// Makes the parents of `path`. Errc::io if `path` exists, unless it is an empty folder.
  explicit DurableFolder(const std::string& path);
  ~DurableFolder();
  DurableFolder(const DurableFolder&) = delete;

  /// The folder to write to.
  const std::string& folder() const;
  /// Makes the folder visible, durably. All its files are durable. Call at most once.
  void commit();

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace rz
