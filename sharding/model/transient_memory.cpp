#include "sharding/model/transient_memory.h"

#include <algorithm>
#include <mutex>
#include <vector>

namespace rz {

namespace {
struct Block {
  std::shared_ptr<std::byte> memory;
  std::size_t bytes = 0;
};
}  // namespace

struct TransientMemory::State {
  State(Allocator u, std::function<void()> s) : upstream(std::move(u)), synchronize(std::move(s)) {}

  Block acquire(std::size_t bytes) {
    const std::lock_guard lock(mutex);
    in_use += bytes;
    peak = std::max(peak, in_use);
    const bool room = held + bytes <= peak + (on_device() ? released : 0);
    if (const auto best = best_fit(bytes); best != free.end() && (best->bytes <= 2 * bytes || !room)) {
      const Block block = std::move(*best);
      free.erase(best);
      return block;
    }
    if (!room) {
      if (synchronize && !free.empty()) synchronize();
      for (const Block& b : free) held -= b.bytes, released += b.bytes;
      free.clear();
    }
    held += bytes;
    ++allocations;
    return {upstream(bytes), bytes};
  }

  bool on_device() const { return upstream.device.kind != Device::host; }

  std::vector<Block>::iterator best_fit(std::size_t bytes) {
    auto best = free.end();
    for (auto b = free.begin(); b != free.end(); ++b)
      if (b->bytes >= bytes && (best == free.end() || b->bytes < best->bytes)) best = b;
    return best;
  }

  void release(Block block, std::size_t bytes) {
    const std::lock_guard lock(mutex);
    in_use -= bytes;
    free.push_back(std::move(block));
  }

  const Allocator upstream;
  const std::function<void()> synchronize;
  std::mutex mutex;
  std::vector<Block> free;
  std::size_t held = 0, in_use = 0, peak = 0, released = 0, allocations = 0;
};

TransientMemory::TransientMemory(Allocator upstream, std::function<void()> synchronize)
    : state_(std::make_shared<State>(std::move(upstream), std::move(synchronize))) {}

Tensor TransientMemory::allocate(const Shape& shape, DType dtype) {
  const std::size_t bytes = shape.count() * size_of(dtype);
  Block block = state_->acquire(bytes);
  std::byte* data = block.memory.get();
  const std::shared_ptr<std::byte> memory(
      data, [state = state_, block = std::move(block), bytes](std::byte*) mutable {
        state->release(std::move(block), bytes);
      });
  return Tensor::share(memory, 0, shape, dtype, state_->upstream.device);
}

std::size_t TransientMemory::held() const {
  const std::lock_guard lock(state_->mutex);
  return state_->held;
}
std::size_t TransientMemory::in_use() const {
  const std::lock_guard lock(state_->mutex);
  return state_->in_use;
}
std::size_t TransientMemory::peak() const {
  const std::lock_guard lock(state_->mutex);
  return state_->peak;
}
std::size_t TransientMemory::allocations() const {
  const std::lock_guard lock(state_->mutex);
  return state_->allocations;
}

}  // namespace rz
