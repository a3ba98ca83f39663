#pragma once
/// Description of how the intra-node engine runs a call, for Communicator::explain().

#include "comm/explain.h"
#include "comm/intranode/plan/call_plan.h"

namespace rz::intranode {

/// Describes the choice for a message of `bytes`, of the whole buffer. `reachable`: all ranks have mapped its
/// buffers. Pure.
AlgorithmChoice explain_intranode(Collective, std::size_t bytes, int size, const tuning::IntranodeAlgorithm&,
                                  const StagingLimits&, bool reachable);

}  // namespace rz::intranode
