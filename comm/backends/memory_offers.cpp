#include "comm/backends/memory_offers.h"

#include "comm/core/error.h"
#include "comm/transports/process_memory.h"
#include "comm/transports/transport.h"

namespace rz {

MemoryOffers::MemoryOffers(Transport& transport, int rank, int size)
    : transport_(transport),
      arena_(transport.arena()),
      rank_(rank),
      offers_(index(size)),
      ins_(index(size)),
      outs_(index(size)) {}

void MemoryOffers::make(const OwnMemory& own, bool by_kernel, WayByTime::Times took) {
  own_ = own;
  version_ = arena_->version();  // before it is looked at, since other threads may change it
  MemoryOffer& mine = offers_[index(rank_)] = {};
  if (own.in.data()) mine.in = find(own.in, by_kernel);
  if (own.out.data()) mine.out = find(own.out, by_kernel);
  mine.reads = by_kernel && transport_.reads_peers();
  mine.took = took;
}

SharedSpot MemoryOffers::find(std::span<const std::byte> memory, bool by_kernel) const {
  if (const auto found = transport_.share(memory)) return *found;
  if (!by_kernel || !kernel_reads(memory)) return {MemoryOffer::nowhere, 0};
  return {MemoryOffer::own_process, reinterpret_cast<std::uint64_t>(memory.data())};
}

void MemoryOffers::sum_times(std::uint64_t& once_ns, std::uint64_t& staged_ns) const {
  once_ns = staged_ns = 0;
  for (const MemoryOffer& o : offers_) once_ns += o.took.once_ns, staged_ns += o.took.staged_ns;
}

std::byte* MemoryOffers::reached(int peer, const SharedSpot& spot, std::size_t bytes) {
  std::byte* const at = transport_.reach(peer, spot, bytes);
  require(at != nullptr, Errc::system, "rank ", peer, " offers memory that rank ", rank_,
          " cannot reach: ", bytes, " bytes at ", spot.offset, " of its segment ", spot.segment);
  return at;
}

const std::byte* MemoryOffers::find_in(int peer, std::size_t at, std::size_t bytes) {
  const SharedSpot& spot = in_of(peer);
  return is_shared(spot) ? reached(peer, {spot.segment, spot.offset + at}, bytes) : nullptr;
}

PeerRead MemoryOffers::read(int peer, std::size_t at, std::span<std::byte> into) {
  return transport_.read(peer, in_of(peer).offset + at, into);
}

}  // namespace rz
