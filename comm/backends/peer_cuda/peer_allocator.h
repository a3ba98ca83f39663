#pragma once
/// Device memory that peers read where it lies: cut from slabs that live as long as their last user, since
/// giving memory back to CUDA waits for kernels, which may wait for other ranks. Thread-safe.

#include <cstddef>
#include <map>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "comm/core/types.h"
#include "comm/device/stream.h"

namespace rz {

class PeerAllocator : public std::enable_shared_from_this<PeerAllocator> {
 public:
  /// In the stream, which is for what waits for no other rank, memory is zeroed.
  explicit PeerAllocator(Stream stream) : stream_(std::move(stream)) {}
  /// Zeroed, aligned to 256 bytes; may outlive everybody else. Errc::system states need and have.
  std::shared_ptr<std::byte> allocate(std::size_t bytes);
  /// Whether all of it lies in a slab.
  bool contains(const void* at, std::size_t bytes) const;

 private:
  struct Block;
  struct Slab {
    std::shared_ptr<std::byte> memory;
    std::size_t bytes;
    std::map<std::size_t, std::size_t> free;  ///< offset, size
  };
  std::byte* allocate_from_slab(Slab&, std::size_t bytes);
  void free_block(const std::byte* at, std::size_t bytes) noexcept;

  const Stream stream_;
  mutable std::mutex mutex_;
  std::vector<Slab> slabs_;
};

}  // namespace rz
