#include "comm/backends/nccl/workspace.h"

#include <bit>

#include "comm/core/error.h"

namespace rz::nccl {

namespace {
constexpr std::size_t min_block_bytes = std::size_t{1} << 20;
}

std::byte* Workspace::reserve(std::size_t bytes, bool captured) {
  if (!captured) {
    grow(eager_, bytes);
    grow(captured_, bytes);
    return eager_.memory.get();
  }
  require(bytes <= captured_.bytes, Errc::unsupported, "a collective in a CUDA graph needs ",
          human_bytes(bytes), " of memory on ", name(device_), ", but ", human_bytes(captured_.bytes),
          " are allocated, and none can be allocated during the capture; run the same call once before it");
  return captured_.memory.get();
}

void Workspace::grow(Block& block, std::size_t bytes) {
  if (bytes <= block.bytes) return;
  const std::size_t size = std::max(min_block_bytes, std::bit_ceil(bytes));
  auto memory = allocate_on(device_, size);
  outgrown_.push_back(std::move(block));
  block = {std::move(memory), size};
}

}  // namespace rz::nccl
