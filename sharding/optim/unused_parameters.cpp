#include "sharding/optim/unused_parameters.h"

#include "comm/core/error.h"

namespace rz {

const char* name(UnusedParameterPolicy choice) {
  return choice == UnusedParameterPolicy::pytorch ? "pytorch" : "deepspeed";
}

UnusedParameterPolicy unused_parameter_policy_from_name(std::string_view text) {
  for (const UnusedParameterPolicy choice :
       {UnusedParameterPolicy::pytorch, UnusedParameterPolicy::deepspeed})
    if (text == name(choice)) return choice;
  fail(Errc::config, "unknown choice for unused parameters \"", text, "\"; choose pytorch or deepspeed");
}

}  // namespace rz
