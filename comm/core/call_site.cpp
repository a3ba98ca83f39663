#include "comm/core/call_site.h"

#include <string_view>

#include "comm/core/text.h"

namespace rz {

std::string at(const CallSite& site) {
  if (site.line() == 0) return {};
  const std::string_view path = site.file_name();
  return concat(" at ", path.substr(path.rfind('/') + 1), ":", site.line());
}

}  // namespace rz
