#pragma once
/// Device memory that operations of one backend need on their way. Those in its stream use it one after the
/// other, so one block serves all; those in graphs have another, since a graph may run beside the stream.

#include <cstddef>
#include <memory>
#include <vector>

#include "comm/device/memory.h"

namespace rz::nccl {

/// Whoever submits uses it, one at a time.
class Workspace {
 public:
  explicit Workspace(Device device) : device_(device) {}

  /// At least `bytes`, aligned to 256. A graph cannot allocate while it is captured: Errc::unsupported unless
  /// an operation outside of it has asked for as much before, or it is little.
  std::byte* reserve(std::size_t bytes, bool captured);

 private:
  struct Block {
    std::shared_ptr<std::byte> memory;
    std::size_t bytes = 0;
  };
  void grow(Block&, std::size_t bytes);

  const Device device_;
  Block eager_, captured_;
  std::vector<Block> outgrown_;  // may still be in use, by streams and by graphs: freeing would wait for them
};

}  // namespace rz::nccl
