#pragma once
/// Checksums of data in files.

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>

namespace rz {

/// XXH3 with 64 bits and seed 0 (https://github.com/Cyan4973/xxHash), of bytes that come in parts: the value
/// does not depend on how they are cut. `xxhsum -H3` computes the same. It finds damage, not forgery.
class Checksum {
 public:
  Checksum();
  ~Checksum();
  Checksum(Checksum&&) noexcept;
  Checksum& operator=(Checksum&&) noexcept;

  void add(std::span<const std::byte> bytes);
  /// The checksum of all bytes so far.
  std::uint64_t value() const;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

/// 16 hexadecimal digits.
std::string checksum_text(std::uint64_t checksum);
/// nullopt unless the text is a result of checksum_text().
std::optional<std::uint64_t> parse_checksum(std::string_view text);

}  // namespace rz
