#include "comm/tuning/overrides.h"

#include <algorithm>

#include "comm/core/error.h"
#include "comm/tuning/select.h"

namespace rz::tuning {

namespace {

bool is_known_algorithm(Collective c, const std::string& name) {
  Rule registered{c, Scope::intra_node_registered, ""}, cma{c, Scope::intra_node_cma, ""},
      any{c, Scope::intra_node, ""};
  if (name == "zero_copy") return set_algorithm(registered, name);
  if (name == "single_copy") return set_algorithm(cma, name);
  return set_algorithm(any, name) && !any.is_schedule;
}

void check(Collective c, const std::string& name, bool deterministic, ReductionOrder order) {
  require(!algorithm_choices(c, Scope::inter_node).empty(), Errc::config, rz::name(c), " takes no algorithm");
  if (is_known_algorithm(c, name)) return;
  Rule rule{c, Scope::intra_node, ""};
  const std::string choices = algorithm_choices(c, Scope::intra_node);
  require(set_algorithm(rule, name), Errc::config, rz::name(c), " has no algorithm '", name,
          "'; choose one of ", choices,
          is_known_algorithm(c, "zero_copy") ? ", or within a node zero_copy" : "",
          is_known_algorithm(c, "single_copy") ? " or single_copy" : "");
  select({.collective = c,
          .deterministic = deterministic,
          .override_name = rule.algorithm,
          .order = order});  // throws if it does not reduce in that order
}

}  // namespace

AlgorithmOverrides::AlgorithmOverrides(const std::string& text, bool deterministic, ReductionOrder order) {
  if (text.empty()) return;
  const bool one = text.find('=') == std::string::npos;
  for (std::size_t begin = 0; begin <= text.size();) {
    const std::size_t end = std::min(text.find(',', begin), text.size());
    const std::string entry = text.substr(begin, end - begin);
    const std::size_t equals = one ? std::string::npos : entry.find('=');
    require(one || equals != std::string::npos, Errc::config, "'", entry, "' of the forced algorithms '",
            text, "' is not COLLECTIVE=ALGORITHM");
    const Collective c = one ? Collective::all_reduce : collective_from_name(entry.substr(0, equals));
    const std::string name = one ? entry : entry.substr(equals + 1);
    check(c, name, deterministic, order);
    require(names_[static_cast<std::size_t>(c)].empty(), Errc::config, "the forced algorithms '", text,
            "': ", rz::name(c), " is there twice");
    names_[static_cast<std::size_t>(c)] = name;
    begin = end + 1;
  }
}

bool AlgorithmOverrides::is_of_a_node(Collective c) const {
  Rule schedule{c, Scope::inter_node, ""};
  return is_known_algorithm(c, of(c)) && !set_algorithm(schedule, schedule_of(c));
}

std::string AlgorithmOverrides::schedule_of(Collective c) const {
  constexpr std::string_view schedule_override = "schedule:";
  return of(c).starts_with(schedule_override) ? of(c).substr(schedule_override.size()) : of(c);
}

}  // namespace rz::tuning
