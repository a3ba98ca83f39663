#pragma once
/// Treatment of a parameter that was used on no rank.

#include <string_view>

namespace rz {

/// Named after the framework with that behaviour.
enum class UnusedParameterPolicy {
  pytorch,   ///< the update skips it: no weight decay, no momentum, and its first update is still to come
  deepspeed  ///< it is updated with a zero gradient: weight decay and momentum apply
};
/// "pytorch", "deepspeed".
const char* name(UnusedParameterPolicy);
/// Errc::config lists the valid names.
UnusedParameterPolicy unused_parameter_policy_from_name(std::string_view);

}  // namespace rz
