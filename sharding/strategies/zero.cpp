#include "sharding/strategies/zero.h"

namespace rz {

Zero::Zero(StrategyKind kind, Module& module, Communicator& communicator, StrategyOptions options)
    : Strategy(kind, module, communicator, std::move(options)),
      values_(communicator, precision().parameters, members(), frozen(), stream()) {
  set_layout(plan_member_buckets(members(), precision().gradients, bucket_options()));
  values_.move_to_layout(layout(), stream());
  const auto whole = kind == StrategyKind::zero1 ? ShardedGradients::FullGradients::persistent
                                                 : ShardedGradients::FullGradients::transient;
  gradients_ = std::make_unique<ShardedGradients>(whole, communicator, transient(), layout(), members(),
                                                  [this](const Work& work) { wait_exposed(work, stream()); });
}

Zero::~Zero() { abort_in_flight(); }

Strategy::Updated Zero::updated(int bucket) const {
  const Range own = updated_range(bucket);
  return {values_.bucket(bucket).view(own.begin, {own.count()}), gradients_->shard(bucket)};
}

Work Zero::publish(int bucket, const Stream& stream) {
  const Tensor& values = values_.bucket(bucket);
  return communicator().all_gather(updated(bucket).values.buffer(), values.buffer(), stream);
}

void Zero::count_memory(MemoryReport& report) const {
  report.parameters = values_.bytes();
  report.gradients = gradients_->bytes();
}

}  // namespace rz
