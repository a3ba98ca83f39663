#include "comm/core/fixed.h"

#include <charconv>
#include <system_error>

#include "comm/core/text.h"

namespace rz {

std::string fixed(double value, int decimals) {
  char text[512];
  const auto end = std::to_chars(text, text + sizeof text, value, std::chars_format::fixed, decimals);
  return end.ec == std::errc() ? std::string(text, end.ptr) : concat(value);
}

}  // namespace rz
