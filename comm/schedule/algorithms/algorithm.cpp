#include "comm/schedule/algorithms/algorithm.h"

#include <vector>

#include "comm/core/error.h"

namespace rz::schedule {

#define RZ_ALGORITHM(collective, name, ...) Schedule name##_##collective(RankContext);
#include "comm/schedule/algorithms/list.inc"
#undef RZ_ALGORITHM

namespace {

constexpr Algorithm list[] = {
#define RZ_ALGORITHM(collective, name, ...) {Collective::collective, #name, name##_##collective, __VA_ARGS__},
#include "comm/schedule/algorithms/list.inc"
#undef RZ_ALGORITHM
};

}  // namespace

std::span<const Algorithm> algorithms() { return list; }

const Algorithm& find_algorithm(Collective collective, std::string_view name) {
  std::string choices;
  for (const Algorithm& a : list) {
    if (a.collective != collective) continue;
    if (name == a.name) return a;
    choices += concat(choices.empty() ? "" : ", ", a.name);
  }
  require(!choices.empty(), Errc::config, rz::name(collective),
          " is no scheduled collective and has no algorithms");
  fail(Errc::config, rz::name(collective), " has no algorithm '", name, "'; choose one of ", choices);
}

}  // namespace rz::schedule
