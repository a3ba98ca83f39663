#include "comm/device/caching_allocator.h"

#include <algorithm>
#include <map>
#include <mutex>
#include <set>

#include "comm/core/error.h"
#include "comm/core/integer_math.h"

namespace rz {

namespace {

constexpr std::size_t alignment = 512, mebibyte = std::size_t{1} << 20;
constexpr std::size_t reserve_slack = 64 * mebibyte;  // segments are larger than their blocks

std::size_t round_up_nonzero(std::size_t bytes, std::size_t to) {
  return round_up(std::max<std::size_t>(bytes, 1), to);
}

/// Size of the segment to allocate for a block. Small blocks share segments.
std::size_t segment_bytes(std::size_t block) {
  if (block <= mebibyte) return 2 * mebibyte;
  if (block < 10 * mebibyte) return 20 * mebibyte;
  return round_up_nonzero(block, 2 * mebibyte);
}

/// Part of a segment. `previous` and `next` are its neighbors in the segment.
struct Block {
  std::shared_ptr<std::byte> segment;
  std::byte* data;
  std::size_t bytes;
  void* stream;
  Block *previous = nullptr, *next = nullptr;
  bool free = false;
};

struct SmallerBlock {
  bool operator()(const Block* a, const Block* b) const {
    return a->bytes != b->bytes ? a->bytes < b->bytes : a->data < b->data;
  }
};

}  // namespace

struct CachingAllocator::State {
  explicit State(Allocator upstream) : upstream(std::move(upstream)) {}
  ~State() { trim(); }

  const Allocator upstream;
  std::mutex mutex;
  std::map<void*, std::set<Block*, SmallerBlock>> free;  // per stream
  Statistics statistics;

  Block* acquire(std::size_t wanted, void* stream) {
    const std::size_t bytes = round_up_nonzero(wanted, alignment);
    ++statistics.requests;
    Block* block = best_fit(bytes, stream);
    if (block) {
      ++statistics.reused;
      free[stream].erase(block);
    } else {
      block = new_segment(bytes, stream);
    }
    block->free = false;
    if (block->bytes - bytes >= (block->bytes <= 2 * mebibyte ? alignment : mebibyte)) split(*block, bytes);
    statistics.in_use += block->bytes;
    statistics.peak = std::max(statistics.peak, statistics.in_use);
    return block;
  }

  /// A small block is not placed in a large segment, which it would keep from being released.
  Block* best_fit(std::size_t bytes, void* stream) {
    Block key{{}, nullptr, bytes, stream};
    auto& blocks = free[stream];
    const auto it = blocks.lower_bound(&key);
    const bool fits = it != blocks.end() && (bytes > mebibyte || (*it)->bytes <= 2 * mebibyte);
    return fits ? *it : nullptr;
  }

  Block* new_segment(std::size_t bytes, void* stream) {
    const std::size_t size = segment_bytes(bytes);
    const std::size_t max_in_use = std::max(statistics.peak, statistics.in_use + bytes);
    if (statistics.reserved + size > max_in_use + max_in_use / 4 + reserve_slack) trim();
    std::shared_ptr<std::byte> memory;
    try {
      memory = upstream(size);
    } catch (const Error&) {
      if (trim() == 0) throw;
      memory = upstream(size);
    }
    ++statistics.segments;
    statistics.reserved += size;
    return new Block{memory, memory.get(), size, stream};
  }

  void split(Block& block, std::size_t bytes) {
    auto* const rest = new Block{
        block.segment, block.data + bytes, block.bytes - bytes, block.stream, &block, block.next, true};
    if (block.next) block.next->previous = rest;
    block.next = rest;
    block.bytes = bytes;
    free[block.stream].insert(rest);
  }

  void release(Block* block) {
    const std::lock_guard lock(mutex);
    statistics.in_use -= block->bytes;
    if (block->previous && block->previous->free) block = merge(block->previous, block);
    if (block->next && block->next->free) merge(block, block->next);
    block->free = true;
    free[block->stream].insert(block);
  }

  /// Merges adjacent blocks `a` and `b` and returns `a`. Neither is in the list of free blocks afterwards.
  Block* merge(Block* a, Block* b) {
    if (a->free) free[a->stream].erase(a), a->free = false;
    if (b->free) free[b->stream].erase(b);
    a->bytes += b->bytes;
    a->next = b->next;
    if (b->next) b->next->previous = a;
    delete b;
    return a;
  }

  /// Returns wholly free segments to upstream; returns their bytes.
  std::size_t trim() {
    std::size_t bytes = 0;
    for (auto& [stream, blocks] : free)
      for (auto it = blocks.begin(); it != blocks.end();) {
        Block* const block = *it;
        if (block->previous || block->next) {
          ++it;
          continue;
        }
        it = blocks.erase(it);
        bytes += block->bytes;
        --statistics.segments;
        delete block;
      }
    statistics.reserved -= bytes;
    return bytes;
  }
};

CachingAllocator::CachingAllocator(Allocator upstream)
    : state_(std::make_shared<State>(std::move(upstream))) {}

std::shared_ptr<std::byte> CachingAllocator::allocate(std::size_t bytes, const Stream& stream) const {
  require(stream.device() == state_->upstream.device, Errc::invalid_argument, "memory of ",
          name(state_->upstream.device), " was requested in a stream of ", name(stream.device()));
  const std::lock_guard lock(state_->mutex);
  Block* const block = state_->acquire(bytes, stream.native());
  return {block->data, [state = state_, block](std::byte*) { state->release(block); }};
}

Allocator CachingAllocator::on(const Stream& stream) const {
  return {[self = *this, stream](std::size_t bytes) { return self.allocate(bytes, stream); },
          stream.device()};
}

CachingAllocator::Statistics CachingAllocator::statistics() const {
  const std::lock_guard lock(state_->mutex);
  return state_->statistics;
}

void CachingAllocator::trim() const {
  const std::lock_guard lock(state_->mutex);
  state_->trim();
}

}  // namespace rz
