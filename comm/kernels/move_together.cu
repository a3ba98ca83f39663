// Collectives that move bytes as they are: every rank reads what its peers offer it, straight from their
// memory.

#include "comm/core/cuda/launch.h"
#include "comm/kernels/meeting.cuh"
#include "comm/kernels/peer_kernels.h"

namespace rz::peer {

namespace {

struct Range {
  std::size_t begin, bytes;
  bool more;
};

/// Of `total` bytes between two ranks: this block's chunk that begins `done` bytes into its stripe.
__device__ Range chunk_of(std::size_t total, std::size_t done, std::size_t most) {
  const std::size_t stripe = ((total + gridDim.x - 1) / gridDim.x + 15) / 16 * 16;
  const std::size_t first = blockIdx.x * stripe, last = first + stripe;
  const std::size_t from = first + done, to = from + most < last ? from + most : last;
  const std::size_t begin = from < total ? from : total, end = to < total ? to : total;
  return {begin, end > begin ? end - begin : 0, to < last && to < total};
}

__global__ void __launch_bounds__(512, 2)
    move_together_kernel(const __grid_constant__ Seat seat, const __grid_constant__ MoveCall call) {
  RZ_SHARED(BlockState, states, 1);
  BlockState& block = states[0];
  begin(seat, collectives, block);
  std::uint64_t step = block.step;
  const std::size_t between = call.same ? 0 : call.piece;
  bool well = true;
  for (std::size_t done = 0; well; done += call.piece) {
    const std::uint64_t slot = seat.layout.slot(static_cast<int>(blockIdx.x), step);
    bool more = false, staged = call.in_source != 0;
    for (int peer = 0; peer < seat.size; ++peer) {
      const Range r = chunk_of(call.send_bytes[peer], done, call.piece);
      more |= r.more;
      if (staged || r.bytes == 0) continue;
      copy(seat.arenas[seat.rank] + slot + static_cast<std::size_t>(peer) * between,
           call.in + call.send_at[peer] + r.begin, r.bytes, lane_of_block());
      staged = call.same;
    }
    const auto offer = [&](int peer) {
      if (!call.in_source) return in_arena | (slot + static_cast<std::size_t>(peer) * between);
      return call.in_source + call.send_at[peer] + chunk_of(call.send_bytes[peer], done, call.piece).begin;
    };
    const auto count = [&](const std::uint64_t* counts) {
      return [counts](int peer) { return counts[peer]; };
    };
    well = meet(seat, block, step, call.what, more, count(call.count_to), count(call.count_from), offer);
    for (int peer = 0; well && peer < seat.size; ++peer) {
      const Range r = chunk_of(call.recv_bytes[peer], done, call.piece);
      copy(call.out + call.recv_at[peer] + r.begin, reinterpret_cast<const std::byte*>(block.source[peer]),
           r.bytes, lane_of_block());
    }
    if (!block.more[step++ % 2]) break;
  }
  const auto nothing = [](int) { return std::uint64_t{0}; };
  if (well && call.last_step) meet(seat, block, step++, call.what, false, nothing, nothing, nothing);
  end(seat, collectives, step);
}

}  // namespace

void move_together(const Seat& seat, const MoveCall& call, int blocks, int threads, const Stream& stream) {
  cuda::launch("move_together", move_together_kernel,
               cuda::Grid{{static_cast<unsigned>(blocks)}, {static_cast<unsigned>(threads)}, 0}, stream, seat,
               call);
}

}  // namespace rz::peer
