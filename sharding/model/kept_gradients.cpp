#include "sharding/model/kept_gradients.h"

#include "comm/device/allocate.h"
#include "sharding/model/gradient_buckets.h"
#include "tensor/ops.h"

namespace rz {

KeptGradients::KeptGradients(const ModelParameters& parameters, const FlatLayout& layout, DType dtype,
                             GradientWire& wire, Runtime& runtime)
    : parameters_(parameters), wire_(wire) {
  for (const Tensor& whole : allocate_gradient_buckets(parameters, layout, dtype, runtime)) {
    const Range own = layout.shard(static_cast<int>(buckets_.size()));
    buckets_.push_back({whole, whole.view(own.begin, {own.count()}), {}, {}});
  }
}

Work KeptGradients::reduce(int bucket, const Stream& stream) {
  Bucket& b = buckets_[static_cast<std::size_t>(bucket)];
  b.reduction = wire_.reduce_scatter(b.whole, b.shard, stream);
  in_flight_.push_back(bucket);
  return b.reduction.work;
}

void KeptGradients::settle(const Stream& stream) {
  for (const int bucket : in_flight_) {
    Bucket& b = buckets_[static_cast<std::size_t>(bucket)];
    wire_.finish(b.reduction, b.shard, stream);
    if (b.accumulated.defined()) ops::add(b.shard, b.shard, b.accumulated, stream);
  }
  in_flight_.clear();
}

void KeptGradients::reopen(const Stream& stream) {
  for (Bucket& b : buckets_) {
    if (!b.accumulated.defined())
      b.accumulated = Tensor::empty(b.shard.shape(), b.shard.dtype(), allocator_on(b.shard.device()));
    ops::copy(b.accumulated, b.shard, stream);
  }
  for (Parameter* p : parameters_.members()) p->grad_is_fresh = true;
}

void KeptGradients::forget() {
  for (Bucket& b : buckets_) b.accumulated = {};
}

std::size_t KeptGradients::bytes() const {
  std::size_t total = 0;
  for (const Bucket& b : buckets_)
    total += b.whole.bytes() + (b.accumulated.defined() ? b.accumulated.bytes() : 0);
  return total;
}

}  // namespace rz
