#pragma once
/// Proof of the plans of the intra-node engine, like that of schedules (comm/schedule/schedule.h): runs all
/// ranks' plans symbolically.

#include <span>
#include <string>

#include "comm/intranode/verify/make_rank_plans.h"

namespace rz::intranode {

/// The first error, which names a rank and a step; empty if the plans of these calls, of all ranks, are
/// proved:
/// - In every interleaving that acknowledgements permit, no rank reads bytes or polls a slot before they are
///   published, or after they may have been overwritten; there is no deadlock.
/// - All ranks reserve the same bytes at the same steps, and write within them.
/// - Each output byte is written once. It has the bytes of its source, or all ranks' are
///   reduced, listed by rank.
/// - No rank completes a call while a peer may access its buffers.
std::string verify_plans(std::span<const RankPlan>, std::span<const CallCase>, const NodeCase&);

}  // namespace rz::intranode
