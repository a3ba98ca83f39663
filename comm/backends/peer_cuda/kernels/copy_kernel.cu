// Collectives that only move data: every rank reads its peers' data from their memory.

#include "comm/backends/peer_cuda/kernels/device_sync.cuh"
#include "comm/backends/peer_cuda/kernels/peer_kernels.h"
#include "comm/device/launch.h"

namespace rz::peer {

namespace {

struct Range {
  std::size_t begin, bytes;
  bool more;
};

/// This block's chunk that begins `done` bytes into its stripe, out of `total` bytes between two ranks.
__device__ Range chunk_of(std::size_t total, std::size_t done, std::size_t max_bytes) {
  const std::size_t stripe = ((total + gridDim.x - 1) / gridDim.x + 15) / 16 * 16;
  const std::size_t first = blockIdx.x * stripe, last = first + stripe;
  const std::size_t from = first + done, to = from + max_bytes < last ? from + max_bytes : last;
  const std::size_t begin = from < total ? from : total, end = to < total ? to : total;
  return {begin, end > begin ? end - begin : 0, to < last && to < total};
}

__global__ void __launch_bounds__(512, 2)
    collective_copy_kernel(const __grid_constant__ DeviceComm comm, const __grid_constant__ CopyArgs call) {
  RZ_SHARED(BlockState, states, 1);
  BlockState& block = states[0];
  begin_call(comm, collective_channel, block);
  std::uint64_t step = block.step;
  const std::size_t peer_stride = call.same_to_all ? 0 : call.chunk;
  bool ok = true;
  for (std::size_t done = 0; ok; done += call.chunk) {
    const std::uint64_t slot = comm.layout.slot(static_cast<int>(blockIdx.x), step);
    bool more = false, staged = call.in_source != 0;
    for (int peer = 0; peer < comm.size; ++peer) {
      const Range r = chunk_of(call.send_bytes[peer], done, call.chunk);
      more |= r.more;
      if (staged || r.bytes == 0) continue;
      copy(comm.arenas[comm.rank] + slot + static_cast<std::size_t>(peer) * peer_stride,
           call.in + call.send_offsets[peer] + r.begin, r.bytes, block_thread());
      staged = call.same_to_all;
    }
    const auto source_for = [&](int peer) {
      if (!call.in_source) return in_arena | (slot + static_cast<std::size_t>(peer) * peer_stride);
      return call.in_source + call.send_offsets[peer] +
             chunk_of(call.send_bytes[peer], done, call.chunk).begin;
    };
    const auto count = [&](const std::uint64_t* counts) {
      return [counts](int peer) { return counts[peer]; };
    };
    ok = sync_step(comm, block, step, call.signature, more, count(call.count_to), count(call.count_from),
                   source_for);
    for (int peer = 0; ok && peer < comm.size; ++peer) {
      const Range r = chunk_of(call.recv_bytes[peer], done, call.chunk);
      copy(call.out + call.recv_offsets[peer] + r.begin,
           reinterpret_cast<const std::byte*>(block.source[peer]), r.bytes, block_thread());
    }
    if (!block.more[step++ % 2]) break;
  }
  const auto nothing = [](int) { return std::uint64_t{0}; };
  if (ok && call.exit_step) sync_step(comm, block, step++, call.signature, false, nothing, nothing, nothing);
  end_call(comm, collective_channel, step);
}

}  // namespace

void collective_copy(const DeviceComm& comm, const CopyArgs& call, int blocks, int threads,
                     const Stream& stream) {
  cuda::launch("collective_copy", collective_copy_kernel,
               cuda::Grid{{static_cast<unsigned>(blocks)}, {static_cast<unsigned>(threads)}, 0}, stream, comm,
               call);
}

}  // namespace rz::peer
