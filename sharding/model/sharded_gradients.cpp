#include "sharding/model/sharded_gradients.h"

#include <utility>

#include "tensor/ops.h"

namespace rz {

namespace {
constexpr std::size_t max_in_flight = 1;  // buckets being reduced while another one is filled
}

ShardedGradients::ShardedGradients(const ModelParameters& parameters, const FlatLayout& layout, DType dtype,
                                   GradientWire& wire, Runtime& runtime)
    : parameters_(parameters), layout_(layout), wire_(wire), runtime_(runtime) {
  for (int b = 0; b < layout.size(); ++b) {
    buckets_.push_back({});
    drop_whole(b);
    at(b).shard = runtime.allocate_flat(layout.shard(b).count(), dtype);
  }
}

Tensor ShardedGradients::own_part(int bucket) const {
  const Range own = layout_.shard(bucket);
  return buckets_[static_cast<std::size_t>(bucket)].whole.view(own.begin, {own.count()});
}

/// The shard, or, if that holds a mean to which this one is added, a part of the whole gradients.
Tensor ShardedGradients::destination(int bucket) {
  return at(bucket).has_mean ? own_part(bucket) : at(bucket).shard;
}

void ShardedGradients::set_whole(int bucket, Tensor whole) {
  for (const int m : layout_.bucket(bucket).members) {
    Parameter& p = parameters_.member(m);
    p.grad = whole.view(layout_.place(m).offset, p.shape);
    p.grad_is_fresh = true;
  }
  at(bucket).whole = std::move(whole);
}

void ShardedGradients::drop_whole(int bucket) {
  at(bucket).whole = {};
  for (const int m : layout_.bucket(bucket).members) {
    Parameter& p = parameters_.member(m);
    p.grad = {};
    p.grad_is_fresh = true;
  }
}

void ShardedGradients::provide(int bucket, const Stream& stream) {
  if (at(bucket).whole.defined()) return;
  while (!in_flight_.empty() &&
         (in_flight_.size() > max_in_flight || at(in_flight_.front()).reduction.work.done()))
    complete_oldest(stream);
  set_whole(bucket, runtime_.transient.allocate({layout_.bucket(bucket).count}, at(bucket).shard.dtype()));
}

Work ShardedGradients::reduce(int bucket, const Stream& stream) {
  Bucket& b = at(bucket);
  b.reduction = wire_.reduce_scatter(b.whole, destination(bucket), stream);
  in_flight_.push_back(bucket);
  return b.reduction.work;
}

void ShardedGradients::complete_oldest(const Stream& stream) {
  const int bucket = in_flight_.front();
  Bucket& b = at(bucket);
  wire_.finish(b.reduction, destination(bucket), stream);
  in_flight_.pop_front();
  if (b.has_mean) ops::add(b.shard, b.shard, own_part(bucket), stream);
  b.has_mean = true;
  drop_whole(bucket);
}

void ShardedGradients::settle(const Stream& stream) {
  while (!in_flight_.empty()) complete_oldest(stream);
}

void ShardedGradients::forget() {
  for (int b = 0; b < layout_.size(); ++b) {
    at(b).has_mean = false;
    drop_whole(b);
  }
}

std::size_t ShardedGradients::bytes() const {
  std::size_t total = 0;
  for (const Bucket& b : buckets_) total += b.shard.bytes();
  return total;
}

}  // namespace rz
