#include "bench/harness/buffers.h"

#include <algorithm>

namespace rz::bench {
namespace {

// With -m, small operations use disjoint buffers: operations of a group must not read each other's results.
// Limits of the extra memory, per operation and in total.
constexpr std::size_t max_disjoint_bytes_of_one = 16 << 10, max_disjoint_bytes = 1 << 20;

RankInfo rank_of(const Communicator& comm) { return {comm.rank(), comm.size()}; }

}  // namespace

RankBuffers::RankBuffers(Communicator& comm, const Collective& collective, const Options& options,
                         const Stream& stream)
    : comm_(comm), collective_(collective), options_(options), stream_(stream) {
  const auto operations = static_cast<std::size_t>(options.aggregated);
  if (options.max_bytes <= std::max(max_disjoint_bytes_of_one, max_disjoint_bytes / operations))
    disjoint_operations_ = options.aggregated;
  std::size_t send = 0, recv = 0, misalignment = 0;
  for (const DType t : options.dtypes) {
    const ElementCounts n = counts_of(collective, {.bytes = options.max_bytes, .dtype = t}, rank_of(comm));
    send = std::max(send, n.send * size_of(t));
    recv = std::max({recv, n.recv * size_of(t), n.in_place_extent * size_of(t)});
    misalignment = std::max(misalignment, static_cast<std::size_t>(options.misalign) * size_of(t));
  }
  send_ = allocate(send * static_cast<std::size_t>(disjoint_operations_), misalignment);
  recv_ = allocate(recv * static_cast<std::size_t>(disjoint_operations_), misalignment);
}

RankBuffers::Allocation RankBuffers::allocate(std::size_t bytes, std::size_t misalignment) const {
  constexpr std::size_t min_bytes = 64;
  return {memory_of(comm_, options_.registered, std::max(bytes + misalignment, min_bytes), stream_), bytes};
}

BufferRotation::Side RankBuffers::Allocation::side(std::size_t offset, std::size_t extent) const {
  return {memory.data.get() + offset, extent, extent ? std::max<std::size_t>(bytes / extent, 1) : 1};
}

BufferRotation RankBuffers::rotation(const Case& c) const {
  const ElementCounts n = counts_of(collective_, c, rank_of(comm_));
  const std::size_t element = size_of(c.dtype);
  const std::size_t misalignment = static_cast<std::size_t>(options_.misalign) * element;
  const Call call{comm_, nullptr, nullptr, n, c.dtype, c.op, c.root, c.in_place, stream_};
  if (!c.in_place)
    return {call, send_.side(misalignment, n.send * element), recv_.side(misalignment, n.recv * element)};
  BufferRotation::Side in = recv_.side(misalignment, n.in_place_extent * element), out = in;
  in.base += n.in_place_in * element, out.base += n.in_place_out * element;
  return {call, in, out};
}

}  // namespace rz::bench
