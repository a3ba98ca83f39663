#include "sharding/model/whole_gradients.h"

#include "comm/device/allocate.h"
#include "sharding/model/gradient_buckets.h"
#include "tensor/ops.h"

namespace rz {

WholeGradients::WholeGradients(const ModelParameters& parameters, const FlatLayout& layout, DType dtype,
                               GradientWire& wire, CommunicationHook* hook, Runtime& runtime)
    : parameters_(parameters),
      wire_(wire),
      hook_(hook),
      runtime_(runtime),
      buckets_(allocate_gradient_buckets(parameters, layout, dtype, runtime)),
      reductions_(buckets_.size()) {
  if (!hook) return;
  hook->require_supported(dtype, runtime.stream.device());
  hook_buckets_ = hook_buckets(parameters, layout);
}

std::vector<HookBucket> WholeGradients::hook_buckets(const ModelParameters& parameters,
                                                     const FlatLayout& layout) const {
  std::vector<HookBucket> out;
  for (int b = 0; b < layout.size(); ++b) {
    out.push_back({b, buckets_[static_cast<std::size_t>(b)], {}});
    for (const int m : layout.bucket(b).members)
      out.back().parts.push_back({m, layout.place(m).offset, parameters.member(m).shape});
  }
  return out;
}

Work WholeGradients::reduce(int bucket, const Stream& stream) {
  const auto b = static_cast<std::size_t>(bucket);
  in_flight_.push_back(bucket);
  if (hook_) return hook_->start(hook_buckets_[b], runtime_, stream);
  reductions_[b] = wire_.all_reduce(buckets_[b], stream);
  return reductions_[b].work;
}

/// A round for each call of the hook, so that the calls of different buckets overlap.
void WholeGradients::advance_hook(const Stream& stream) {
  advancing_ = in_flight_;
  while (!advancing_.empty())
    std::erase_if(advancing_, [&](int bucket) {
      return !hook_->advance(hook_buckets_[static_cast<std::size_t>(bucket)], runtime_, stream);
    });
}

void WholeGradients::settle(const Stream& stream) {
  if (hook_) advance_hook(stream);
  for (const int bucket : in_flight_) {
    const auto b = static_cast<std::size_t>(bucket);
    if (!hook_) wire_.finish(reductions_[b], buckets_[b], stream);
    if (!accumulated_.empty()) ops::add(buckets_[b], buckets_[b], accumulated_[b], stream);
  }
  in_flight_.clear();
}

void WholeGradients::reopen(const Stream& stream) {
  accumulated_.resize(buckets_.size());
  for (std::size_t b = 0; b < buckets_.size(); ++b) {
    if (!accumulated_[b].defined())
      accumulated_[b] =
          Tensor::empty(buckets_[b].shape(), buckets_[b].dtype(), allocator_on(buckets_[b].device()));
    ops::copy(accumulated_[b], buckets_[b], stream);
  }
  for (Parameter* p : parameters_.members()) p->grad_is_fresh = true;
}

void WholeGradients::forget() {
  accumulated_.clear();
  in_flight_.clear();
}

std::size_t WholeGradients::bytes() const {
  std::size_t total = 0;
  for (const auto* list : {&buckets_, &accumulated_})
    for (const Tensor& b : *list) total += b.bytes();
  return total;
}

}  // namespace rz
