#include "sharding/io/checksum.h"

#define XXH_INLINE_ALL
#include <xxhash.h>

#include <charconv>

namespace rz {

struct Checksum::State {
  State() { XXH3_64bits_reset(&xxh3); }
  XXH3_state_t xxh3;
};

Checksum::Checksum() : state_(std::make_unique<State>()) {}
Checksum::~Checksum() = default;
Checksum::Checksum(Checksum&&) noexcept = default;
Checksum& Checksum::operator=(Checksum&&) noexcept = default;

void Checksum::add(std::span<const std::byte> bytes) {
  XXH3_64bits_update(&state_->xxh3, bytes.data(), bytes.size());
}

std::uint64_t Checksum::value() const { return XXH3_64bits_digest(&state_->xxh3); }

std::string checksum_text(std::uint64_t checksum) {
  constexpr std::string_view digits = "0123456789abcdef";
  std::string text(16, '0');
  for (std::size_t i = 0; i < text.size(); ++i) text[i] = digits[checksum >> (60 - 4 * i) & 15];
  return text;
}

std::optional<std::uint64_t> parse_checksum(std::string_view text) {
  std::uint64_t value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value, 16);
  if (error != std::errc() || checksum_text(value) != text) return std::nullopt;
  return value;
}

}  // namespace rz
