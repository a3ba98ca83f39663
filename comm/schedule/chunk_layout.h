#pragma once
/// Where the chunks of a call lie in its buffers: the table of comm/schedule/schedule.h in bytes.

#include <cstddef>

#include "comm/schedule/schedule.h"

namespace rz {

class ChunkLayout {
 public:
  /// `op` outlives the layout. `chunks` is the schedule's.
  ChunkLayout(const CollectiveCall& op, int rank, int size, int chunks);

  std::size_t bytes(int chunk) const;
  const std::byte* input(int chunk) const;
  std::byte* output(int chunk) const;
  /// The largest chunk: what a cell of scratch has to hold.
  std::size_t largest() const;

 private:
  struct ByteRange {
    std::size_t begin, end;  // bytes
  };
  ByteRange even_split(int chunk) const;
  const CollectiveCall* op_;
  std::size_t rank_, size_, chunks_, element_, chunk_bytes_;  // each_: bytes of a chunk where all are equal
};

}  // namespace rz
