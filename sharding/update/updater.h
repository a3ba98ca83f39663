#pragma once
/// Update of the values that a rank owns.

#include <span>
#include <vector>

#include "sharding/optim/optimizer.h"
#include "sharding/runtime/runtime.h"
#include "sharding/stores/sharded_model.h"
#include "sharding/update/device_constants.h"
#include "sharding/update/matrix_directions.h"
#include "sharding/update/member_updates.h"
#include "sharding/update/optimizer_state.h"
#include "sharding/update/parameter_norms.h"
#include "sharding/update/update_spans.h"
#include "sharding/update/update_tiles.h"

namespace rz {

/// Owns the optimizer state, and updates and publishes values bucket by bucket, a bucket tile by tile. The
/// tiles of LAMB are measured before any is updated. Muon orthogonalizes whole matrices, before the tiles.
class Updater {
 public:
  /// All references must outlive the updater. `overlap`: publish a bucket while the next one is updated.
  /// `sub_group_size`: maximum of elements in a tile; results do not depend on it.
  Updater(ShardedModel&, MemberUpdates&, bool overlap, std::size_t sub_group_size, Runtime&);

  /// Updates all values from the means of the gradients. Collective. Errc::mismatch if the optimizers of the
  /// ranks differ.
  void update(Optimizer&, const UpdateScale&, const Stream&);
  /// On a device: counts the next update in the optimizer, and writes its constants to device memory.
  void prepare(Optimizer&, const Stream&);
  /// Allocates the state of the optimizer unless it is there. Errc::invalid_argument if the state is another
  /// optimizer's.
  OptimizerState& state(const Optimizer&);
  /// The state; empty before the first update.
  OptimizerState& state() { return state_; }
  const OptimizerState& state() const { return state_; }

 private:
  void bind(const Optimizer&);
  bool has(const Optimizer&, Grain) const;
  void require_same_optimizer(const Optimizer&, const Stream&);
  void update_bucket(int bucket, const Optimizer&, std::span<const MemberUpdate>, const UpdateScale&,
                     const Stream&);

  ShardedModel& model_;
  MemberUpdates& members_;
  bool overlap_;
  Runtime& runtime_;
  OptimizerState state_;
  UpdateSpans spans_;
  UpdateTiles tiles_;
  ParameterNorms norms_;
  MatrixDirections directions_;
  DeviceConstants constants_;
  std::uint64_t bound_ = 0;             // serial number of the optimizer that settings_ and state_ belong to
  std::vector<MemberUpdate> settings_;  // by member
  bool same_optimizer_ = false;         // optimizers were compared and are equal on all ranks
  std::vector<Work> published_;         // kept so that an update allocates nothing
};

}  // namespace rz
