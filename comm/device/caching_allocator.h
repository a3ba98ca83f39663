#pragma once
/// Device memory that is used again in the order of streams: allocating and freeing cost no call of the
/// driver once a program has settled, and neither waits for the device.

#include <cstddef>
#include <memory>

#include "comm/device/memory.h"
#include "comm/device/stream.h"

namespace rz {

/// Takes large segments from `upstream` and hands out parts of them; free neighbours are joined. What was
/// given back may be handed out again for the same stream at once: work that the stream was given before
/// still uses it first. Whoever uses memory in another stream too orders that stream's work before the last
/// copy of the pointer ends. Copies share one state; memory may outlive them. Thread-safe.
class CachingAllocator {
 public:
  /// `upstream` may be the device's driver, or memory that a communicator has registered.
  explicit CachingAllocator(Allocator upstream);

  /// Aligned to 512 bytes, not initialised. When upstream has no more, free segments of all streams go back
  /// to it, and it is asked again; then its error passes. They go back as well before there
  /// would be reserved more than was ever in use, a quarter more and 64 MiB.
  std::shared_ptr<std::byte> allocate(std::size_t bytes, const Stream&) const;
  /// allocate() for one stream, as a value.
  Allocator on(const Stream&) const;

  struct Statistics {
    std::size_t segments = 0;  ///< held from upstream
    std::size_t reserved = 0;  ///< bytes of them
    std::size_t in_use = 0;    ///< bytes handed out, rounded up
    std::size_t peak = 0;      ///< most of in_use ever
    std::size_t requests = 0;  ///< calls of allocate()
    std::size_t reused = 0;    ///< of them, those that asked nothing of upstream
  };
  Statistics statistics() const;
  /// Gives free segments back to upstream, which may wait for the device.
  void trim() const;

 private:
  struct State;
  std::shared_ptr<State> state_;
};

}  // namespace rz
