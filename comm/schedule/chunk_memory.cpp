#include "comm/schedule/chunk_memory.h"

#include "comm/core/integer_math.h"

namespace rz::schedule {

void ChunkMemory::start(const CollectiveCall& op, int rank, int size, const Schedule& schedule,
                        Transport& transport) {
  layout_.emplace(op, rank, size, schedule.chunks);
  cell_bytes_ = round_up(layout_->largest(), std::size_t{256});
  const std::size_t need = cell_bytes_ * static_cast<std::size_t>(schedule.scratch_cells);
  if (need <= scratch_bytes_) return;
  scratch_ = transport.allocate(need);
  scratch_bytes_ = need;
}

const std::byte* ChunkMemory::read(ChunkRef ref) const {
  return ref.region == Region::input ? layout_->input(ref.number) : write(ref);
}

std::byte* ChunkMemory::write(ChunkRef ref) const {
  return ref.region == Region::scratch ? scratch_.get() + cell_bytes_ * static_cast<std::size_t>(ref.cell)
                                       : layout_->output(ref.number);
}

}  // namespace rz::schedule
