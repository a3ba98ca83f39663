#pragma once
/// Device workspace of a backend. Operations in the backend's stream run one after the other and share one
/// block. Operations in graphs share another, since a graph may run concurrently with the stream.

#include <cstddef>
#include <memory>
#include <vector>

#include "comm/device/memory.h"

namespace rz::nccl {

/// Not thread-safe: the backend serializes submissions.
class Workspace {
 public:
  explicit Workspace(Device device) : device_(device) {}

  /// A block of at least `bytes`, aligned to 256 bytes. During capture no memory can be allocated:
  /// Errc::unsupported if `captured` and no earlier reserve() outside of a capture was as large. Blocks have
  /// at least 1 MiB.
  std::byte* reserve(std::size_t bytes, bool captured);

 private:
  struct Block {
    std::shared_ptr<std::byte> memory;
    std::size_t bytes = 0;
  };
  void grow(Block&, std::size_t bytes);

  const Device device_;
  Block eager_, captured_;
  std::vector<Block> outgrown_;  // streams and graphs may still use them; freeing would block
};

}  // namespace rz::nccl
