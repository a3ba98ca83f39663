#pragma once
/// What the ranks of a group share out.

namespace rz {

/// `replicated`: every rank holds all elements. `sharded`: each rank holds its shard of every bucket.
enum class Placement { replicated, sharded };

/// Placement of the three kinds of memory of Rajbhandari et al., doi:10.1109/SC41405.2020.00024. Sharded
/// values or gradients require a sharded state, since a rank updates the elements whose state it holds.
struct ShardingPlan {
  Placement values = Placement::replicated;
  Placement gradients = Placement::replicated;  ///< after the reduction
  Placement state = Placement::replicated;      ///< optimizer state and masters
  bool operator==(const ShardingPlan&) const = default;
};

}  // namespace rz
