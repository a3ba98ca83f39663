#include "sharding/strategy/installed_hooks.h"

#include <utility>

#include "comm/core/error.h"

namespace rz {

InstalledHooks::InstalledHooks(std::span<Parameter* const> parameters, ParameterHooks hooks)
    : parameters_(parameters.begin(), parameters.end()), hooks_(std::move(hooks)) {
  for (const Parameter* p : parameters_)
    require(!p->hooks, Errc::invalid_argument, "parameter ", p->name, " is managed by ",
            p->hooks ? p->hooks->owner : "", "; destroy that before ", hooks_.owner, " is made for it");
  for (Parameter* p : parameters_) p->hooks = &hooks_;
}

InstalledHooks::~InstalledHooks() {
  for (Parameter* p : parameters_) p->hooks = nullptr;
}

}  // namespace rz
