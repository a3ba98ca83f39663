#include "autograd_lite/module.h"

#include <set>
#include <string_view>

namespace rz {

void require_distinct_names(std::span<Parameter* const> parameters) {
  std::set<std::string_view> names;
  for (const Parameter* p : parameters)
    require(names.insert(p->name).second, Errc::invalid_argument, "two parameters are called ", p->name,
            "; give every layer a name of its own");
}

}  // namespace rz
