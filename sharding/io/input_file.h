#pragma once
/// Files that are read by range.

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>

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

}  // namespace rz
