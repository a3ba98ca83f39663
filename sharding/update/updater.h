#pragma once
/// Update of the values that a rank owns.

#include <span>
#include <vector>

#include "sharding/optim/optimizer.h"
#include "sharding/runtime/runtime.h"
#include "sharding/stores/sharded_model.h"
#include "sharding/update/device_constants.h"
#include "sharding/update/member_updates.h"

namespace rz {

/// Owns the optimizer state, and updates and publishes values bucket by bucket.
class Updater {
 public:
  /// All references must outlive the updater. `overlap`: publish a bucket while the next one is updated.
  Updater(ShardedModel&, MemberUpdates&, bool overlap, Runtime&);

  /// Updates all values from the means of the gradients. Collective. Errc::mismatch if the optimizers of the
  /// ranks differ.
  void update(Optimizer&, const UpdateScale&, const Stream&);
  /// On a device: counts the next update in the optimizer, and writes its constants to device memory.
  void prepare(Optimizer&, const Stream&);
  /// Follows ShardedModel::rebucket().
  void move_state(const BucketLayout& before);
  /// Bytes of the optimizer state; 0 before the first update.
  std::size_t bytes() const;

 private:
  void make_state(const Optimizer&);
  void require_same_optimizer(const Optimizer&, const Stream&);
  void update_bucket(int bucket, const Optimizer&, std::span<const MemberUpdate>, const UpdateScale&,
                     const Stream&);
  void make_spans(int bucket, std::span<const MemberRun>);

  ShardedModel& model_;
  MemberUpdates& members_;
  bool overlap_;
  Runtime& runtime_;
  std::vector<std::vector<Tensor>> state_;  // [state][bucket], updated range only
  DeviceConstants constants_;
  bool same_optimizer_ = false;  // optimizers were compared and are equal on all ranks
  // Kept so that an update allocates nothing.
  std::vector<MemberRun> runs_;
  std::vector<UpdateSpan> spans_;
  std::vector<Work> published_;
};

}  // namespace rz
