#include "bench/support/numbers.h"

#include <cstdarg>
#include <cstdio>

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

}  // namespace rz::bench
