#pragma once
/// A sequence of calls of the intra-node engine as data, and its proof, like that of schedules (verify.h):
/// what a rank publishes, reads, reduces and acknowledges, and in which order. The plans are made by the
/// functions that the engine runs: plans and bytes (call_plan.h), and rounds (rounds.h). Pure.

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "comm/intranode/plan/call_plan.h"
#include "comm/intranode/plan/rounds.h"

namespace rz::intranode {

// ---- plans

/// Bytes that a move reads: of a rank's input, or of what it published at a step.
struct PlannedSource {
  enum Place : std::uint8_t { input, published };
  Place place = input;
  int rank = 0;
  StepNumber step = 0;
  std::size_t offset = 0;
};

/// Bytes that a move writes: the sum of the operands, in this order, or a copy of one.
struct PlannedPart {
  static constexpr int own_slot = -1, all_outputs = -2;
  int to = own_slot;  ///< what the move publishes; the outputs of all ranks; or the output of that rank
  std::size_t offset = 0, bytes = 0;
  std::vector<PlannedSource> operands;
};

struct PlannedPoll {
  int peer = 0;
  StepNumber step = 0;
};

/// Moves of one kind run in order. A move runs when those of `after` have run, the polled steps are
/// published, and its reservation is granted.
struct PlannedMove {
  enum Kind : std::uint8_t { contribute, reduce, read };
  Kind kind = read;
  std::size_t round = 0;  ///< number among the moves of that kind in its phase
  RoundCounts after;      ///< moves of this rank and phase
  std::vector<PlannedPoll> polls;
  std::vector<PlannedPart> parts;

  std::uint32_t slots = 0;     ///< published; 0: none
  StepNumber step = 0;         ///< of the first of them
  bool reserves = true;        ///< waits until the slots may be overwritten
  bool writes_ring = false;    ///< and the ring bytes
  std::size_t ring_bytes = 0;  ///< reserved; 0: the payload is in the slots
};

/// Once these moves of the phase have run, the rank acknowledges all steps before this one.
struct PlannedAck {
  StepNumber before = 0;
  RoundCounts after;
  bool deferred = false;  ///< written at most 16 steps later, or before the rank blocks
};

/// Part of a call; the next one begins when all moves of this one have run.
struct PlannedPhase {
  std::size_t call = 0;
  std::size_t window = 0;  ///< of the staging ring, set when it begins; 0: as before
  std::vector<PlannedMove> moves;
  std::vector<PlannedAck> acks;
};

/// What one rank does in a sequence of calls.
struct RankPlan {
  std::vector<PlannedPhase> phases;
};

// ---- calls

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

// ---- proof

/// The plans of all ranks, as the engine runs them. Errc::invalid_argument if the rounds of a call are not
/// well-defined: a move that may come next must stay possible until it runs, and all must run.
std::vector<RankPlan> make_rank_plans(std::span<const CallCase>, const NodeCase&);

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
