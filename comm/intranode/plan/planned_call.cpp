#include "comm/intranode/plan/planned_call.h"

#include <algorithm>
#include <cstring>

namespace rz::intranode {

namespace {

constexpr std::size_t min_nontemporal_bytes = 96 << 20;  // of all ranks' buffers: exceeds the caches

}  // namespace

void OutputStores::reduce(std::byte* to, std::byte* too, std::span<const void*> operands,
                          std::size_t bytes) const {
  if (!nontemporal) return reduce_block(to, too, operands, bytes);
  std::byte buffer[block_bytes];
  for (std::size_t at = 0; at < bytes; at += block_bytes) {
    const std::size_t n = std::min(block_bytes, bytes - at);
    std::byte* const near = too ? too + at : buffer;
    reduce_block(near, nullptr, operands, n);
    copy_nontemporal(to + at, near, n);
    for (auto& s : operands) s = static_cast<const std::byte*>(s) + n;
  }
}

void OutputStores::copy(std::byte* to, const std::byte* from, std::size_t bytes) const {
  if (bytes == 0 || to == from) return;
  nontemporal ? copy_nontemporal(to, from, bytes) : void(std::memcpy(to, from, bytes));
}

PlannedCall CallPlanner::plan(const CollectiveCall& op) const {
  const Collective kind = op.kind;
  const bool moves_bytes = kind != Collective::barrier;
  PlannedCall c{.op = &op};
  c.layout.ranks = CallRanks(kind, rank_, size_, op.root);
  c.layout.element_bytes = moves_bytes ? size_of(op.dtype()) : 1;
  c.layout.total_bytes = moves_bytes ? count_per_rank(op, size_) * c.layout.element_bytes : 0;
  const std::size_t bytes = c.layout.total_bytes;
  c.algorithm = &table_.find(kind, message_bytes(kind, bytes, size_));
  c.plan = plan_call(kind, bytes, size_, *c.algorithm, limits_);
  c.contribution = c.plan.contribution_reservation(size_, c.ranks().is_sender);
  c.in_place = plan_in_place(Protocol::zero_copy, kind, bytes, size_);
  c.defers_ack = may_defer_ack(c.plan, kind, size_, ring_bytes_);
  const bool samples =
      !limits_.oversubscribed || c.algorithm->single_copy != tuning::SingleCopyPolicy::adaptive;
  c.single_copy = samples ? c.algorithm->single_copy : tuning::SingleCopyPolicy::never;
  const std::size_t whole = c.plan.per_peer ? c.plan.shard_bytes * static_cast<std::size_t>(size_) : bytes;
  c.exceeds_caches = 2 * static_cast<std::size_t>(size_) * whole >= min_nontemporal_bytes;
  c.stores.element_bytes = c.layout.element_bytes;
  c.stores.mean.ranks = op.op.kind == ReduceOp::avg ? size_ : 1;
  if (traits(kind).reduces) c.stores.kernel = reduce_kernel(op.dtype(), op.op.kind, table_.order());
  return c;
}

void CallPlanner::divide(PlannedCall& c, std::size_t max_count) const {
  c.plan.shard_bytes = max_count * c.layout.element_bytes;
  c.plan.chunking = chunk_shard(c.plan, size_, c.algorithm->chunk, limits_);
  c.contribution = c.plan.contribution_reservation(size_, c.ranks().is_sender);
}

const tuning::IntranodeAlgorithm* CallPlanner::find_schedule(const CollectiveCall& op) const {
  const std::size_t bytes = count_per_rank(op, size_) * size_of(op.dtype());
  const tuning::IntranodeAlgorithm& entry = table_.find(op.kind, message_bytes(op.kind, bytes, size_));
  return entry.schedule ? &entry : nullptr;
}

}  // namespace rz::intranode
