#pragma once
/// A kind of strategy and its options choose the parts of a strategy.

#include "sharding/model/flat_layout.h"
#include "sharding/model/options.h"
#include "sharding/parallel/mesh_sizes.h"

namespace rz {

/// zero1 shards optimizer state, zero2 gradients too, zero3 values too.
ShardingPlan plan_of(StrategyKind);

/// The options. Errc::invalid_argument for a precision that does not exist, and for what the plan has not.
StrategyOptions checked(StrategyOptions, const ShardingPlan&);
/// The mesh on which a strategy with these options trains: one of shards alone is cut into blocks of
/// zero_hpz_partition_size. Errc::invalid_argument if they contradict each other.
MeshSizes mesh_of(const MeshSizes&, const StrategyOptions&);
/// The place in what values are divided by: with zero_hpz_partition_size, all data ranks.
MeshCoordinates divided_at(const MeshCoordinates&, const StrategyOptions&);

}  // namespace rz
