#include "sharding/sharded_gradients.h"

#include "comm/core/allocate.h"
#include "sharding/replicated_values.h"
#include "tensor/ops.h"

namespace rz {

namespace {
constexpr std::size_t most_in_flight = 1;  // transient buckets under reduction while another one is filled
}

ShardedGradients::ShardedGradients(Whole mode, Communicator& communicator, TransientMemory memory,
                                   const BucketLayout& layout, std::vector<Parameter*> members, Wait wait)
    : mode_(mode), communicator_(communicator), memory_(std::move(memory)), wait_(std::move(wait)) {
  for (const auto& planned : layout.buckets) {
    Bucket b;
    b.count = planned.count;
    b.dtype = planned.dtype;
    b.own = part(planned.count, communicator.rank(), communicator.size());
    for (const int m : planned.members) {
      b.members.push_back(members[static_cast<std::size_t>(m)]);
      b.offsets.push_back(layout.places[static_cast<std::size_t>(m)].offset);
    }
    if (mode == Whole::kept) {
      set_whole(b, flat_memory(communicator, b.count, b.dtype));
      b.shard = b.whole.view(b.own.begin, {b.own.count()});
    } else {
      drop_whole(b);
      b.shard = flat_memory(communicator, b.own.count(), b.dtype);
    }
    buckets_.push_back(std::move(b));
  }
}

void ShardedGradients::set_whole(Bucket& b, Tensor whole) {
  b.whole = std::move(whole);
  for (std::size_t i = 0; i < b.members.size(); ++i) {
    b.members[i]->grad = b.whole.view(b.offsets[i], b.members[i]->shape);
    b.members[i]->grad_is_fresh = true;
  }
}

void ShardedGradients::drop_whole(Bucket& b) {
  b.whole = {};
  for (Parameter* p : b.members) p->grad = {}, p->grad_is_fresh = true;
}

void ShardedGradients::provide(int bucket, const Stream& stream) {
  Bucket& b = at(bucket);
  if (b.whole.defined()) return;
  while (!in_flight_.empty() &&
         (in_flight_.size() > most_in_flight || at(in_flight_.front()).reduction.done()))
    retire_oldest(stream);
  set_whole(b, memory_.take({b.count}, b.dtype));
}

Work ShardedGradients::reduce(int bucket, const Stream& stream) {
  Bucket& b = at(bucket);
  const bool in_place = mode_ == Whole::kept || b.has_mean;
  const Tensor out = in_place ? b.whole.view(b.own.begin, {b.own.count()}) : b.shard;
  b.reduction = communicator_.reduce_scatter(b.whole.buffer(), out.buffer(), ReduceOp::avg, stream);
  in_flight_.push_back(bucket);
  return b.reduction;
}

void ShardedGradients::retire_oldest(const Stream& stream) {
  Bucket& b = at(in_flight_.front());
  wait_(b.reduction);
  b.reduction = {};
  in_flight_.pop_front();
  if (mode_ == Whole::kept) {
    if (b.carried.defined()) ops::add(b.shard, b.shard, b.carried, stream);
    return;
  }
  if (b.has_mean) ops::add(b.shard, b.shard, b.whole.view(b.own.begin, {b.own.count()}), stream);
  b.has_mean = true;
  drop_whole(b);
}

void ShardedGradients::settle(const Stream& stream) {
  while (!in_flight_.empty()) retire_oldest(stream);
}

void ShardedGradients::reopen(const Stream& stream) {
  if (mode_ == Whole::transient) return;
  for (Bucket& b : buckets_) {
    if (!b.carried.defined())
      b.carried = Tensor::empty(b.shard.shape(), b.shard.dtype(), allocator_on(b.shard.device()));
    ops::copy(b.carried, b.shard, stream);
    for (Parameter* p : b.members) p->grad_is_fresh = true;
  }
}

void ShardedGradients::forget() {
  for (Bucket& b : buckets_) {
    b.carried = {};
    b.has_mean = false;
    if (mode_ == Whole::transient) drop_whole(b);
  }
}

const Tensor& ShardedGradients::shard(int bucket) const {
  return buckets_[static_cast<std::size_t>(bucket)].shard;
}

std::size_t ShardedGradients::bytes() const {
  std::size_t total = 0;
  for (const Bucket& b : buckets_)
    total +=
        (mode_ == Whole::kept ? b.whole : b.shard).bytes() + (b.carried.defined() ? b.carried.bytes() : 0);
  return total;
}

}  // namespace rz
