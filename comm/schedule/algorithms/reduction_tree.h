#pragma once
/// The tree of the pairwise order (ReductionOrder) over ranks, for the schedules of this folder.
///
/// A node of the tree is a block of ranks [b, b + 2^k), cut off at the group's size, with b a multiple of
/// 2^k. One of its ranks holds its sum: `target` if that is in the block, so the result ends there. In other
/// blocks target's low bits choose, so blocks of one size distribute the work of different targets.

#include "comm/schedule/schedule.h"

namespace rz::schedule {

/// What a rank does where two blocks of `half` ranks become one.
struct Merge {
  enum Kind : unsigned char { none, sends, adds };
  Kind kind = none;
  int peer = -1;           ///< holder of the other block's sum
  bool partial = false;    ///< the other block has several ranks
  bool from_left = false;  ///< that block is the left one
};

/// `half`: a power of two less than the group's size.
Merge merge_at(RankContext, int target, int half);

/// A rank's part in a whole reduction tree: it adds the operands from the left, and sends the sum to
/// `parent`; -1 at the target.
struct ReductionNode {
  std::vector<Operand> operands;
  int parent = -1;
};
ReductionNode reduction_node(RankContext, int target, Operand mine);

}  // namespace rz::schedule
