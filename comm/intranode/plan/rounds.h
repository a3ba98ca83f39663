#pragma once
/// Order of the rounds of a call on one rank: which move may come next, the steps at which it sends and
/// reads, and what it may acknowledge. The engine advances these values, and the verifier
/// (tests/proof/rank_plans.h) explores all states that they can reach.
///
/// A rank has three kinds of moves: it contributes (sends its own bytes), reduces (reads all contributions
/// and sends a result), and reads (the last time that it needs the bytes of a round).

#include <algorithm>
#include <cstddef>

#include "comm/intranode/mailbox/slot_protocol.h"
#include "comm/intranode/plan/call_plan.h"
#include "comm/transport/mailbox.h"

namespace rz::intranode {

/// Rounds that a rank has completed, by kind of move.
struct RoundCounts {
  std::size_t contributed = 0, reduced = 0, read = 0;
  bool operator==(const RoundCounts&) const = default;
};

/// Rounds of one_shot: every rank sends contribution k at one step (or slots() steps), and reads those of its
/// sources. A rank without a contribution publishes empty slots, so that all mailboxes cover the same steps.
struct OneShotRounds {
  StepNumber first = 0;  ///< step of the first contribution
  std::size_t chunks = 1;
  std::uint32_t slots = 1;  ///< of a contribution; 1 unless there is one chunk
  RoundCounts done;

  StepNumber contribution_step(std::size_t k) const { return first + static_cast<StepNumber>(k) * slots; }
  StepNumber end_step() const { return contribution_step(chunks); }
  /// A rank stays within half the depth of its reads, since offsets are known of the last 256 steps only.
  bool can_contribute() const {
    return done.contributed < chunks && done.contributed < done.read + mailbox_depth / 2;
  }
  bool can_reduce() const { return false; }
  bool can_read() const { return done.read < done.contributed; }
  bool complete() const { return done.read == chunks; }
  /// This rank no longer needs what its peers published before this step.
  StepNumber acked() const { return contribution_step(done.read); }
};

/// Rounds of two_shot: rank r reduces shard r, then all ranks gather the shards. Steps of contributions (A)
/// and results (B) alternate: A0, A1, B0, A2, B1, …, so that a rank reduces one chunk while its peers read
/// the one before.
struct TwoShotRounds {
  StepNumber first = 0;
  std::size_t chunks = 1;
  RoundCounts done;

  StepNumber contribution_step(std::size_t k) const {
    return first + static_cast<StepNumber>(k + (k > 0 ? k - 1 : 0));
  }
  StepNumber result_step(std::size_t k) const {
    return first + static_cast<StepNumber>(std::min(k + 2, chunks) + k);
  }
  StepNumber end_step() const { return first + 2 * static_cast<StepNumber>(chunks); }
  StepNumber next_step() const { return first + static_cast<StepNumber>(done.contributed + done.reduced); }
  bool can_contribute() const {
    return done.contributed < chunks && next_step() == contribution_step(done.contributed);
  }
  bool can_reduce() const {
    return done.reduced < done.contributed && next_step() == result_step(done.reduced);
  }
  bool can_read() const { return done.read < done.reduced; }
  bool complete() const { return done.read == chunks; }
  StepNumber acked() const {
    if (complete()) return end_step();
    const StepNumber result = result_step(done.read);
    if (done.reduced == chunks) return result;
    const StepNumber contribution = contribution_step(done.reduced);
    return is_after(contribution, result) ? result : contribution;
  }
};

/// Rounds of zero_copy and single_copy: a rank accesses its peers' buffers, and then publishes an empty slot,
/// the end of its accesses. It completes when all ranks have done so.
struct InPlaceRounds {
  StepNumber first = 0;  ///< step of that slot
  std::size_t chunks = 1;
  RoundCounts done;  // read: rounds of accesses

  bool can_access() const { return done.read < chunks; }
  StepNumber end_step() const { return first + 1; }
};

}  // namespace rz::intranode
