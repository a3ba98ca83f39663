#include "comm/backends/layout.h"

#include <algorithm>

namespace rz {

namespace {

/// Chunks are even parts of one shard, else whole shards.
bool is_split_evenly(Collective c) { return traits(c).in == Extent::shard && traits(c).out == Extent::shard; }

}  // namespace

Layout::Layout(const Operation& op, int rank, int size, int chunks)
    : op_(&op),
      rank_(static_cast<std::size_t>(rank)),
      size_(static_cast<std::size_t>(size)),
      chunks_(static_cast<std::size_t>(chunks)),
      element_(op.kind == Collective::barrier ? 1 : size_of(op.out.data ? op.out.dtype : op.in.dtype)),
      each_(op.kind == Collective::barrier ? 1 : common_count(op, size) * element_) {}

// Cuts lie on cache lines where there is enough to cut.
Layout::ByteRange Layout::even_cut(int chunk) const {
  const std::size_t count = each_ / element_;
  const std::size_t line = count >= chunks_ * 64 ? 64 / element_ : 1;
  const auto cut = [&](std::size_t c) { return c == chunks_ ? count : count / line * c / chunks_ * line; };
  const auto c = static_cast<std::size_t>(chunk);
  return {cut(c) * element_, cut(c + 1) * element_};
}

std::size_t Layout::bytes(int chunk) const {
  if (is_split_evenly(op_->kind)) {
    const ByteRange e = even_cut(chunk);
    return e.end - e.begin;
  }
  if (op_->kind == Collective::all_to_all_v) {
    const std::size_t from = static_cast<std::size_t>(chunk) / size_,
                      to = static_cast<std::size_t>(chunk) % size_;
    return element_ * (from == rank_ ? op_->pairs->send_counts[to] : op_->pairs->recv_counts[from]);
  }
  return each_;
}

const std::byte* Layout::input(int chunk) const {
  const auto* base = static_cast<const std::byte*>(op_->in.data);
  const auto c = static_cast<std::size_t>(chunk);
  const CollectiveTraits& t = traits(op_->kind);
  if (is_split_evenly(op_->kind)) return base + even_cut(chunk).begin;
  if (t.in == Extent::by_counts) return base + op_->pairs->send_offsets[c % size_] * element_;
  if (t.in == Extent::shard) return base;
  return base + (t.out == Extent::shard_per_rank ? c % size_ : c) * each_;
}

std::byte* Layout::output(int chunk) const {
  auto* base = static_cast<std::byte*>(op_->out.data);
  const auto c = static_cast<std::size_t>(chunk);
  const CollectiveTraits& t = traits(op_->kind);
  if (is_split_evenly(op_->kind)) return base + even_cut(chunk).begin;
  if (t.out == Extent::by_counts) return base + op_->pairs->recv_offsets[c / size_] * element_;
  if (t.out == Extent::shard) return base;
  return base + (t.in == Extent::shard_per_rank ? c / size_ : c) * each_;
}

std::size_t Layout::largest() const {
  if (op_->kind == Collective::all_to_all_v) return 0;
  std::size_t most = 0;
  if (!is_split_evenly(op_->kind)) return each_;
  for (std::size_t c = 0; c < chunks_; ++c) most = std::max(most, bytes(static_cast<int>(c)));
  return most;
}

}  // namespace rz
