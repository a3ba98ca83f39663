#pragma once
/// What becomes of a parameter that no loss reached on any rank.

#include <string_view>

namespace rz {

enum class UnusedParameterPolicy {
  pytorch,   ///< the update skips it: no weight decay, no momentum, and its first update is still to come
  deepspeed  ///< it is updated with a gradient of zero: weight decay and momentum act on it
};
const char* name(UnusedParameterPolicy);
/// Errc::config names the choices.
UnusedParameterPolicy unused_parameter_policy_from_name(std::string_view);

}  // namespace rz
