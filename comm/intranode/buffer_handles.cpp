#include "comm/intranode/buffer_handles.h"

#include "comm/core/error.h"
#include "comm/os/cma.h"
#include "comm/transport/shared_memory_group.h"

namespace rz::intranode {

BufferHandles::BufferHandles(SharedMemoryGroup& memory, int rank, int size)
    : shared_memory_(memory),
      arena_(memory.allocator()),
      rank_(rank),
      handles_(index(size)),
      ins_(index(size)),
      outs_(index(size)) {}

void BufferHandles::publish_local(const LocalBuffers& own, bool allow_cma, SingleCopyTuner::Times times) {
  local_ = own;
  version_ = arena_->version();  // before the look-up, since other threads may change the allocator
  BufferHandle& mine = handles_[index(rank_)] = {};
  if (own.in.data()) mine.in = make_handle(own.in, allow_cma);
  if (own.out.data()) mine.out = make_handle(own.out, allow_cma);
  mine.has_cma = allow_cma && shared_memory_.has_cma();
  mine.times = times;
}

SharedMemoryHandle BufferHandles::make_handle(std::span<const std::byte> memory, bool allow_cma) const {
  if (const auto found = shared_memory_.export_handle(memory)) return *found;
  if (!allow_cma || !cma_readable(memory)) return {BufferHandle::none, 0};
  return {BufferHandle::cma, reinterpret_cast<std::uint64_t>(memory.data())};
}

void BufferHandles::sum_times(std::uint64_t& single_copy_ns, std::uint64_t& staged_ns) const {
  single_copy_ns = staged_ns = 0;
  for (const BufferHandle& o : handles_)
    single_copy_ns += o.times.single_copy_ns, staged_ns += o.times.staged_ns;
}

std::byte* BufferHandles::map_handle(int peer, const SharedMemoryHandle& spot, std::size_t bytes) {
  std::byte* const at = shared_memory_.map_handle(peer, spot, bytes);
  require(at != nullptr, Errc::system, "rank ", peer, " has published memory that rank ", rank_,
          " cannot map: ", bytes, " bytes at ", spot.offset, " of its segment ", spot.segment);
  return at;
}

const std::byte* BufferHandles::mapped_in(int peer, std::size_t at, std::size_t bytes) {
  const SharedMemoryHandle& spot = handle_in(peer);
  return is_mapped(spot) ? map_handle(peer, {spot.segment, spot.offset + at}, bytes) : nullptr;
}

CmaResult BufferHandles::cma_read(int peer, std::size_t at, std::span<std::byte> into) {
  return shared_memory_.cma_read(peer, handle_in(peer).offset + at, into);
}

}  // namespace rz::intranode
