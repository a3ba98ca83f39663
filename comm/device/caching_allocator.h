#pragma once
/// Stream-ordered caching allocator for device memory. In steady state, allocating and freeing neither call
/// the driver nor wait for the device.

#include <cstddef>
#include <memory>

#include "comm/device/memory.h"
#include "comm/device/stream.h"

namespace rz {

/// Takes large segments from `upstream` and returns parts of them; adjacent free parts are merged. Freed
/// memory may be reused at once for the same stream: stream order keeps earlier work on it safe. If other
/// streams use the memory, order their work before the last copy of the pointer is destroyed. Copies share
/// one state; memory may outlive them. Thread-safe.
class CachingAllocator {
 public:
  /// `upstream` may be the driver, or a communicator's allocator.
  explicit CachingAllocator(Allocator upstream);

  /// Uninitialized memory, aligned to 512 bytes. If upstream fails, all free segments are returned to it and
  /// the request is retried once; then the error is thrown. Free segments are also returned before reserved
  /// memory would exceed 1.25 times the peak in use plus 64 MiB.
  std::shared_ptr<std::byte> allocate(std::size_t bytes, const Stream&) const;
  /// allocate() for one stream, as an Allocator.
  Allocator on(const Stream&) const;

  struct Statistics {
    std::size_t segments = 0;  ///< segments held from upstream
    std::size_t reserved = 0;  ///< bytes of these segments
    std::size_t in_use = 0;    ///< bytes allocated, after rounding up
    std::size_t peak = 0;      ///< maximum of in_use
    std::size_t requests = 0;  ///< calls of allocate()
    std::size_t reused = 0;    ///< calls of allocate() served without upstream
  };
  Statistics statistics() const;
  /// Returns free segments to upstream. May wait for the device.
  void trim() const;

 private:
  struct State;
  std::shared_ptr<State> state_;
};

}  // namespace rz
