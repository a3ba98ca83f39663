#include "bench/support/numbers.h"

#include <cmath>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>

#include "comm/core/error.h"

namespace rz::bench {

std::string format(const char* pattern, ...) {
  std::va_list arguments, again;
  va_start(arguments, pattern);
  va_copy(again, arguments);
  std::string text(static_cast<std::size_t>(std::vsnprintf(nullptr, 0, pattern, arguments)), '\0');
  std::vsnprintf(text.data(), text.size() + 1, pattern, again);
  va_end(arguments);
  va_end(again);
  return text;
}

std::string fit(double value, int width) {
  for (int decimals : {2, 1, 0})
    if (auto text = format("%*.*f", width, decimals, value); static_cast<int>(text.size()) <= width)
      return text;
  return format("%*.*e", width, width >= 7 ? 1 : 0, value);
}

std::size_t parse_size(std::string_view text, std::string_view flag) {
  const std::string copy(text);
  char* end = nullptr;
  double value = std::strtod(copy.c_str(), &end);
  std::string_view unit = std::string_view(copy).substr(static_cast<std::size_t>(end - copy.c_str()));
  constexpr std::string_view units = "KMGT";
  if (!unit.empty())
    if (const auto i = units.find(static_cast<char>(unit[0] & ~0x20)); i != std::string_view::npos) {
      value *= std::pow(1024.0, static_cast<double>(i + 1));
      unit.remove_prefix(1);
      if (unit == "B" || unit == "b" || unit == "iB") unit = {};
    }
  require(end != copy.c_str() && unit.empty() && value >= 0 && value < 1e18, Errc::config, flag, ": '", text,
          "' is no size; write bytes, or a number with K, M, G or T");
  return static_cast<std::size_t>(value);
}

}  // namespace rz::bench
