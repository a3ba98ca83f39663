#include "comm/backends/peer_cuda/peer_allocator.h"

#include <algorithm>
#include <functional>

#include "comm/core/integer_math.h"
#include "comm/device/memory.h"

namespace rz {

namespace {
constexpr std::size_t alignment = 256, min_slab_bytes = std::size_t{2} << 20;

bool contains_range(const std::byte* begin, std::size_t whole, const void* at, std::size_t bytes) {
  const std::less_equal<const std::byte*> up_to;
  const auto* const p = static_cast<const std::byte*>(at);
  return up_to(begin, p) && up_to(p, begin + whole) && bytes <= static_cast<std::size_t>(begin + whole - p);
}
}  // namespace

struct PeerAllocator::Block {
  std::shared_ptr<PeerAllocator> allocator;
  std::byte* at;
  std::size_t bytes;
  ~Block() { allocator->free_block(at, bytes); }
};

std::shared_ptr<std::byte> PeerAllocator::allocate(std::size_t bytes) {
  const std::size_t need = round_up(std::max<std::size_t>(bytes, 1), alignment);
  std::byte* at = nullptr;
  {
    const std::lock_guard lock(mutex_);
    for (Slab& slab : slabs_)
      if (!at) at = allocate_from_slab(slab, need);
    if (!at) {
      const std::size_t whole = std::max(need, min_slab_bytes);
      slabs_.push_back({allocate_on(stream_.device(), whole), whole, FreeList(whole)});
      at = allocate_from_slab(slabs_.back(), need);
    }
  }
  const auto block = std::shared_ptr<Block>(new Block{shared_from_this(), at, need});
  memset_async(at, 0, need, stream_);
  stream_.synchronize();
  return {block, at};
}

std::byte* PeerAllocator::allocate_from_slab(Slab& slab, std::size_t bytes) {
  const auto offset = slab.free.acquire(bytes);
  return offset ? slab.memory.get() + *offset : nullptr;
}

void PeerAllocator::free_block(const std::byte* at, std::size_t bytes) noexcept {
  const std::lock_guard lock(mutex_);
  const auto slab = std::find_if(slabs_.begin(), slabs_.end(), [&](const Slab& s) {
    return contains_range(s.memory.get(), s.bytes, at, bytes);
  });
  slab->free.release(static_cast<std::size_t>(at - slab->memory.get()), bytes);
}

bool PeerAllocator::contains(const void* at, std::size_t bytes) const {
  const std::lock_guard lock(mutex_);
  return std::any_of(slabs_.begin(), slabs_.end(),
                     [&](const Slab& s) { return contains_range(s.memory.get(), s.bytes, at, bytes); });
}

}  // namespace rz
