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
};

/// Never fails for a collective of the library; Errc::config if the forced name does not exist or, with
/// `deterministic`, does not sum in rank order.
const Algorithm& select(const Question&);

}  // namespace rz
