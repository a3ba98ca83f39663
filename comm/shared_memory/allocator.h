#pragma once
/// Allocator of memory that peers on this host can map. Small blocks share segments (slabs of 2 MiB); larger
/// ones have their own. Serves a group and those that split() made of it. Thread-safe.

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <span>
#include <vector>

#include "comm/core/free_list.h"
#include "comm/registration.h"
#include "comm/shared_memory/shared_memory.h"

namespace rz {

/// One memfd, identified to peers by its number. Numbers are never reused.
struct Segment {
  std::uint32_t number = 0;
  SharedMemory memory;
};

/// Snapshot of the segments' address ranges, taken at `version`. Not thread-safe.
struct SegmentMap {
  struct Entry {
    const std::byte* begin;
    const std::byte* end;
    std::weak_ptr<Segment> segment;
    std::uint32_t number;
  };
  std::uint64_t version = 0;
  std::vector<Entry> entries;  ///< sorted by address
  /// The segment that contains all of [at, at + bytes); null if there is none.
  std::shared_ptr<Segment> find(const std::byte* at, std::size_t bytes) const;
};

/// Numbers of segments that were removed, as one group of peers learns them.
class ReleasedSegments {
 public:
  bool any() const { return any_.load(std::memory_order_relaxed); }

 private:
  friend class SharedMemoryAllocator;
  std::vector<std::uint32_t> numbers_;  // under the allocator's mutex
  std::atomic<bool> any_{false};
};

class SharedMemoryAllocator : public std::enable_shared_from_this<SharedMemoryAllocator> {
 public:
  /// `colour`: cache colour. Large blocks of allocators with different colours start at different offsets in
  /// their pages.
  explicit SharedMemoryAllocator(std::uint32_t colour = 0) : colour_(colour) {}
  /// Zeroed memory, aligned to 256 bytes. Small blocks keep the allocator alive. Errc::system states the
  /// bytes needed and available.
  std::shared_ptr<std::byte> allocate(std::size_t bytes);
  /// Makes the caller's memory a segment until the registration ends (comm/registration.h). A range whose
  /// pages cannot be replaced gives an empty Registration with the reason. Errc::system if memory is short.
  Registration register_buffer(std::span<std::byte>);
  /// Incremented whenever a segment is added or removed.
  std::uint64_t version() const { return version_.load(std::memory_order_acquire); }
  /// Brings the map up to date; takes no lock if nothing has changed.
  void refresh(SegmentMap&);
  /// Collects the segments that are removed from now on, until the result is destroyed.
  std::shared_ptr<ReleasedSegments> watch_released();
  /// Moves the numbers collected since the last call to the end of the list.
  void drain_released(ReleasedSegments&, std::vector<std::uint32_t>&);

 private:
  struct Block;
  struct RegisteredRegion;
  struct Slab {
    std::shared_ptr<Segment> segment;
    FreeList free;
  };
  std::shared_ptr<Segment> new_segment(std::size_t bytes);
  void add_entry(const std::shared_ptr<Segment>&, std::span<const std::byte>);
  std::shared_ptr<std::byte> allocate_from_slab(Slab&, std::size_t bytes);
  void free_block(Segment*, std::size_t offset, std::size_t bytes) noexcept;
  void remove_entry(std::uint32_t number) noexcept;

  const std::uint32_t colour_;
  const Creator creator_;
  std::mutex mutex_;
  std::vector<std::unique_ptr<Slab>> slabs_;
  std::vector<SegmentMap::Entry> entries_;
  std::vector<std::weak_ptr<ReleasedSegments>> watchers_;
  std::atomic<std::uint64_t> version_{0};
  std::atomic<std::uint32_t> next_number_{0};
};

/// Zeroed memory from the allocator; private memory if it is null.
std::shared_ptr<std::byte> allocate_zeroed(const std::shared_ptr<SharedMemoryAllocator>&, std::size_t bytes);

}  // namespace rz
