#include "sharding/strategy/model_averager.h"

#include <algorithm>
#include <unordered_map>

#include "comm/core/error.h"
#include "tensor/ops.h"

namespace rz {

PeriodicModelAverager::PeriodicModelAverager(Strategy& strategy, Module& module, Communicator& communicator,
                                             const PeriodicModelAveragerOptions& options)
    : strategy_(strategy),
      module_(module),
      communicator_(communicator),
      options_(options),
      stream_(Stream::create(communicator.options().device)) {
  require(strategy.kind() == StrategyKind::ddp, Errc::unsupported,
          "PeriodicModelAverager: ", name(strategy.kind()),
          " has no replicas that differ, as its state is sharded; choose ddp");
  require(options.period >= 1, Errc::invalid_argument, "PeriodicModelAverager: period is ", options.period,
          ", expected 1 or more");
  require(options.warmup_steps >= 0, Errc::invalid_argument, "PeriodicModelAverager: warmup_steps is ",
          options.warmup_steps, ", expected 0 or more");
}

bool PeriodicModelAverager::is_due() const {
  return step_ >= options_.warmup_steps && (step_ - options_.warmup_steps) % options_.period == 0;
}

void PeriodicModelAverager::average_parameters() {
  if (is_due()) average();
  ++step_;
}

/// On the host. Frozen parameters are equal already.
Tensor PeriodicModelAverager::mean_of(const Parameter& p) {
  const Tensor own = strategy_.values().whole(p, stream_);
  const Tensor mean = Tensor::empty(p.shape, DType::f32, communicator_.allocator());
  ops::copy(mean, own, stream_);
  if (p.requires_grad && p.count() > 0)
    communicator_.all_reduce(mean.buffer(), ReduceOp::avg, stream_).wait_on(stream_);
  return mean.on_host(stream_);
}

void PeriodicModelAverager::average() {
  std::unordered_map<const Parameter*, Tensor> means;
  for (const Parameter* p : module_.parameters()) means[p] = mean_of(*p);
  strategy_.values().fill([&](const Parameter& p, Range elements, float* out) {
    std::copy_n(means.at(&p).data<float>() + elements.begin, elements.count(), out);
  });
}

}  // namespace rz
