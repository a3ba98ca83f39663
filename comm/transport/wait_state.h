#pragma once
/// What one call waits for, for error messages and for the wait-for graph.

#include <string>

#include "comm/transport/wait_for_graph.h"

namespace rz {

struct WaitState {
  RankSet waiting_on;  ///< the peers that the call waits for
  int suspect = -1;    ///< one of them, the furthest behind; -1: none
  std::string text;    ///< "rank 2 to send, rank 3 to receive", or "nobody"
};

}  // namespace rz
