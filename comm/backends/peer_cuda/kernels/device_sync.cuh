#pragma once
/// Synchronization among the blocks of several ranks: sync slots, and loops that poll them. Device code.

#include "comm/backends/peer_cuda/kernels/kernel_args.h"
#include "comm/backends/peer_cuda/kernels/reduce_elements.cuh"

namespace rz::peer {

// ---- loads and stores of memory that other devices and the host access while a kernel runs

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

/// Pause between two polls of a waiting loop.
__device__ inline void backoff(unsigned turn) {
#ifdef RZ_EMULATED_GPU
  __nanosleep(turn);
#else
  if (turn > 200) __nanosleep(100);
#endif
}

// ---- a block's state

struct BlockState {
  std::uint64_t step;
  std::uint64_t source[max_ranks];  ///< addresses
  std::uint32_t more[2];            ///< by parity of the step: some rank has more chunks
  std::uint32_t failed;
};

__device__ inline DeviceCounters& own_counters(const DeviceComm& comm) {
  return *reinterpret_cast<DeviceCounters*>(comm.arenas[comm.rank]);
}
__device__ inline ThreadIndex block_thread() { return {threadIdx.x, blockDim.x}; }

__device__ inline void begin_call(const DeviceComm& comm, int channel, BlockState& block) {
  if (threadIdx.x == 0) {
    block.step = channel == collective_channel ? own_counters(comm).steps[blockIdx.x] : 0;
    block.more[0] = block.more[1] = block.failed = 0;
    if (blockIdx.x == 0) store_release(&comm.status->started[channel], own_counters(comm).calls[channel] + 1);
  }
  __syncthreads();
}

/// Records the end of this block. The last block of the grid publishes the end of the call.
__device__ inline void end_call(const DeviceComm& comm, int channel, std::uint64_t step) {
  __syncthreads();
  if (threadIdx.x != 0) return;
  DeviceCounters& counters = own_counters(comm);
  if (channel == collective_channel) counters.steps[blockIdx.x] = step;
  __threadfence();
  if (atomicAdd(&counters.finished[channel], 1u) + 1 != gridDim.x) return;
  counters.finished[channel] = 0;
  counters.calls[channel] += 1;
  store_release(&comm.status->finished[channel], counters.calls[channel]);
}

/// Reports the first error to the host and stops all blocks of this rank.
__device__ inline void report_error(const DeviceComm& comm, DeviceError error, int culprit,
                                    std::uint64_t own_signature = 0, std::uint64_t own_count = 0,
                                    std::uint64_t signature = 0, std::uint64_t count = 0) {
  if (atomicExch(&own_counters(comm).failed, 1u) != 0) return;
  DeviceStatus& status = *comm.status;
  status.culprit = static_cast<std::uint32_t>(culprit);
  status.own_call[0] = own_signature, status.own_call[1] = own_count;
  status.peer_call[0] = signature, status.peer_call[1] = count;
  store_release(&status.error, static_cast<std::uint32_t>(error));
  store_release(&status.stop, 1u);
}

/// Periodic check of a thread that polls for `peer`: marks the peer as waited for, and detects departures and
/// stop requests. False: exit the kernel.
__device__ inline bool should_continue(const DeviceComm& comm, int channel, int peer, unsigned turn) {
  if (turn % 64 != 0) return true;
  if (turn == 256 || turn % 4096 == 0) store_release(&comm.status->waiting_on[channel][peer], 1u);
  const std::uint32_t departure = load_acquire(&own_counters(comm).departed[peer]);
  if (departure != present) report_error(comm, departure == left_group ? peer_left : peer_aborted, peer);
  const bool stop = load_acquire(&comm.status->stop) != 0;
  if (stop) store_release(&comm.status->waiting_on[channel][peer], 1u);
  return !stop;
}

__device__ inline bool wait_for_flag(const DeviceComm& comm, int peer, const std::uint64_t* flag,
                                     std::uint64_t value) {
  unsigned turn = 0;
  while (load_acquire(flag) < value) {
    if (!should_continue(comm, collective_channel, peer, ++turn)) return false;
    backoff(turn);
  }
  if (turn >= 256) store_release(&comm.status->waiting_on[collective_channel][peer], 0u);
  return true;
}

__device__ inline std::uint64_t resolve_source(const DeviceComm& comm, int peer, std::uint64_t source) {
  if (source & in_arena) return reinterpret_cast<std::uint64_t>(comm.arenas[peer] + (source & ~in_arena));
  if (!(source & in_window)) return source;
  const int window = static_cast<int>(source >> window_shift) & (max_windows - 1);
  const std::uint64_t offset = source & ((std::uint64_t{1} << window_shift) - 1);
  const std::byte* const addresses = comm.arenas[comm.rank] + comm.layout.window(window);
  return reinterpret_cast<const std::uint64_t*>(addresses)[peer] + offset;
}

/// One step. Publishes source_for(peer) to each peer and waits for the sources of all peers, stored to
/// block.source. Writes by all threads of the block before the call are visible to the peers after it. False:
/// exit the kernel.
template <class SourceFn, class Count>
__device__ bool sync_step(const DeviceComm& comm, BlockState& block, std::uint64_t step,
                          std::uint64_t signature, bool more, const Count& count_to, const Count& count_from,
                          const SourceFn& source_for) {
  __syncthreads();
  const int peer = static_cast<int>(threadIdx.x);
  if (peer == 0) block.more[(step + 1) % 2] = 0;
  if (peer < comm.size) {
    const auto sync_slot = [&](int of, int from) {
      return reinterpret_cast<SyncSlot*>(comm.arenas[of] +
                                         comm.layout.sync_slot(static_cast<int>(blockIdx.x), step, from));
    };
    SyncSlot* const to = sync_slot(peer, comm.rank);
    to->signature = signature | (more ? more_data : 0);
    to->count = count_to(peer);
    to->source = source_for(peer);
    store_release(&to->step, step + 1);
    const SyncSlot* const from = sync_slot(comm.rank, peer);
    if (!wait_for_flag(comm, peer, &from->step, step + 1)) {
      block.failed = 1;
    } else if ((from->signature & ~more_data) != signature || from->count != count_from(peer)) {
      report_error(comm, mismatch, peer, signature, count_from(peer), from->signature & ~more_data,
                   from->count);
      block.failed = 1;
    } else {
      block.source[peer] = resolve_source(comm, peer, from->source);
      if (from->signature & more_data) block.more[step % 2] = 1;
    }
  }
  __syncthreads();
  return block.failed == 0;
}

// ---- bytes

template <class W>
__device__ void copy_as(std::byte* to, const std::byte* from, std::size_t words, ThreadIndex thread) {
  auto* const d = reinterpret_cast<W*>(to);
  const auto* const s = reinterpret_cast<const W*>(from);
  std::size_t i = thread.index;
  for (; i + 3 * thread.count < words; i += 4 * thread.count) {  // four loads in flight
    const W a = s[i], b = s[i + thread.count], c = s[i + 2 * thread.count], e = s[i + 3 * thread.count];
    d[i] = a, d[i + thread.count] = b, d[i + 2 * thread.count] = c, d[i + 3 * thread.count] = e;
  }
  for (; i < words; i += thread.count) d[i] = s[i];
}

__device__ inline void copy(void* to, const void* from, std::size_t bytes, ThreadIndex thread) {
  if (to == from) return;
  auto* const d = static_cast<std::byte*>(to);
  const auto* const s = static_cast<const std::byte*>(from);
  const auto both = reinterpret_cast<std::uintptr_t>(d) | reinterpret_cast<std::uintptr_t>(s);
  std::size_t done = 0;
  if (both % 16 == 0)
    copy_as<Word<std::uint32_t>>(d, s, bytes / 16, thread), done = bytes / 16 * 16;
  else if (both % 4 == 0)
    copy_as<std::uint32_t>(d, s, bytes / 4, thread), done = bytes / 4 * 4;
  else if (both % 2 == 0)
    copy_as<std::uint16_t>(d, s, bytes / 2, thread), done = bytes / 2 * 2;
  copy_as<std::uint8_t>(d + done, s + done, bytes - done, thread);
}

}  // namespace rz::peer
