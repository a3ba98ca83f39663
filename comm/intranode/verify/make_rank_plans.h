#pragma once
/// Makes the plans that the verifier (verify.h) checks, of the functions that the engine runs: plans
/// (call_plan.h), bytes (call_layout.h) and rounds (rounds.h). Pure.

#include <cstddef>
#include <span>
#include <vector>

#include "comm/intranode/plan/call_plan.h"
#include "comm/intranode/verify/rank_plan.h"

namespace rz::intranode {

/// How a call accesses memory: staged; staged after an exchange of handles; in place; or by CMA, which the
/// kernel may refuse, so that the call is staged after all.
enum class MemoryAccess : std::uint8_t {
  staged,
  staged_after_exchange,
  zero_copy,
  single_copy,
  single_copy_refused
};

/// One call of all ranks. Elements are bytes.
struct CallCase {
  Collective kind = Collective::barrier;
  std::size_t bytes = 0;  ///< of count_per_rank() elements
  int root = 0;
  MemoryAccess access = MemoryAccess::staged;
  bool in_place = false;
  tuning::IntranodeAlgorithm algorithm;  ///< two_shot and chunk count
  std::vector<AllToAllVCounts> counts;   ///< of an all_to_all_v, by rank
};

/// The node that the calls run on.
struct NodeCase {
  int size = 1;
  std::size_t ring_bytes = 1 << 20;  ///< of every rank's staging ring
  bool oversubscribed = false;
  StepNumber first_step = 0;
};

/// The plans of all ranks, as the engine runs them. Errc::invalid_argument if the rounds of a call are not
/// well-defined: a move that may come next must stay possible until it runs, and all must run.
std::vector<RankPlan> make_rank_plans(std::span<const CallCase>, const NodeCase&);

}  // namespace rz::intranode
