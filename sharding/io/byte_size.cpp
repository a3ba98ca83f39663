#include "sharding/io/byte_size.h"

#include <charconv>
#include <utility>

namespace rz {

std::optional<std::uint64_t> parse_byte_size(std::string_view text) {
  constexpr std::pair<std::string_view, std::uint64_t> units[] = {{"", 1},
                                                                  {"KB", 1000},
                                                                  {"MB", 1'000'000},
                                                                  {"GB", 1'000'000'000},
                                                                  {"TB", 1'000'000'000'000},
                                                                  {"KiB", std::uint64_t{1} << 10},
                                                                  {"MiB", std::uint64_t{1} << 20},
                                                                  {"GiB", std::uint64_t{1} << 30},
                                                                  {"TiB", std::uint64_t{1} << 40}};
  std::uint64_t value = 0, bytes = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc()) return std::nullopt;
  const std::string_view unit(end, text.data() + text.size());
  for (const auto& [name, factor] : units)
    if (unit == name && !__builtin_mul_overflow(value, factor, &bytes)) return bytes;
  return std::nullopt;
}

}  // namespace rz
