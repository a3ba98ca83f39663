#include "comm/core/byte_size.h"

#include <algorithm>
#include <cstdint>

#include "comm/core/error.h"
#include "comm/core/text.h"

namespace rz {
namespace {

/// 0 if there is no such unit.
std::size_t factor_of(std::string_view unit) {
  if (unit.empty() || unit == "B") return 1;
  constexpr std::string_view prefixes = "KMGTkmgt";
  const std::size_t prefix = prefixes.find(unit[0]);
  if (prefix == prefixes.npos) return 0;
  const std::size_t power = prefix % 4 + 1;
  if (unit.size() == 1) return std::size_t{1} << (10 * power);
  if (prefix >= 4) return 0;
  if (unit.substr(1) == "iB") return std::size_t{1} << (10 * power);
  if (unit.substr(1) != "B") return 0;
  std::size_t factor = 1;
  for (std::size_t i = 0; i < power; ++i) factor *= 1000;
  return factor;
}

}  // namespace

std::optional<std::size_t> parse_byte_size(std::string_view text) {
  const std::size_t end = std::min(text.find_first_not_of("0123456789."), text.size());
  const std::string_view number = text.substr(0, end);
  const std::size_t factor = factor_of(text.substr(end));
  if (factor == 0) return std::nullopt;
  std::size_t bytes = 0;
  if (const auto whole = parse_number<std::size_t>(number))
    return __builtin_mul_overflow(*whole, factor, &bytes) ? std::nullopt : std::optional(bytes);
  const auto real = parse_number<double>(number);
  if (!real || factor == 1 || number.find('.') == number.npos ||
      *real * static_cast<double>(factor) >= 0x1p64)
    return std::nullopt;
  return static_cast<std::size_t>(*real * static_cast<double>(factor));
}

std::string exact_byte_size(std::size_t bytes) {
  constexpr const char* units[] = {"", "K", "M", "G"};
  int unit = 0;
  while (unit < 3 && bytes > 0 && bytes % 1024 == 0) bytes /= 1024, ++unit;
  return concat(bytes, units[unit]);
}

std::size_t byte_size_of_flag(std::string_view flag, std::string_view text, std::size_t min) {
  const auto bytes = parse_byte_size(text);
  require(bytes && *bytes >= min, Errc::config, flag, ": '", text,
          "' is no size; write bytes, or as in 64K, 16GiB or 80GB");
  return *bytes;
}

}  // namespace rz
