#pragma once
/// Hooks on the parameters of a model.

#include <span>
#include <vector>

#include "autograd_lite/hooks.h"

namespace rz {

/// Owns the hooks of parameters, from its construction to its destruction.
class InstalledHooks {
 public:
  /// Errc::invalid_argument names a parameter that has the hooks of another owner, who must be destroyed
  /// first. The parameters must outlive this object.
  InstalledHooks(std::span<Parameter* const>, ParameterHooks);
  ~InstalledHooks();
  InstalledHooks(const InstalledHooks&) = delete;

 private:
  std::vector<Parameter*> parameters_;
  ParameterHooks hooks_;
};

}  // namespace rz
