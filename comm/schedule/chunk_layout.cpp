#include "comm/schedule/chunk_layout.h"

#include <algorithm>

namespace rz::schedule {

namespace {

/// True if the chunks are an even division of the buffer; else each chunk is a shard.
bool is_split_evenly(Collective c) { return traits(c).in == Extent::shard && traits(c).out == Extent::shard; }

}  // namespace

ChunkLayout::ChunkLayout(const CollectiveCall& op, int rank, int size, int chunks)
    : op_(&op),
      rank_(static_cast<std::size_t>(rank)),
      size_(static_cast<std::size_t>(size)),
      chunks_(static_cast<std::size_t>(chunks)),
      element_(op.kind == Collective::barrier ? 1 : size_of(op.dtype())),
      chunk_bytes_(op.kind == Collective::barrier ? 1 : count_per_rank(op, size) * element_) {}

// Chunks begin at cache lines if there are at least 64 elements per chunk.
Range ChunkLayout::even_split(int chunk) const {
  const std::size_t count = chunk_bytes_ / element_;
  const std::size_t line = count >= chunks_ * 64 ? 64 / element_ : 1;
  const auto cut = [&](std::size_t c) { return c == chunks_ ? count : count / line * c / chunks_ * line; };
  const auto c = static_cast<std::size_t>(chunk);
  return {cut(c) * element_, cut(c + 1) * element_};
}

std::size_t ChunkLayout::bytes(int chunk) const {
  if (is_split_evenly(op_->kind)) return even_split(chunk).count();
  if (op_->kind == Collective::all_to_all_v) {
    const std::size_t from = static_cast<std::size_t>(chunk) / size_,
                      to = static_cast<std::size_t>(chunk) % size_;
    return element_ * (from == rank_ ? op_->counts->send_counts[to] : op_->counts->recv_counts[from]);
  }
  return chunk_bytes_;
}

const std::byte* ChunkLayout::input(int chunk) const {
  const auto* base = static_cast<const std::byte*>(op_->in.data);
  const auto c = static_cast<std::size_t>(chunk);
  const CollectiveTraits& t = traits(op_->kind);
  if (is_split_evenly(op_->kind)) return base + even_split(chunk).begin;
  if (t.in == Extent::by_counts) return base + op_->counts->send_offsets[c % size_] * element_;
  if (t.in == Extent::shard) return base;
  return base + (t.out == Extent::shard_per_rank ? c % size_ : c) * chunk_bytes_;
}

std::byte* ChunkLayout::output(int chunk) const {
  auto* base = static_cast<std::byte*>(op_->out.data);
  const auto c = static_cast<std::size_t>(chunk);
  const CollectiveTraits& t = traits(op_->kind);
  if (is_split_evenly(op_->kind)) return base + even_split(chunk).begin;
  if (t.out == Extent::by_counts) return base + op_->counts->recv_offsets[c / size_] * element_;
  if (t.out == Extent::shard) return base;
  return base + (t.in == Extent::shard_per_rank ? c / size_ : c) * chunk_bytes_;
}

std::size_t ChunkLayout::largest() const {
  if (op_->kind == Collective::all_to_all_v) return 0;
  std::size_t max_bytes = 0;
  if (!is_split_evenly(op_->kind)) return chunk_bytes_;
  for (std::size_t c = 0; c < chunks_; ++c) max_bytes = std::max(max_bytes, bytes(static_cast<int>(c)));
  return max_bytes;
}

}  // namespace rz::schedule
