#include "tensor/pool.h"

#include <array>
#include <map>
#include <mutex>
#include <utility>

namespace rz {

namespace {

/// A block of memory and room for the control block of the pointer to it, so that handing it out again
/// allocates nothing.
struct Block {
  std::shared_ptr<std::byte> memory;
  std::size_t bytes = 0;
  Block* next = nullptr;  // in its list of free blocks
  alignas(std::max_align_t) std::array<std::byte, 96> control;
};

}  // namespace

struct BufferPool::State {
  explicit State(Allocator upstream) : upstream(std::move(upstream)) {}
  ~State() { drop_free(); }

  const Allocator upstream;
  std::mutex mutex;
  std::map<std::size_t, Block*> free;  // by size, most recently used first
  Statistics statistics;

  Block* take(std::size_t bytes) {
    const std::lock_guard lock(mutex);
    Block*& head = free[bytes];
    Block* block = head;
    if (block)
      head = block->next;
    else
      block = new_block(bytes);
    statistics.in_use += bytes;
    statistics.peak = std::max(statistics.peak, statistics.in_use);
    return block;
  }

  void give_back(Block* block) {
    const std::lock_guard lock(mutex);
    block->next = std::exchange(free[block->bytes], block);  // take() made the entry
    statistics.in_use -= block->bytes;
  }

  void drop_free() {
    for (auto& [bytes, head] : free)
      while (Block* block = head) {
        head = block->next;
        statistics.bytes -= bytes;
        delete block;
      }
  }

 private:
  Block* new_block(std::size_t bytes) {
    auto block = std::make_unique<Block>();
    block->memory = upstream(bytes);
    block->bytes = bytes;
    ++statistics.allocations;
    statistics.bytes += bytes;
    return block.release();
  }
};

namespace {

/// Places a pointer's control block in its Block. Deallocating it is the last thing a shared_ptr does, after
/// which nobody touches the Block: there it goes back to the pool. Keeps the pool's state alive until then.
template <class T, class State>
struct ControlAllocator {
  using value_type = T;
  std::shared_ptr<State> state;
  Block* block;

  ControlAllocator(std::shared_ptr<State> s, Block* b) : state(std::move(s)), block(b) {}
  template <class U>
  ControlAllocator(const ControlAllocator<U, State>& other) : state(other.state), block(other.block) {}

  T* allocate(std::size_t n) {
    static_assert(sizeof(T) <= sizeof(Block::control) && alignof(T) <= alignof(std::max_align_t));
    require(n == 1, Errc::invalid_argument, "a control block is one object, not ", n);
    return reinterpret_cast<T*>(block->control.data());
  }
  void deallocate(T*, std::size_t) { state->give_back(block); }
  template <class U>
  bool operator==(const ControlAllocator<U, State>& other) const {
    return block == other.block;
  }
};

}  // namespace

BufferPool::BufferPool(Allocator upstream) : state_(std::make_shared<State>(std::move(upstream))) {}

Tensor BufferPool::empty(const Shape& shape, DType dtype) const {
  Block* block = state_->take(shape.count() * size_of(dtype));
  const auto keep = [](std::byte*) {};  // the Block owns the memory
  std::shared_ptr<std::byte> memory(block->memory.get(), keep,
                                    ControlAllocator<std::byte, State>(state_, block));
  return Tensor::share(std::move(memory), 0, shape, dtype, state_->upstream.device);
}

BufferPool::Statistics BufferPool::statistics() const {
  const std::lock_guard lock(state_->mutex);
  return state_->statistics;
}

void BufferPool::trim() const {
  const std::lock_guard lock(state_->mutex);
  state_->drop_free();
}

}  // namespace rz
