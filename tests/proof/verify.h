#pragma once
/// Proof of a schedule: runs it on all ranks at once, symbolically.

#include <span>
#include <string>

#include "comm/schedule/schedule.h"

namespace rz::schedule {

/// Which ranks make their calls in place. `any`: every combination.
enum class InPlace : unsigned char { none, all, any };

/// Result of verify().
struct Verification {
  std::string error;  ///< empty: proved correct
  /// Reductions only: every element is ((x0 + x1) + x2) + … in rank order, whatever its chunk, so that
  /// results do not depend on the division into chunks.
  bool rank_order = false;
  /// The same for the pairwise order (ReductionOrder). Up to three ranks both hold.
  bool pairwise_order = false;
  /// In one of these orders, and no partial sum is stored: 8- and 16-bit floats are rounded once.
  bool rounded_once = false;
  int depth = 0;  ///< messages in the longest chain of dependent ones
  explicit operator bool() const { return error.empty(); }
};

/// Proves for one group size, root, placement of ranks on nodes and RankContext::order:
///   - every chunk of the output ends with the value that the collective defines;
///   - sent and received chunks match;
///   - every reduced element includes every rank's contribution exactly once and has passed one final step;
///   - the operands of its sums are marked as partial if they are;
///   - all ranks that hold a result hold the same expression (a + b equals b + a), hence the same bits;
///   - there is no deadlock, even if no message is ever buffered;
///   - nothing is written while it may still be read, and `input` is never written (out of place).
/// All of this for the schedule as written and after elide_scratch_copies(). The error names rank, step and
/// chunk, or is the message of an exception of the schedule function.
Verification verify(ScheduleFunction, Collective, int size, int root, InPlace,
                    std::span<const int> node_of_rank = {}, ReductionOrder = ReductionOrder::rank);

}  // namespace rz::schedule
