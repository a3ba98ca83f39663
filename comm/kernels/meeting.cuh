#pragma once
/// How blocks of several ranks meet: letters, and the loops that wait for them. Device code.

#include "comm/kernels/fold.cuh"
#include "comm/kernels/peer_call.h"

namespace rz::peer {

// ---- memory that other devices and the host write while a kernel runs

template <class T>
__device__ inline T load_acquire(const T* from) {
#ifdef RZ_EMULATED_GPU
  return __atomic_load_n(from, __ATOMIC_ACQUIRE);
#else
  T value;
  if constexpr (sizeof(T) == 8)
    asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(from) : "memory");
  else
    asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(from) : "memory");
  return value;
#endif
}

template <class T>
__device__ inline void store_release(T* to, T value) {
#ifdef RZ_EMULATED_GPU
  __atomic_store_n(to, value, __ATOMIC_RELEASE);
#else
  if constexpr (sizeof(T) == 8)
    asm volatile("st.release.sys.global.u64 [%0], %1;" : : "l"(to), "l"(value) : "memory");
  else
    asm volatile("st.release.sys.global.u32 [%0], %1;" : : "l"(to), "r"(value) : "memory");
#endif
}

/// A turn of a loop that waits.
__device__ inline void rest(unsigned turn) {
#ifdef RZ_EMULATED_GPU
  __nanosleep(turn);
#else
  if (turn > 200) __nanosleep(100);
#endif
}

// ---- a block's state

struct BlockState {
  std::uint64_t step;
  std::uint64_t source[most_ranks];  ///< addresses
  std::uint32_t more[2];             ///< by parity of the step: somebody has more to offer
  std::uint32_t failed;
};

__device__ inline Counters& own(const Seat& seat) {
  return *reinterpret_cast<Counters*>(seat.arenas[seat.rank]);
}
__device__ inline Lane lane_of_block() { return {threadIdx.x, blockDim.x}; }

__device__ inline void begin(const Seat& seat, int lane, BlockState& block) {
  if (threadIdx.x == 0) {
    block.step = lane == collectives ? own(seat).steps[blockIdx.x] : 0;
    block.more[0] = block.more[1] = block.failed = 0;
    if (blockIdx.x == 0) store_release(&seat.status->entered[lane], own(seat).calls[lane] + 1);
  }
  __syncthreads();
}

/// The grid's last block to end says so.
__device__ inline void end(const Seat& seat, int lane, std::uint64_t step) {
  __syncthreads();
  if (threadIdx.x != 0) return;
  Counters& counters = own(seat);
  if (lane == collectives) counters.steps[blockIdx.x] = step;
  __threadfence();
  if (atomicAdd(&counters.finished[lane], 1u) + 1 != gridDim.x) return;
  counters.finished[lane] = 0;
  counters.calls[lane] += 1;
  store_release(&seat.status->left[lane], counters.calls[lane]);
}

/// Tells the host once, and stops all blocks of this rank.
__device__ inline void report(const Seat& seat, Trouble trouble, int culprit, std::uint64_t own_what = 0,
                              std::uint64_t own_count = 0, std::uint64_t what = 0, std::uint64_t count = 0) {
  if (atomicExch(&own(seat).broken, 1u) != 0) return;
  Status& status = *seat.status;
  status.culprit = static_cast<std::uint32_t>(culprit);
  status.own[0] = own_what, status.own[1] = own_count;
  status.theirs[0] = what, status.theirs[1] = count;
  store_release(&status.trouble, static_cast<std::uint32_t>(trouble));
  store_release(&status.stop, 1u);
}

/// What a thread that waits for a peer looks at now and then. False: leave.
__device__ inline bool go_on(const Seat& seat, int lane, int peer, unsigned turn) {
  if (turn % 64 != 0) return true;
  if (turn == 256 || turn % 4096 == 0) store_release(&seat.status->waits_for[lane][peer], 1u);
  const std::uint32_t leaving = load_acquire(&own(seat).gone[peer]);
  if (leaving != stays) report(seat, leaving == left ? peer_left : peer_aborted, peer);
  const bool stop = load_acquire(&seat.status->stop) != 0;
  if (stop) store_release(&seat.status->waits_for[lane][peer], 1u);
  return !stop;
}

