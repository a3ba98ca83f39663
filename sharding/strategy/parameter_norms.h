#pragma once
/// Norms of whole parameters and their updates, for optimizers of grain parameter.

#include <span>
#include <vector>

#include "sharding/model/runtime.h"
#include "sharding/model/sharded_model.h"
#include "sharding/optim/optimizer.h"
#include "sharding/strategy/device_constants.h"
#include "sharding/strategy/update_spans.h"
#include "sharding/strategy/update_tiles.h"

namespace rz {

/// Sums the squares of the elements that each rank updates, exactly, and adds them over the ranks in one
/// small all_reduce an update; none if the state is replicated.
class ParameterNorms {
 public:
  /// Both must outlive the object.
  ParameterNorms(const ShardedModel& model, Runtime& runtime) : model_(model), runtime_(runtime) {}

  /// Advances the state of the members that the filter accepts, and sets the norms of the scale, which are
  /// valid until the next call. Collective; on a device the host does not wait.
  void measure(const Optimizer&, UpdateTiles&, UpdateSpans&, std::span<const MemberUpdate>,
               const DeviceConstants&, UpdateScale&, const std::function<bool(int member)>& filter,
               const Stream&);

 private:
  void add_over_ranks(const Stream&);

  const ShardedModel& model_;
  Runtime& runtime_;
  std::vector<ExactSum> sums_;  // two a member
  std::vector<std::int64_t> words_;
  std::vector<SquaredNorms> norms_;
  Tensor device_sums_, device_norms_;
};

}  // namespace rz
