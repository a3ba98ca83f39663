#include "sharding/zero.h"

namespace rz {

Zero::Zero(StrategyKind kind, Module& module, Communicator& communicator, StrategyOptions options)
    : Strategy(kind, module, communicator, std::move(options)),
      values_(communicator, members(), frozen()),
      memory_(communicator.allocator(), [this] { stream().synchronize(); }) {
  set_layout(plan_member_buckets(members(), bucket_options()));
  values_.place(layout(), stream());
  const auto whole =
      kind == StrategyKind::zero1 ? ShardedGradients::Whole::kept : ShardedGradients::Whole::transient;
  gradients_ = std::make_unique<ShardedGradients>(whole, communicator, memory_, layout(), members(),
                                                  [this](const Work& work) { wait_exposed(work, stream()); });
}

Zero::~Zero() { abandon(); }

Strategy::Updated Zero::updated(int bucket) {
  const Tensor& values = values_.bucket(bucket);
  const Range own = part(values.count(), communicator().rank(), communicator().size());
  return {own, values.view(own.begin, {own.count()}), gradients_->shard(bucket)};
}

Work Zero::publish(int bucket, const Stream& stream) {
  const Tensor& values = values_.bucket(bucket);
  const Range own = updated(bucket).range;
  return communicator().all_gather(values.view(own.begin, {own.count()}).buffer(), values.buffer(), stream);
}

void Zero::count_memory(MemoryReport& report) const {
  report.parameters = values_.bytes();
  report.gradients = gradients_->bytes();
  report.transient = memory_.held();
  report.transient_in_use = memory_.in_use();
  report.transient_peak = memory_.peak();
}

}  // namespace rz
