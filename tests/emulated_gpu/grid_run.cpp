#include "tests/emulated_gpu/grid_run.h"

#include <algorithm>
#include <array>
#include <cstdarg>
#include <cstdio>
#include <cstring>

#include "comm/core/error.h"
#include "tests/emulated_gpu/device_code.h"
#include "tests/emulated_gpu/fiber.h"

namespace rz::emulated {

uint3 thread_index, block_index, block_size, grid_size;

namespace {

constexpr std::size_t warp = 32;
constexpr std::size_t margin = 64;  // guard bytes before and behind an array of shared memory
constexpr unsigned char margin_byte = 0xA5, poison = 0xFF;

struct SharedArray {
  const void* key;
  std::size_t bytes;
  std::unique_ptr<std::byte[]> memory;

  SharedArray(const void* key, std::size_t bytes)
      : key(key), bytes(bytes), memory(new std::byte[bytes + 3 * margin]) {
    std::memset(aligned(), margin_byte, bytes + 2 * margin);
    std::memset(data(), poison, bytes);
  }
  std::byte* aligned() const {
    const auto at = reinterpret_cast<std::uintptr_t>(memory.get());
    return memory.get() + (margin - at % margin) % margin;
  }
  std::byte* data() const { return aligned() + margin; }
  bool intact() const {
    const auto whole = [](const std::byte* p) {
      return std::all_of(p, p + margin, [](std::byte b) { return b == std::byte{margin_byte}; });
    };
    return whole(aligned()) && whole(data() + bytes);
  }
};

uint3 place(std::size_t i, const cuda::Extent& e) {
  return {static_cast<unsigned>(i % e.x), static_cast<unsigned>(i / e.x % e.y),
          static_cast<unsigned>(i / e.x / e.y)};
}

std::string text(const uint3& p) { return concat("(", p.x, ", ", p.y, ", ", p.z, ")"); }

}  // namespace

struct GridRun::Thread {
  enum State { ready, at_barrier, in_warp, spinning, done };

  GridRun* run = nullptr;
  std::unique_ptr<Fiber> fiber = Fiber::acquire();
  uint3 index{};
  State state = ready;
  std::uint32_t mask = 0, present = 0;  // lanes of the exchange, and those that took part
  std::uint64_t sent = 0, published = 0;

  static void main(void* self) {
    auto* const t = static_cast<Thread*>(self);
    t->run->run_thread_(t->run->packed_.data());
    t->state = done;
  }
};

struct GridRun::Block {
  std::vector<Thread> threads;
  std::vector<SharedArray> shared;

