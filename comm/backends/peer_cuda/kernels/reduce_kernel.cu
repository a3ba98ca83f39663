// Reductions among ranks. Each rank reduces its peers' data, read from their memory, in rank order. One-shot:
// every rank reduces everything. Two-shot: rank r reduces shard r, and a second step gathers the results.

#include "comm/backends/peer_cuda/kernels/device_sync.cuh"
#include "comm/backends/peer_cuda/kernels/peer_kernels.h"
#include "comm/device/launch.h"

namespace rz::peer {

namespace {

/// The elements of each shard that a block processes in one step.
struct Chunk {
  std::size_t offset;  // in the shard
  std::size_t max_elements;

  __device__ std::size_t length(const ReduceArgs& call, int part) const {
    const std::size_t begin = static_cast<std::size_t>(part) * call.shard;
    const std::size_t rest = call.count > begin ? call.count - begin : 0;
    const std::size_t whole = rest < call.shard ? rest : call.shard;
    const std::size_t left = whole > offset ? whole - offset : 0;
    return left < max_elements ? left : max_elements;
  }
};

template <class T>
__device__ void stage(const ReduceArgs& call, const Chunk& chunk, T* slot) {
  for (int part = 0; part < call.shards; ++part) {
    const T* const from =
        static_cast<const T*>(call.in) + static_cast<std::size_t>(part) * call.shard + chunk.offset;
    T* const to = slot + static_cast<std::size_t>(part) * call.chunk;
    const std::size_t n = chunk.length(call, part);
    if (call.scales)
      scale_elements(to, from, n, call.factor, block_thread());
    else
      copy(to, from, n * sizeof(T), block_thread());
  }
}

template <class Op, class T>
__global__ void __launch_bounds__(512, 2)
    collective_reduce_kernel(const __grid_constant__ DeviceComm comm, const __grid_constant__ ReduceArgs call,
                             Op op) {
  RZ_SHARED(BlockState, states, 1);
  BlockState& block = states[0];
  begin_call(comm, collective_channel, block);
  std::uint64_t step = block.step;
  const auto count = [&](int) { return call.signature_count; };
  const auto slot = [&](std::uint64_t s) {
    return comm.arenas[comm.rank] + comm.layout.slot(static_cast<int>(blockIdx.x), s);
  };
  const auto part_of = [&](int rank) { return static_cast<std::size_t>(call.shards > 1 ? rank : 0); };
  const auto sync_blocks = [&](const auto& source_for) {
    return sync_step(comm, block, step++, call.signature, false, count, count, source_for);
  };
  const int own_part = static_cast<int>(part_of(comm.rank));
  bool ok = true;
  for (std::size_t done = 0; ok && (done == 0 || done < call.stripe); done += call.chunk) {
    const std::size_t left = call.stripe - done;
    const Chunk chunk{blockIdx.x * call.stripe + done, left < call.chunk ? left : call.chunk};
    if (!call.in_source) stage(call, chunk, reinterpret_cast<T*>(slot(step)));
    const std::uint64_t slot_at = in_arena | comm.layout.slot(static_cast<int>(blockIdx.x), step);
    ok = sync_blocks([&](int peer) {
      return call.in_source ? call.in_source + (part_of(peer) * call.shard + chunk.offset) * sizeof(T)
                            : slot_at + part_of(peer) * call.chunk * sizeof(T);
    });
    if (!ok || !call.receives_result) continue;
    const std::size_t at = (call.scatters ? 0 : part_of(comm.rank) * call.shard) + chunk.offset;
    T* target = static_cast<T*>(call.out) + at;
    if (call.gathers && !call.out_source) target = reinterpret_cast<T*>(slot(step));
    reduce_elements(op, target, reinterpret_cast<const T* const*>(block.source), comm.size,
                    chunk.length(call, own_part), call.divisor, block_thread());
    if (!call.gathers) continue;
    const std::uint64_t result = call.out_source
                                     ? call.out_source + at * sizeof(T)
                                     : in_arena | comm.layout.slot(static_cast<int>(blockIdx.x), step);
    ok = sync_blocks([&](int) { return result; });
    for (int part = 0; ok && part < call.shards; ++part)
      copy(static_cast<T*>(call.out) + static_cast<std::size_t>(part) * call.shard + chunk.offset,
           reinterpret_cast<const T*>(block.source[part]), chunk.length(call, part) * sizeof(T),
           block_thread());
  }
  if (ok && call.exit_step) sync_blocks([](int) { return std::uint64_t{0}; });
  end_call(comm, collective_channel, step);
}

}  // namespace

void collective_reduce(const DeviceComm& comm, const ReduceArgs& call, DType dtype, ReduceOp::Kind kind,
                       int blocks, int threads, const Stream& stream) {
  dispatch_op(kind, dtype, [&](auto op, auto element) {
    cuda::launch("collective_reduce", collective_reduce_kernel<decltype(op), decltype(element)>,
                 cuda::Grid{{static_cast<unsigned>(blocks)}, {static_cast<unsigned>(threads)}, 0}, stream,
                 comm, call, op);
  });
}

}  // namespace rz::peer
