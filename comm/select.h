#pragma once
/// The whole tuning table: which algorithm a call takes, as a pure function of what is known on every rank.

#include <cstddef>
#include <string>

#include "comm/algorithms/algorithm.h"

namespace rz {

struct Question {
  Collective collective;
  std::size_t bytes = 0;  ///< of the whole buffer: the larger of a rank's input and output
  int size = 1;
  bool one_host = true;       ///< all ranks share memory
  bool deterministic = true;  ///< only algorithms that sum in rank order
  std::string forced;         ///< a name, or empty
  int hosts = 1;              ///< of the group, if it has several; as many as ranks: none is shared
  bool in_a_row = true;       ///< each host holds consecutive ranks
  bool rounds = false;        ///< storing a partial sum may round it: sums of small floats
};

/// Never fails for a collective of the library; Errc::config if the forced name does not exist, does not
/// serve this placement on hosts or, with `deterministic`, does not sum in rank order.
const Algorithm& select(const Question&);

}  // namespace rz