  std::size_t lanes(std::size_t first) const { return std::min(warp, threads.size() - first); }
  bool all(Thread::State state) const {
    return std::all_of(threads.begin(), threads.end(),
                       [&](const Thread& t) { return t.state == state || t.state == Thread::done; });
  }
  bool any(Thread::State state) const {
    return std::any_of(threads.begin(), threads.end(), [&](const Thread& t) { return t.state == state; });
  }
  bool release_barrier() {
    if (!any(Thread::at_barrier) || !all(Thread::at_barrier)) return false;
    for (Thread& t : threads)
      if (t.state == Thread::at_barrier) t.state = Thread::ready;
    return true;
  }
  /// The threads of a warp that `mask` names and that have not ended are in the same exchange.
  bool complete(std::size_t first, std::uint32_t mask) const {
    for (std::size_t lane = 0; lane < lanes(first); ++lane) {
      const Thread& t = threads[first + lane];
      if ((mask >> lane & 1) && t.state != Thread::done && (t.state != Thread::in_warp || t.mask != mask))
        return false;
    }
    return true;
  }
  void release(std::size_t first, std::uint32_t mask) {
    std::uint32_t present = 0;
    for (std::size_t lane = 0; lane < lanes(first); ++lane)
      if ((mask >> lane & 1) && threads[first + lane].state == Thread::in_warp) present |= 1u << lane;
    for (std::size_t lane = 0; lane < lanes(first); ++lane) {
      Thread& t = threads[first + lane];
      if (!(present >> lane & 1)) continue;
      t.published = t.sent;
      t.present = present;
      t.state = Thread::ready;
    }
  }
  /// Resumes the threads of a warp whose exchange is complete.
  bool release_warp(std::size_t first) {
    bool released = false;
    for (std::size_t i = first; i < first + lanes(first); ++i) {
      const std::uint32_t mask = threads[i].mask;
      if (threads[i].state != Thread::in_warp || !complete(first, mask)) continue;
      release(first, mask);
      released = true;
    }
    return released;
  }
  bool release_warps() {
    bool released = false;
    for (std::size_t first = 0; first < threads.size(); first += warp) released |= release_warp(first);
    return released;
  }
};

namespace {

// The code that runs now, in the one thread that runs the machine.
GridRun* running = nullptr;
GridRun::Thread* thread = nullptr;
GridRun::Block* block = nullptr;
const GridRun::Thread* first_of_warp = nullptr;

void leave_as(GridRun::Thread::State state) {
  GridRun::Thread* const self = thread;
  self->state = state;
  self->fiber->leave();
}

}  // namespace

void wait_for_block() { leave_as(GridRun::Thread::at_barrier); }
void spin() { leave_as(GridRun::Thread::spinning); }
void wait_for_warp(std::uint32_t mask) { Exchange(mask, 0); }

Exchange::Exchange(std::uint32_t mask, std::uint64_t value) {
  if (!(mask >> lane() & 1))
    fail(Errc::system, GridRun::where(), ": a thread is not in the mask of its own warp's exchange");
  thread->mask = mask;
  thread->sent = value;
  leave_as(GridRun::Thread::in_warp);
}

unsigned Exchange::lane() const { return lane_of_thread(); }

bool Exchange::has(unsigned lane) const { return lane < warp && (thread->present >> lane & 1); }

std::uint64_t Exchange::at(unsigned lane) const {
  if (!has(lane)) return ~std::uint64_t{0};  // garbage, as from an inactive lane
  return first_of_warp[lane].published;
}

void* shared_memory(const void* key, std::size_t bytes) {
  for (const SharedArray& a : block->shared)
    if (a.key == key) return a.data();
  return block->shared.emplace_back(key, bytes).data();
}

void* dynamic_shared_memory() { return block->shared.front().data(); }

GridRun::GridRun(const cuda::KernelCall& call, const cuda::Grid& grid, std::uint64_t seed)
    : name_(call.name),
      grid_(grid),
      packed_(static_cast<const std::byte*>(call.packed),
              static_cast<const std::byte*>(call.packed) + call.packed_bytes),
      run_thread_(call.run_thread),
      seed_(seed) {}

GridRun::~GridRun() {
  if (!block_) return;
  for (Thread& t : block_->threads) Fiber::release(std::move(t.fiber));
}

namespace {
char other[160] = "nothing";
}

void GridRun::describe(const char* format, ...) noexcept {
  std::va_list arguments;
  va_start(arguments, format);
  std::vsnprintf(other, sizeof other, format, arguments);
  va_end(arguments);
}

const char* GridRun::where() noexcept {
  static char text[160];
  if (!running) return other;
  std::snprintf(text, sizeof text, "kernel %s, block (%u, %u, %u), thread (%u, %u, %u)",
                running->name_.c_str(), block_index.x, block_index.y, block_index.z, thread_index.x,
                thread_index.y, thread_index.z);
  return text;
}

void GridRun::begin_block() {
  if (!block_) block_ = std::make_unique<Block>();
  block_->shared.clear();
  block_->shared.emplace_back(nullptr, grid_.shared_bytes);
  block_->threads.resize(grid_.threads.count());
  for (std::size_t i = 0; i < block_->threads.size(); ++i) {
    Thread& t = block_->threads[i];
    t.run = this;
    t.index = place(i, grid_.threads);
    t.state = Thread::ready;
    t.fiber->start(Thread::main, &t);
  }
  in_block_ = true;
}

/// Runs every runnable thread of a warp once. True if one of them did more than wait for memory.
bool GridRun::run_warp(std::size_t first, bool backwards) {
  bool progress = false;
  const std::size_t lanes = block_->lanes(first);
  first_of_warp = &block_->threads[first];
  for (std::size_t i = 0; i < lanes; ++i) {
    Thread& t = block_->threads[first + (backwards ? lanes - 1 - i : i)];
    if (t.state != Thread::ready && t.state != Thread::spinning) continue;
    thread = &t;
    thread_index = t.index;
    t.fiber->resume();
    progress |= t.state != Thread::spinning;
  }
  return progress;
}

/// By the seed, warps alternate from one exchange to the next, or each runs as far as it can without the
/// others.
GridRun::Progress GridRun::run_block() {
  std::vector<Thread>& threads = block_->threads;
  const std::size_t warps_here = (threads.size() + warp - 1) / warp, begin = seed_ / 4 % warps_here;
  const bool backwards = seed_ & 1, drift = seed_ & 2;
  for (;;) {
    bool progress = false;
    for (std::size_t w = 0; w < warps_here; ++w) {
      const std::size_t first = ((backwards ? warps_here - 1 - w : w) + begin) % warps_here * warp;
      while (run_warp(first, backwards)) {
        progress = true;
        if (!drift || !block_->release_warp(first)) break;
      }
    }
    if (block_->all(Thread::done)) return Progress::done;
    const bool warps = block_->release_warps(), barrier = block_->release_barrier();
    if (progress || warps || barrier) continue;
    if (block_->any(Thread::spinning)) return Progress::waiting;
    const auto stuck =
        std::find_if(threads.begin(), threads.end(), [](const Thread& t) { return t.state != Thread::done; });
    fail(Errc::system, "kernel ", name_, ", block ", text(block_index),
         ": threads wait at different barriers; thread ", text(stuck->index), " waits ",
         stuck->state == Thread::at_barrier ? "for its block" : "for its warp");
  }
}

void GridRun::end_block() {
  in_block_ = false;
  for (const SharedArray& a : block_->shared)
    if (!a.intact())
      fail(Errc::system, "kernel ", name_, ", block ", text(block_index), " wrote beyond its ", a.bytes,
           " bytes of shared memory");
}

GridRun::Progress GridRun::run(std::size_t blocks) {
  struct Running {
    explicit Running(GridRun* r) {
      running = r;
      block_size = {r->grid_.threads.x, r->grid_.threads.y, r->grid_.threads.z};
      grid_size = {r->grid_.blocks.x, r->grid_.blocks.y, r->grid_.blocks.z};
    }
    ~Running() { running = nullptr; }
  } guard(this);
  for (; blocks > 0 && next_ < grid_.blocks.count(); --blocks) {
    block_index = place(next_, grid_.blocks);
    if (!in_block_) begin_block();
    block = block_.get();
    if (run_block() == Progress::waiting) return Progress::waiting;
    end_block();
    ++next_;
  }
  return next_ == grid_.blocks.count() ? Progress::done : Progress::more;
}

}  // namespace rz::emulated
