#pragma once
/// Memory of a tape for what it records.

#include <algorithm>
#include <cstddef>
#include <memory>
#include <vector>

namespace rz {

/// Bump allocator that grows in chunks and is rewound in reverse order. It keeps its chunks.
class BumpAllocator {
 public:
  struct Position {
    std::size_t chunk = 0, offset = 0;
  };

  void* allocate(std::size_t bytes, std::size_t alignment) {
    for (;; at_ = {at_.chunk + 1, 0}) {
      if (at_.chunk == chunks_.size()) chunks_.emplace_back(std::max(chunk_bytes, bytes + alignment));
      Chunk& chunk = chunks_[at_.chunk];
      void* place = chunk.memory.get() + at_.offset;
      std::size_t room = chunk.bytes - at_.offset;
      if (!std::align(alignment, bytes, place, room)) continue;
      at_.offset = chunk.bytes - room + bytes;
      return place;
    }
  }
  Position position() const { return at_; }
  void rewind(Position p) { at_ = p; }

 private:
  static constexpr std::size_t chunk_bytes = 1 << 16;
  struct Chunk {
    explicit Chunk(std::size_t n) : memory(std::make_unique<std::byte[]>(n)), bytes(n) {}
    std::unique_ptr<std::byte[]> memory;
    std::size_t bytes;
  };
  std::vector<Chunk> chunks_;
  Position at_;
};

}  // namespace rz
