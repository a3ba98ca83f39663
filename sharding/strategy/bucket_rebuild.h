#pragma once
/// Buckets in the order in which gradients become ready.

#include <cstdint>
#include <vector>

#include "comm/communicator.h"

namespace rz {

/// After the first update, decides once on the order in which gradients became ready on rank 0 (Li et al.,
/// PyTorch Distributed, doi:10.14778/3415478.3415530).
class BucketRebuild {
 public:
  explicit BucketRebuild(bool enabled) : progress_(enabled ? Progress::pending : Progress::done) {}

  /// Call after an update.
  void after_step(const std::vector<int>& ready_order);
  /// Whether to form new buckets now. Every rank then calls take_order().
  bool due() const { return progress_ == Progress::due; }
  /// Whether the buckets follow that order by now.
  bool made() const { return made_; }
  /// The order of members on rank 0. Collective; once.
  std::vector<int> take_order(Communicator&);

 private:
  enum class Progress { pending, due, done } progress_;
  bool made_ = false;
  std::vector<std::int32_t> order_;
};

}  // namespace rz
