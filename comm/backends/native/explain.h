#pragma once
/// The algorithm of a call and the reason, for Communicator::explain().

#include <cstddef>
#include <string>

#include "comm/backends/native/schedule_engine.h"
#include "comm/explain.h"
#include "comm/intranode/engine.h"

namespace rz {

struct ExplainQuery {
  Collective kind;
  std::size_t bytes;  ///< of the larger of a rank's input and output
  bool reachable;     ///< the buffers are registered on all ranks
  DType dtype;
  ReduceOp op;
  int size;               ///< of the group
  std::string transport;  ///< Transport::describe()
};

/// `intranode` is null unless all ranks share memory. Thread safe.
AlgorithmChoice explain_call(const ExplainQuery&, const ScheduleEngine&, const intranode::Engine* intranode);

}  // namespace rz
