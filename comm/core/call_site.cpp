#include "comm/core/call_site.h"

#include <string_view>

#include "comm/core/text.h"

namespace rz {

#ifdef __cpp_lib_source_location

std::uint32_t CallSite::line() const noexcept { return std::bit_cast<std::source_location>(*this).line(); }
const char* CallSite::file_name() const noexcept {
  return std::bit_cast<std::source_location>(*this).file_name();
}
const char* CallSite::function_name() const noexcept {
  return std::bit_cast<std::source_location>(*this).function_name();
}

#else

std::uint32_t CallSite::line() const noexcept { return 0; }
const char* CallSite::file_name() const noexcept { return "?"; }
const char* CallSite::function_name() const noexcept { return "?"; }

#endif

std::string at(const CallSite& site) {
  if (site.line() == 0) return {};
  const std::string_view path = site.file_name();
  return concat(" at ", path.substr(path.rfind('/') + 1), ":", site.line());
}

}  // namespace rz
