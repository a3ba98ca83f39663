// Reductions among ranks: each folds what its peers offer, straight from their memory and in rank order.
// One-shot: everybody folds everything. Two-shot: rank r folds part r, and a second step gathers the results.

#include "comm/core/cuda/launch.h"
#include "comm/kernels/meeting.cuh"
#include "comm/kernels/peer_kernels.h"

namespace rz::peer {

namespace {

/// What one step of a block moves of each part.
struct Chunk {
  std::size_t at;    // in the part
  std::size_t most;  // elements

  __device__ std::size_t length(const FoldCall& call, int part) const {
    const std::size_t begin = static_cast<std::size_t>(part) * call.part;
    const std::size_t rest = call.count > begin ? call.count - begin : 0;
    const std::size_t whole = rest < call.part ? rest : call.part;
    const std::size_t left = whole > at ? whole - at : 0;
    return left < most ? left : most;
  }
};

template <class T>
__device__ void stage(const FoldCall& call, const Chunk& chunk, T* slot) {
  for (int part = 0; part < call.parts; ++part) {
    const T* const from =
        static_cast<const T*>(call.in) + static_cast<std::size_t>(part) * call.part + chunk.at;
    T* const to = slot + static_cast<std::size_t>(part) * call.piece;
    const std::size_t n = chunk.length(call, part);
    if (call.scales)
      scale_by(to, from, n, call.factor, lane_of_block());
    else
      copy(to, from, n * sizeof(T), lane_of_block());
  }
}

template <class Op, class T>
__global__ void __launch_bounds__(512, 2)
    fold_together_kernel(const __grid_constant__ Seat seat, const __grid_constant__ FoldCall call, Op op) {
  RZ_SHARED(BlockState, states, 1);
  BlockState& block = states[0];
  begin(seat, collectives, block);
  std::uint64_t step = block.step;
  const auto count = [&](int) { return call.signature_count; };
  const auto slot = [&](std::uint64_t s) {
    return seat.arenas[seat.rank] + seat.layout.slot(static_cast<int>(blockIdx.x), s);
  };
  const auto part_of = [&](int rank) { return static_cast<std::size_t>(call.parts > 1 ? rank : 0); };
  const auto meet_with = [&](const auto& offer) {
    return meet(seat, block, step++, call.what, false, count, count, offer);
  };
  const int own_part = static_cast<int>(part_of(seat.rank));
  bool well = true;
  for (std::size_t done = 0; well && (done == 0 || done < call.stripe); done += call.piece) {
    const std::size_t left = call.stripe - done;
    const Chunk chunk{blockIdx.x * call.stripe + done, left < call.piece ? left : call.piece};
    if (!call.in_source) stage(call, chunk, reinterpret_cast<T*>(slot(step)));
    const std::uint64_t slot_at = in_arena | seat.layout.slot(static_cast<int>(blockIdx.x), step);
    well = meet_with([&](int peer) {
      return call.in_source ? call.in_source + (part_of(peer) * call.part + chunk.at) * sizeof(T)
                            : slot_at + part_of(peer) * call.piece * sizeof(T);
    });
    if (!well || !call.here) continue;
    const std::size_t at = (call.scatters ? 0 : part_of(seat.rank) * call.part) + chunk.at;
    T* target = static_cast<T*>(call.out) + at;
    if (call.gathers && !call.out_source) target = reinterpret_cast<T*>(slot(step));
    fold(op, target, reinterpret_cast<const T* const*>(block.source), seat.size, chunk.length(call, own_part),
         call.divisor, lane_of_block());
    if (!call.gathers) continue;
    const std::uint64_t result = call.out_source
                                     ? call.out_source + at * sizeof(T)
                                     : in_arena | seat.layout.slot(static_cast<int>(blockIdx.x), step);
    well = meet_with([&](int) { return result; });
    for (int part = 0; well && part < call.parts; ++part)
      copy(static_cast<T*>(call.out) + static_cast<std::size_t>(part) * call.part + chunk.at,
           reinterpret_cast<const T*>(block.source[part]), chunk.length(call, part) * sizeof(T),
           lane_of_block());
  }
  if (well && call.last_step) meet_with([](int) { return std::uint64_t{0}; });
  end(seat, collectives, step);
}

}  // namespace

void fold_together(const Seat& seat, const FoldCall& call, DType dtype, ReduceOp::Kind kind, int blocks,
                   int threads, const Stream& stream) {
  with_op(kind, dtype, [&](auto op, auto element) {
    cuda::launch("fold_together", fold_together_kernel<decltype(op), decltype(element)>,
                 cuda::Grid{{static_cast<unsigned>(blocks)}, {static_cast<unsigned>(threads)}, 0}, stream,
                 seat, call, op);
  });
}

}  // namespace rz::peer
