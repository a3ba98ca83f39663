#pragma once
/// Byte ranges of the chunks of a call in its buffers, by the table at ChunkRef (comm/schedule/schedule.h).

#include <cstddef>

#include "comm/core/range.h"
#include "comm/schedule/schedule.h"

namespace rz::schedule {

class ChunkLayout {
 public:
  /// `op` must outlive the layout. `chunks`: Schedule::chunks.
  ChunkLayout(const CollectiveCall& op, int rank, int size, int chunks);

  /// Length of a chunk, and its address in the input and in the output.
  std::size_t bytes(int chunk) const;
  const std::byte* input(int chunk) const;
  std::byte* output(int chunk) const;
  /// Bytes of the largest chunk, hence of a scratch cell; 0 for all_to_all_v, which uses none.
  std::size_t largest() const;

 private:
  Range even_split(int chunk) const;
  const CollectiveCall* op_;
  std::size_t rank_, size_, chunks_, element_, chunk_bytes_;  // chunk_bytes_: where all chunks are equal
};

}  // namespace rz::schedule
