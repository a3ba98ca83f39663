#include "comm/collective.h"

namespace rz {

CallList::CallList(std::span<const CollectiveCall> calls) {
  calls_.reserve(calls.size());
  for (const CollectiveCall& call : calls) add(call);
}

CollectiveCall& CallList::add(const CollectiveCall& call) {
  CollectiveCall& own = calls_.emplace_back(call);
  if (call.counts) own.counts = &counts_.emplace_front(*call.counts);
  return own;
}

std::size_t count_per_rank(const CollectiveCall& op, int size) {
  const CollectiveTraits& t = traits(op.kind);
  if (t.point_to_point) return 0;
  if (t.out == Extent::shard && !t.out_at_root) return op.out.count;
  if (t.in == Extent::shard) return op.in.count;
  return t.in == Extent::shard_per_rank ? op.in.count / static_cast<std::size_t>(size) : 0;
}

bool in_place(const CollectiveCall& op, int rank, int size) {
  const CollectiveTraits& t = traits(op.kind);
  const auto* in = static_cast<const std::byte*>(op.in.data);
  const auto* out = static_cast<const std::byte*>(op.out.data);
  if (!in || !out || (t.in != Extent::shard && t.out != Extent::shard)) return false;
  const std::size_t part = count_per_rank(op, size) * size_of(op.out.dtype) * static_cast<std::size_t>(rank);
  return in + (t.in == Extent::shard_per_rank ? part : 0) ==
         out + (t.out == Extent::shard_per_rank ? part : 0);
}

}  // namespace rz
