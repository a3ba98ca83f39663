#include "sharding/unreached.h"

#include "comm/core/error.h"

namespace rz {

const char* name(Unreached choice) { return choice == Unreached::pytorch ? "pytorch" : "deepspeed"; }

Unreached unreached_from_name(std::string_view text) {
  for (const Unreached choice : {Unreached::pytorch, Unreached::deepspeed})
    if (text == name(choice)) return choice;
  fail(Errc::config, "unknown choice for unreached parameters \"", text, "\"; choose pytorch or deepspeed");
}

}  // namespace rz
