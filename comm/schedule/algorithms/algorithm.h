#pragma once
/// The list of algorithms. To add one, write its schedule in a file of this folder and add a line to
/// list.inc.

#include <span>
#include <string_view>

#include "comm/schedule/schedule.h"

namespace rz::schedule {

enum Trait : unsigned {
  hierarchical = 1,      ///< useful only for several nodes, some of which have several ranks
  contiguous_nodes = 2,  ///< requires consecutive ranks on each node
  rounds_partials = 4,   ///< stores partial sums, which rounds 8- and 16-bit floats at each
  pairwise_order = 8     ///< reduces in pairwise order if RankContext::order is; the tests check it
};

struct Algorithm {
  Collective collective;
  const char* name;
  ScheduleFunction schedule;
  bool rank_order;      ///< reduces in rank order if RankContext::order is; the tests check it with verify()
  unsigned traits = 0;  ///< bitwise or of Trait
  bool is(Trait t) const { return (traits & t) != 0; }
  bool reduces_in(ReductionOrder order) const {
    return order == ReductionOrder::rank ? rank_order : is(pairwise_order);
  }
};

/// Every algorithm of the library, with static lifetime. Thread safe.
std::span<const Algorithm> algorithms();

/// The algorithm of that name; Errc::config, with the valid names, if there is none.
const Algorithm& find_algorithm(Collective, std::string_view name);

}  // namespace rz::schedule