__device__ inline bool await(const Seat& seat, int peer, const std::uint64_t* flag, std::uint64_t value) {
  unsigned turn = 0;
  while (load_acquire(flag) < value) {
    if (!go_on(seat, collectives, peer, ++turn)) return false;
    rest(turn);
  }
  if (turn >= 256) store_release(&seat.status->waits_for[collectives][peer], 0u);
  return true;
}

__device__ inline std::uint64_t address_of(const Seat& seat, int peer, std::uint64_t source) {
  if (source & in_arena) return reinterpret_cast<std::uint64_t>(seat.arenas[peer] + (source & ~in_arena));
  if (!(source & in_window)) return source;
  const int window = static_cast<int>(source >> window_shift) & (most_windows - 1);
  const std::uint64_t offset = source & ((std::uint64_t{1} << window_shift) - 1);
  const std::byte* const addresses = seat.arenas[seat.rank] + seat.layout.window(window);
  return reinterpret_cast<const std::uint64_t*>(addresses)[peer] + offset;
}

/// One step. Offers offer(peer) to each peer and waits for what they offer, which block.source then holds.
/// What all threads of the block wrote before is visible to the peers after it. False: leave the kernel.
template <class Offer, class Count>
__device__ bool meet(const Seat& seat, BlockState& block, std::uint64_t step, std::uint64_t what, bool more,
                     const Count& count_to, const Count& count_from, const Offer& offer) {
  __syncthreads();
  const int peer = static_cast<int>(threadIdx.x);
  if (peer == 0) block.more[(step + 1) % 2] = 0;
  if (peer < seat.size) {
    const auto letter = [&](int of, int from) {
      return reinterpret_cast<Letter*>(seat.arenas[of] +
                                       seat.layout.letter(static_cast<int>(blockIdx.x), step, from));
    };
    Letter* const to = letter(peer, seat.rank);
    to->what = what | (more ? more_to_come : 0);
    to->count = count_to(peer);
    to->source = offer(peer);
    store_release(&to->step, step + 1);
    const Letter* const from = letter(seat.rank, peer);
    if (!await(seat, peer, &from->step, step + 1)) {
      block.failed = 1;
    } else if ((from->what & ~more_to_come) != what || from->count != count_from(peer)) {
      report(seat, mismatch, peer, what, count_from(peer), from->what & ~more_to_come, from->count);
      block.failed = 1;
    } else {
      block.source[peer] = address_of(seat, peer, from->source);
      if (from->what & more_to_come) block.more[step % 2] = 1;
    }
  }
  __syncthreads();
  return block.failed == 0;
}

// ---- bytes

template <class W>
__device__ void copy_as(std::byte* to, const std::byte* from, std::size_t words, Lane lane) {
  auto* const d = reinterpret_cast<W*>(to);
  const auto* const s = reinterpret_cast<const W*>(from);
  std::size_t i = lane.index;
  for (; i + 3 * lane.of < words; i += 4 * lane.of) {  // four loads on their way
    const W a = s[i], b = s[i + lane.of], c = s[i + 2 * lane.of], e = s[i + 3 * lane.of];
    d[i] = a, d[i + lane.of] = b, d[i + 2 * lane.of] = c, d[i + 3 * lane.of] = e;
  }
  for (; i < words; i += lane.of) d[i] = s[i];
}

__device__ inline void copy(void* to, const void* from, std::size_t bytes, Lane lane) {
  if (to == from) return;
  auto* const d = static_cast<std::byte*>(to);
  const auto* const s = static_cast<const std::byte*>(from);
  const auto both = reinterpret_cast<std::uintptr_t>(d) | reinterpret_cast<std::uintptr_t>(s);
  std::size_t done = 0;
  if (both % 16 == 0)
    copy_as<Word<std::uint32_t>>(d, s, bytes / 16, lane), done = bytes / 16 * 16;
  else if (both % 4 == 0)
    copy_as<std::uint32_t>(d, s, bytes / 4, lane), done = bytes / 4 * 4;
  else if (both % 2 == 0)
    copy_as<std::uint16_t>(d, s, bytes / 2, lane), done = bytes / 2 * 2;
  copy_as<std::uint8_t>(d + done, s + done, bytes - done, lane);
}

}  // namespace rz::peer
