#pragma once
/// The list of algorithms. To add one: write its schedule in a file of this folder, and one line in list.inc.

#include <span>
#include <string_view>

#include "comm/schedule.h"

namespace rz {

struct Algorithm {
  Collective collective;
  const char* name;
  ScheduleFunction schedule;
  bool rank_order;  ///< sums in rank order; the verifier holds the list to it
};

/// Every algorithm of the library.
std::span<const Algorithm> algorithms();

/// By name; Errc::config lists the names that the collective has.
const Algorithm& find_algorithm(Collective, std::string_view name);

}  // namespace rz
