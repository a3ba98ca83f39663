#pragma once
/// Where the chunks of a call lie: in its input and output, and in scratch memory that is kept from call to
/// call.

#include <cstddef>
#include <memory>
#include <optional>

#include "comm/schedule/chunk_layout.h"
#include "comm/transport/transport.h"

namespace rz::schedule {

class ChunkMemory {
 public:
  /// For a new call. Allocates scratch memory only if there is not enough from earlier calls.
  void start(const CollectiveCall&, int rank, int size, const Schedule&, Transport&);
  std::size_t bytes(int chunk) const { return layout_->bytes(chunk); }
  const std::byte* read(ChunkRef) const;
  std::byte* write(ChunkRef) const;

 private:
  std::optional<ChunkLayout> layout_;
  std::size_t cell_bytes_ = 0, scratch_bytes_ = 0;
  std::shared_ptr<std::byte> scratch_;
};

}  // namespace rz::schedule
