#include "comm/shared_memory/allocator.h"

#include <algorithm>
#include <cstring>
#include <functional>

#include "comm/core/error.h"
#include "comm/core/integer_math.h"
#include "comm/core/types.h"
#include "comm/shared_memory/page_check.h"

namespace rz {

namespace {
constexpr std::size_t block_alignment = 256;
constexpr std::size_t slab_bytes = std::size_t{2} << 20;
constexpr std::size_t max_slab_block = slab_bytes / 4;

// Cache colouring. Blocks that start at the same offset in their pages compete for the same cache sets; with
// huge pages, in all caches. So large blocks start at different offsets, which differ between a rank's own
// blocks and between ranks.
constexpr std::size_t cache_colours = 16, colour_stride = 4096 + block_alignment;
constexpr std::size_t min_coloured_bytes = std::size_t{2} << 20;

}  // namespace

/// A block of a slab; its destructor frees it.
struct SharedMemoryAllocator::Block {
  std::shared_ptr<SharedMemoryAllocator> allocator;
  std::shared_ptr<Segment> segment;
  std::size_t offset, bytes;
  ~Block() {
    if (allocator->creator_.is_this_process()) allocator->free_block(segment.get(), offset, bytes);
  }
};

std::shared_ptr<Segment> SegmentMap::find(const std::byte* at, std::size_t bytes) const {
  const std::less<const std::byte*> before;
  auto it = std::upper_bound(entries.begin(), entries.end(), at,
                             [&](const std::byte* a, const Entry& e) { return before(a, e.begin); });
  if (it == entries.begin()) return nullptr;
  --it;
  if (!before(at, it->end) || bytes > static_cast<std::size_t>(it->end - at)) return nullptr;
  return it->segment.lock();
}

std::shared_ptr<std::byte> SharedMemoryAllocator::allocate(std::size_t bytes) {
  const std::size_t need = round_up(std::max<std::size_t>(bytes, 1), block_alignment);
  if (bytes > max_slab_block) {
    const bool placed = bytes >= min_coloured_bytes;
    require(bytes <= static_cast<std::size_t>(PTRDIFF_MAX), Errc::system, "shared memory: need ",
            human_bytes(bytes), ", have about ", human_bytes(available_memory()));
    const auto segment =
        new_segment(round_up(bytes + (placed ? cache_colours * colour_stride : 0), page_bytes()));
    const std::size_t colour = (segment->number * (cache_colours / 2) + colour_) % cache_colours;
    return {segment, segment->memory.data() + (placed ? colour * colour_stride : 0)};
  }
  {
    const std::lock_guard lock(mutex_);
    for (auto& slab : slabs_)
      if (auto block = allocate_from_slab(*slab, need)) return block;
  }
  auto slab = std::make_unique<Slab>(Slab{new_segment(slab_bytes), FreeList(slab_bytes)});
  const std::lock_guard lock(mutex_);
  slabs_.push_back(std::move(slab));
  return allocate_from_slab(*slabs_.back(), need);
}

std::shared_ptr<std::byte> SharedMemoryAllocator::allocate_from_slab(Slab& slab, std::size_t bytes) {
  const auto offset = slab.free.acquire(bytes);
  if (!offset) return nullptr;
  std::byte* at = slab.segment->memory.data() + *offset;
  std::memset(at, 0, bytes);
  return {std::shared_ptr<Block>(new Block{shared_from_this(), slab.segment, *offset, bytes}), at};
}

void SharedMemoryAllocator::free_block(Segment* segment, std::size_t offset, std::size_t bytes) noexcept {
  std::shared_ptr<Segment> last;  // destroyed after the lock is released
  const std::lock_guard lock(mutex_);
  const auto slab =
      std::find_if(slabs_.begin(), slabs_.end(), [&](const auto& s) { return s->segment.get() == segment; });
  (*slab)->free.release(offset, bytes);
  // Keeps the last slab, so that allocating a single small block repeatedly does not create a memfd each
  // time.
  if (!(*slab)->free.all_free() || slabs_.size() == 1) return;
  last = std::move((*slab)->segment);
  slabs_.erase(slab);
}

std::shared_ptr<Segment> SharedMemoryAllocator::new_segment(std::size_t bytes) {
  auto* made = new Segment{next_number_.fetch_add(1), SharedMemory::create(bytes)};
  const std::shared_ptr<Segment> segment(made, [arena = weak_from_this()](Segment* s) {
    if (const auto a = arena.lock(); a && a->creator_.is_this_process()) a->remove_entry(s->number);
    s->memory.discard();  // frees the pages now; peers unmap them later
    delete s;
  });
  add_entry(segment, {made->memory.data(), made->memory.size()});
  return segment;
}

/// Registered memory of the caller. At the end, the segment is first removed from the map, so that it is no
/// longer exported, and then made private again. Not removed in a child of fork(), where the allocator's
/// mutex may be locked for ever.
struct SharedMemoryAllocator::RegisteredRegion {
  std::shared_ptr<SharedMemoryAllocator> allocator;
  std::shared_ptr<Segment> segment;
  ~RegisteredRegion() {
    if (allocator->creator_.is_this_process()) allocator->remove_entry(segment->number);
    segment->memory = {};  // at once, even if the segment has other holders
  }
};

Registration SharedMemoryAllocator::register_buffer(std::span<std::byte> memory) {
  std::string why;
  auto shared = SharedMemory::remap_as_shared(memory, why);
  if (!shared) return Registration(std::move(why));
  const auto segment = std::make_shared<Segment>(Segment{next_number_.fetch_add(1), std::move(*shared)});
  auto lent = std::shared_ptr<RegisteredRegion>(new RegisteredRegion{shared_from_this(), segment});
  add_entry(segment, {segment->memory.data(), segment->memory.size()});
  return Registration(std::move(lent));
}

void SharedMemoryAllocator::add_entry(const std::shared_ptr<Segment>& segment,
                                      std::span<const std::byte> bytes) {
  const std::byte* const begin = bytes.data();
  const std::lock_guard lock(mutex_);
  const auto at =
      std::upper_bound(entries_.begin(), entries_.end(), begin, [](auto* a, auto& e) { return a < e.begin; });
  entries_.insert(at, {begin, begin + bytes.size(), segment, segment->number});
  version_.fetch_add(1, std::memory_order_release);
}

void SharedMemoryAllocator::remove_entry(std::uint32_t number) noexcept {
  const std::lock_guard lock(mutex_);
  std::erase_if(entries_, [&](auto& e) { return e.number == number; });
  for (const auto& watcher : watchers_)
    if (const auto released = watcher.lock()) {
      released->numbers_.push_back(number);
      released->any_.store(true, std::memory_order_relaxed);
    }
  version_.fetch_add(1, std::memory_order_release);
}

std::shared_ptr<std::byte> allocate_zeroed(const std::shared_ptr<SharedMemoryAllocator>& arena,
                                           std::size_t bytes) {
  if (arena) return arena->allocate(bytes);
  // As for shared memory: beyond a cgroup's limit the kernel kills the process.
  require(!exceeds_available_memory(bytes), Errc::system, "memory: need ", human_bytes(bytes),
          ", have about ", human_bytes(available_memory()),
          "; use smaller buffers, or raise the container's memory limit");
  auto memory = allocate_host(bytes);
  if (bytes) std::memset(memory.get(), 0, bytes);
  return memory;
}

void SharedMemoryAllocator::refresh(SegmentMap& map) {
  if (map.version == version_.load(std::memory_order_acquire)) return;
  const std::lock_guard lock(mutex_);
  map.entries = entries_;
  map.version = version_.load(std::memory_order_relaxed);
}

std::shared_ptr<ReleasedSegments> SharedMemoryAllocator::watch_released() {
  auto released = std::make_shared<ReleasedSegments>();
  const std::lock_guard lock(mutex_);
  std::erase_if(watchers_, [](const auto& watcher) { return watcher.expired(); });
  watchers_.push_back(released);
  return released;
}

void SharedMemoryAllocator::drain_released(ReleasedSegments& released, std::vector<std::uint32_t>& numbers) {
  const std::lock_guard lock(mutex_);
  numbers.insert(numbers.end(), released.numbers_.begin(), released.numbers_.end());
  released.numbers_.clear();
  released.any_.store(false, std::memory_order_relaxed);
}

}  // namespace rz
