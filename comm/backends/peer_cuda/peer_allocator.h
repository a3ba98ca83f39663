#pragma once
/// Allocator of device memory that peers read in place. Blocks are cut from slabs, and a slab lives as long
/// as its last block: freeing CUDA memory waits for running kernels, which may wait for other ranks.
/// Thread-safe.

#include <cstddef>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "comm/core/free_list.h"
#include "comm/core/types.h"
#include "comm/device/stream.h"

namespace rz {

class PeerAllocator : public std::enable_shared_from_this<PeerAllocator> {
 public:
  /// Memory is zeroed on `stream`, which must not carry work that waits for other ranks.
  explicit PeerAllocator(Stream stream) : stream_(std::move(stream)) {}
  /// Zeroed, aligned to 256 bytes; may outlive the allocator's other users. Errc::system if the device is out
  /// of memory; the message has the requested and the available bytes.
  std::shared_ptr<std::byte> allocate(std::size_t bytes);
  /// True if the whole range lies in one slab.
  bool contains(const void* at, std::size_t bytes) const;

 private:
  struct Block;
  struct Slab {
    std::shared_ptr<std::byte> memory;
    std::size_t bytes;
    FreeList free;
  };
  std::byte* allocate_from_slab(Slab&, std::size_t bytes);
  void free_block(const std::byte* at, std::size_t bytes) noexcept;

  const Stream stream_;
  mutable std::mutex mutex_;
  std::vector<Slab> slabs_;
};

}  // namespace rz
