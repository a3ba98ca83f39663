#include "sharding/strategies/sharded_gradients.h"

#include "comm/device/allocate.h"
#include "sharding/strategies/replicated_values.h"
#include "tensor/ops.h"

namespace rz {

namespace {
constexpr std::size_t max_in_flight = 1;  // transient buckets being reduced while another one is filled
}

ShardedGradients::ShardedGradients(FullGradients mode, Communicator& communicator, TransientMemory memory,
                                   const BucketLayout& layout, std::vector<Parameter*> members, Wait wait)
    : mode_(mode), communicator_(communicator), memory_(std::move(memory)), wait_(std::move(wait)) {
  for (const auto& planned : layout.buckets) {
    Bucket b;
    b.count = planned.count;
    b.dtype = planned.dtype;
    b.own_range = shard_range(planned.count, communicator.rank(), communicator.size());
    for (const int m : planned.members) {
      b.members.push_back(members[static_cast<std::size_t>(m)]);
      b.offsets.push_back(layout.offsets[static_cast<std::size_t>(m)].offset);
    }
    if (mode == FullGradients::persistent) {
      set_full(b, allocate_flat(communicator, b.count, b.dtype));
      b.shard = b.full.view(b.own_range.begin, {b.own_range.count()});
    } else {
      drop_full(b);
      b.shard = allocate_flat(communicator, b.own_range.count(), b.dtype);
    }
    buckets_.push_back(std::move(b));
  }
}

void ShardedGradients::set_full(Bucket& b, Tensor whole) {
  b.full = std::move(whole);
  for (std::size_t i = 0; i < b.members.size(); ++i) {
    b.members[i]->grad = b.full.view(b.offsets[i], b.members[i]->shape);
    b.members[i]->grad_is_fresh = true;
  }
}

void ShardedGradients::drop_full(Bucket& b) {
  b.full = {};
  for (Parameter* p : b.members) p->grad = {}, p->grad_is_fresh = true;
}

void ShardedGradients::ensure_storage(int bucket, const Stream& stream) {
  Bucket& b = at(bucket);
  if (b.full.defined()) return;
  while (!in_flight_.empty() &&
         (in_flight_.size() > max_in_flight || at(in_flight_.front()).reduction.done()))
    complete_oldest(stream);
  set_full(b, memory_.allocate({b.count}, b.dtype));
}

Work ShardedGradients::reduce(int bucket, const Stream& stream) {
  Bucket& b = at(bucket);
  const bool in_place = mode_ == FullGradients::persistent || b.has_mean;
  const Tensor out = in_place ? b.full.view(b.own_range.begin, {b.own_range.count()}) : b.shard;
  b.reduction = communicator_.reduce_scatter(b.full.buffer(), out.buffer(), ReduceOp::avg, stream);
  in_flight_.push_back(bucket);
  return b.reduction;
}

void ShardedGradients::complete_oldest(const Stream& stream) {
  Bucket& b = at(in_flight_.front());
  wait_(b.reduction);
  b.reduction = {};
  in_flight_.pop_front();
  if (mode_ == FullGradients::persistent) {
    if (b.accumulated.defined()) ops::add(b.shard, b.shard, b.accumulated, stream);
    return;
  }
  if (b.has_mean) ops::add(b.shard, b.shard, b.full.view(b.own_range.begin, {b.own_range.count()}), stream);
  b.has_mean = true;
  drop_full(b);
}

void ShardedGradients::finish_reductions(const Stream& stream) {
  while (!in_flight_.empty()) complete_oldest(stream);
}

void ShardedGradients::carry_over(const Stream& stream) {
  if (mode_ == FullGradients::transient) return;
  for (Bucket& b : buckets_) {
    if (!b.accumulated.defined())
      b.accumulated = Tensor::empty(b.shard.shape(), b.shard.dtype(), allocator_on(b.shard.device()));
    ops::copy(b.accumulated, b.shard, stream);
    for (Parameter* p : b.members) p->grad_is_fresh = true;
  }
}

void ShardedGradients::drop() {
  for (Bucket& b : buckets_) {
    b.accumulated = {};
    b.has_mean = false;
    if (mode_ == FullGradients::transient) drop_full(b);
  }
}

const Tensor& ShardedGradients::shard(int bucket) const {
  return buckets_[static_cast<std::size_t>(bucket)].shard;
}

std::size_t ShardedGradients::bytes() const {
  std::size_t total = 0;
  for (const Bucket& b : buckets_)
    total += (mode_ == FullGradients::persistent ? b.full : b.shard).bytes() +
             (b.accumulated.defined() ? b.accumulated.bytes() : 0);
  return total;
}

}  // namespace rz
