#include "sharding/strategy/bucket_rebuild.h"

namespace rz {

void BucketRebuild::after_step(const std::vector<int>& ready_order) {
  if (progress_ != Progress::pending) return;
  progress_ = Progress::due;
  order_.assign(ready_order.begin(), ready_order.end());
}

std::vector<int> BucketRebuild::take_order(Communicator& communicator) {
  progress_ = Progress::done;
  made_ = true;
  communicator.broadcast(Buffer(order_.data(), order_.size()), 0).wait();
  return {order_.begin(), order_.end()};
}

}  // namespace rz
