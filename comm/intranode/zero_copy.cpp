#include "comm/intranode/zero_copy.h"

#include <algorithm>

namespace rz::intranode {

void ZeroCopyCall::map_peer(const PlannedCall& c, int peer) {
  if (c.ranks().reads_from(peer)) handles_.map_in(peer, c.layout.input_bytes());
  if (c.ranks().kind == Collective::all_reduce) handles_.map_out(peer, c.layout.total_bytes);
}

void ZeroCopyCall::access(const PlannedCall& c) {
  access_round(c, rounds_.done.read++);
  if (!rounds_.can_access()) channel_.send();
}

void ZeroCopyCall::access_round(const PlannedCall& c, std::size_t round) {
  const CallLayout& layout = c.layout;
  if (!layout.has_output()) return;
  if (traits(layout.ranks.kind).reduces) return reduce(c, round);
  for (int r = layout.first_moved(); r < layout.last_moved(); ++r) {
    const CallLayout::Moved part = layout.moved(c.in_place, r, round);
    c.stores.copy(c.out() + part.output, source(c, r) + part.input, part.bytes);
  }
}

void ZeroCopyCall::reduce(const PlannedCall& c, std::size_t round) {
  const CallLayout::Reduced part = c.layout.reduced(c.in_place, round);
  for (int r = 0; r < c.ranks().size; ++r) operands_[static_cast<std::size_t>(r)] = source(c, r) + part.input;
  if (c.ranks().kind == Collective::all_reduce) return reduce_to_all(c, part.output, part.bytes);
  c.stores.reduce(c.out() + part.output, nullptr, operands_, part.bytes);
}

/// Reduces the operands into the outputs of all ranks, at offset `at`.
void ZeroCopyCall::reduce_to_all(const PlannedCall& c, std::size_t at, std::size_t bytes) {
  const int rank = c.ranks().rank, size = c.ranks().size, other = rank == 0 ? 1 : 0;
  std::byte* const to = c.out() + at;
  const OutputStores& stores = c.stores;
  if (size == 2 && !stores.nontemporal)
    return stores.reduce_block(to, handles_.out(other) + at, operands_, bytes);
  std::byte buffer[OutputStores::block_bytes];
  for (std::size_t i = 0; i < bytes; i += OutputStores::block_bytes) {
    const std::size_t n = std::min(OutputStores::block_bytes, bytes - i);
    std::byte* const near = stores.nontemporal ? buffer : to + i;
    stores.reduce_block(near, nullptr, operands_, n);
    stores.copy(to + i, near, n);
    for (int r = 0; r < size; ++r)
      if (r != rank) stores.copy(handles_.out(r) + at + i, near, n);
    for (auto& s : operands_) s = static_cast<const std::byte*>(s) + n;
  }
}

}  // namespace rz::intranode
