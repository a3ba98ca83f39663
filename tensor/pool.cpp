#include "tensor/pool.h"

#include <algorithm>
#include <array>
#include <bit>
#include <map>
#include <mutex>
#include <utility>

#include "comm/core/integer_math.h"
#include "comm/device/graph.h"

namespace rz {

namespace {

/// A block of memory with space for the shared_ptr control block, so that reusing it allocates nothing.
struct Block {
  std::shared_ptr<std::byte> memory;
  std::size_t bytes = 0;
  Block *above = nullptr, *below = nullptr;  // stack of free blocks of the same size
  Block *newer = nullptr, *older = nullptr;  // all free blocks, by release time
  std::uint64_t pass = 0;                    // pass in which it was released
  bool captured = false;                     // a graph may use it, whether in use or free
  alignas(std::max_align_t) std::array<std::byte, 96> control;
};

/// Free blocks: a LIFO stack per size, and a list by age.
class FreeBlocks {
 public:
  /// Creates the stack of a size, so that push() does not allocate.
  void prepare(std::size_t bytes) { by_size_.try_emplace(bytes, nullptr); }

  void push(Block* b) {
    Block*& top = by_size_.find(b->bytes)->second;
    b->above = nullptr, b->below = top;
    if (top) top->above = b;
    top = b;
    b->newer = nullptr, b->older = newest_;
    (newest_ ? newest_->newer : oldest_) = b;
    newest_ = b;
  }

  Block* pop(std::size_t bytes) {
    const auto found = by_size_.find(bytes);
    Block* const b = found == by_size_.end() ? nullptr : found->second;
    if (b) remove(b);
    return b;
  }

  void remove(Block* b) {
    (b->above ? b->above->below : by_size_.find(b->bytes)->second) = b->below;
    if (b->below) b->below->above = b->above;
    (b->newer ? b->newer->older : newest_) = b->older;
    (b->older ? b->older->newer : oldest_) = b->newer;
  }

  Block* oldest() const { return oldest_; }

 private:
  std::map<std::size_t, Block*> by_size_;
  Block *newest_ = nullptr, *oldest_ = nullptr;
};

/// Size classes: sixteen per power of two, so that slightly different batches share blocks. Waste is at most
/// 1/16, or 63 bytes.
std::size_t size_class(std::size_t bytes) {
  constexpr std::size_t largest = std::size_t{1} << 62, min_block = 64;
  if (bytes > largest) return bytes;  // upstream will refuse
  const std::size_t step = std::bit_ceil(std::max(bytes, std::size_t{1})) / 32;
  return round_up(std::max(bytes, std::size_t{1}), std::max(step, min_block));
}

}  // namespace

struct BufferPool::State {
  explicit State(Allocator upstream) : upstream(std::move(upstream)) {}
  ~State() { drop_free(); }

  const Allocator upstream;
  std::mutex mutex;
  FreeBlocks free;
  Statistics statistics;
  std::uint64_t pass = 0;

  Block* acquire(std::size_t wanted) {
    const std::size_t bytes = size_class(wanted);
    const std::lock_guard lock(mutex);
    Block* block = free.pop(bytes);
    if (!block) block = new_block(bytes);
    block->captured |= GraphCapture::active();
    statistics.in_use += bytes;
    statistics.peak = std::max(statistics.peak, statistics.in_use);
    return block;
  }

  void release(Block* block) {
    const std::lock_guard lock(mutex);
    block->pass = pass;
    free.push(block);
    statistics.in_use -= block->bytes;
  }

  void drop_free() {
    while (Block* b = free.oldest()) drop(b);
  }

 private:
  Block* new_block(std::size_t bytes) {
    free.prepare(bytes);
    make_room(bytes);
    auto block = std::make_unique<Block>();
    block->memory = allocate(bytes);
    block->bytes = bytes;
    ++statistics.allocations;
    statistics.bytes += bytes;
    return block.release();
  }

  /// Returns the oldest free blocks until `bytes` fit the limit; blocks of this pass and the previous one
  /// stay.
  void make_room(std::size_t bytes) {
    const std::size_t limit = 2 * std::max(statistics.peak, statistics.in_use + bytes);
    drop_while([&](const Block& b) {
      const bool in_turn = pass > 0 && b.pass + 1 >= pass;
      return !in_turn && statistics.bytes + bytes > limit;
    });
  }

  std::shared_ptr<std::byte> allocate(std::size_t bytes) {
    try {
      return upstream(bytes);
    } catch (const Error&) {
      if (!drop_while([](const Block&) { return true; })) throw;
    }
    return upstream(bytes);
  }

  /// Returns free blocks, oldest first, while f(block) holds; skips those that graphs use. True if any was
  /// returned.
  template <class F>
  bool drop_while(const F& f) {
    bool any = false;
    for (Block *b = free.oldest(), *next; b && f(*b); b = next) {
      next = b->newer;
      if (b->captured) continue;
      drop(b);
      any = true;
    }
    return any;
  }

  void drop(Block* b) {
    free.remove(b);
    statistics.bytes -= b->bytes;
    delete b;
  }
};

namespace {

/// Places a shared_ptr's control block in its Block. Deallocating the control block is the last access of the
/// shared_ptr, so it releases the Block to the pool. Keeps the pool's state alive until then.
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
  void deallocate(T*, std::size_t) { state->release(block); }
  template <class U>
  bool operator==(const ControlAllocator<U, State>& other) const {
    return block == other.block;
  }
};

}  // namespace

BufferPool::BufferPool(Allocator upstream) : state_(std::make_shared<State>(std::move(upstream))) {}

void BufferPool::next_pass() const {
  const std::lock_guard lock(state_->mutex);
  ++state_->pass;
}

Tensor BufferPool::empty(const Shape& shape, DType dtype) const {
  Block* block = state_->acquire(shape.count() * size_of(dtype));
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
