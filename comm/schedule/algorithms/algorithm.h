#pragma once
/// The list of algorithms. To add one: write its schedule in a file of this folder, and one line in list.inc.

#include <span>
#include <string_view>

#include "comm/schedule/schedule.h"

namespace rz {

enum Trait : unsigned {
  hierarchical = 1,      ///< pays only where some ranks share a host and others do not
  contiguous_nodes = 2,  ///< only where each host holds consecutive ranks
  rounds_partials = 4    ///< partial sums in rank order are stored: small floats are rounded on the way
};

struct Algorithm {
  Collective collective;
  const char* name;
  ScheduleFunction schedule;
  bool rank_order;      ///< sums in rank order; the verifier holds the list to it
  unsigned traits = 0;  ///< Trait, joined by |
  bool is(Trait t) const { return (traits & t) != 0; }
};

/// Every algorithm of the library.
std::span<const Algorithm> algorithms();

/// By name; Errc::config lists the names that the collective has.
const Algorithm& find_algorithm(Collective, std::string_view name);

}  // namespace rz
