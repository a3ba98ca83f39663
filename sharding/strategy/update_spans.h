#pragma once
/// Spans of a tile for calls of an optimizer.

#include <functional>
#include <span>
#include <vector>

#include "sharding/model/partition.h"
#include "sharding/model/sharded_model.h"
#include "sharding/optim/optimizer.h"
#include "sharding/strategy/optimizer_state.h"
#include "sharding/strategy/tile.h"

namespace rz {

/// Describes the elements that this rank updates.
class UpdateSpans {
 public:
  /// Both must outlive the object.
  UpdateSpans(const ShardedModel& model, const OptimizerState& state) : model_(model), state_(state) {}

  /// Some of the elements of a tile. Members that missed the same number of updates are one call.
  struct Call {
    std::span<const UpdateSpan> spans;
    std::int64_t missed;
    int first;  ///< the first member
  };
  /// The calls of a tile for the members that the filter accepts, if there is one. `directions`: those of the
  /// whole bucket, or null. Valid until the next call.
  std::span<const Call> calls(const Tile&, const TileMemory&, std::span<const MemberUpdate>,
                              float* directions = nullptr,
                              const std::function<bool(int member)>& filter = {});

 private:
  UpdateSpan span(const MemberRun&, const Tile&, const TileMemory&, float* directions) const;

  const ShardedModel& model_;
  const OptimizerState& state_;
  // Kept so that an update allocates nothing.
  std::vector<MemberRun> runs_;
  std::vector<UpdateSpan> spans_;
  std::vector<Call> calls_;
};

}  // namespace rz
