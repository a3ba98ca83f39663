#pragma once
/// Memory that peers of this host may read where it lies. Small blocks share segments; large ones have their
/// own. Thread-safe.

#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <span>
#include <vector>

#include "comm/registration.h"
#include "comm/shared_memory/shared_memory.h"

namespace rz {

/// One memfd, known to peers by its number. Numbers are never used twice.
struct Segment {
  std::uint32_t number = 0;
  SharedMemory memory;
};

/// Where memory of segments lies, as it was when `version` was current.
struct SegmentMap {
  struct Entry {
    const std::byte* begin;
    const std::byte* end;
    std::weak_ptr<Segment> segment;
    std::uint32_t number;
  };
  std::uint64_t version = 0;
  std::vector<Entry> entries;  ///< by address
  /// The segment that holds all of [at, at + bytes), or none.
  std::shared_ptr<Segment> find(const std::byte* at, std::size_t bytes) const;
};

class SharedMemoryAllocator : public std::enable_shared_from_this<SharedMemoryAllocator> {
 public:
  /// `place`: large blocks of arenas that differ in it lie at different places of their pages.
  explicit SharedMemoryAllocator(std::uint32_t place = 0) : colour_(place) {}
  /// Zeroed, aligned to 256 bytes; may outlive the arena's other holders. Errc::system states need and have.
  std::shared_ptr<std::byte> allocate(std::size_t bytes);
  /// The caller's own memory as a segment, until the registration ends (comm/communicator.h).
  Registration register_buffer(std::span<std::byte>);
  /// Grows whenever a segment begins or ends.
  std::uint64_t version() const { return version_.load(std::memory_order_acquire); }
  /// Brings the map up to date, if anything changed; without a lock if not.
  void refresh(SegmentMap&);
  /// Appends the numbers of segments that are gone since the last call.
  void drain_released(std::vector<std::uint32_t>&);
  bool has_released() const { return has_released_.load(std::memory_order_relaxed); }

 private:
  struct Block;
  struct RegisteredRegion;
  struct Slab {
    std::shared_ptr<Segment> segment;
    std::map<std::size_t, std::size_t> free;  ///< offset, size
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
  std::vector<std::uint32_t> released_;
  std::atomic<bool> has_released_{false};
  std::atomic<std::uint64_t> version_{0};
  std::atomic<std::uint32_t> next_number_{0};
};

/// Of the arena; where there is none, memory of this process alone. Zeroed.
std::shared_ptr<std::byte> allocate_zeroed(const std::shared_ptr<SharedMemoryAllocator>&, std::size_t bytes);

}  // namespace rz
