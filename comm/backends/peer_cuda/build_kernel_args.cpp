#include "comm/backends/peer_cuda/build_kernel_args.h"

#include <algorithm>

#include "comm/core/integer_math.h"
#include "comm/core/text.h"

namespace rz {

namespace {

DType operation_dtype(const CollectiveCall& op) {
  return op.kind == Collective::send || op.in.data ? op.in.dtype : op.out.dtype;
}

}  // namespace

std::uint64_t packed_signature(const CollectiveCall& op) {
  return static_cast<std::uint64_t>(op.kind) | static_cast<std::uint64_t>(operation_dtype(op)) << 8 |
         static_cast<std::uint64_t>(op.op.kind) << 16 |
         (traits(op.kind).point_to_point
              ? 0
              : static_cast<std::uint64_t>(static_cast<std::uint16_t>(op.root)) << 32);
}

std::string to_string(std::uint64_t signature, std::uint64_t count) {
  const auto kind = static_cast<Collective>(signature & 0xff);
  const auto dtype = static_cast<DType>(signature >> 8 & 0xff);
  const ReduceOp op(static_cast<ReduceOp::Kind>(signature >> 16 & 0xff));
  return concat(name(kind), traits(kind).reduces ? concat(" (", name(op), ")") : "", " of ", count, " ",
                name(dtype), traits(kind).rooted() ? concat(" with root ", signature >> 32 & 0xffff) : "");
}

tuning::CudaLaunchPlan plan_launch(const CollectiveCall& op, const peer::DeviceComm& comm,
                                   const std::string& forced) {
  const std::size_t bytes =
      op.kind == Collective::all_to_all_v
          ? op.in.bytes()
          : message_bytes(op.kind, count_per_rank(op, comm.size), comm.size) * size_of(operation_dtype(op));
  return tuning::select_cuda_launch(
      {.collective = op.kind,
       .bytes = bytes,
       .size = comm.size,
       .max_blocks = comm.layout.blocks,
       .override_name = op.kind == Collective::all_reduce ? forced : std::string()});
}

peer::ReduceArgs reduce_args(const CollectiveCall& op, const peer::DeviceComm& comm,
                             const tuning::CudaLaunchPlan& plan, PeerHandles handles) {
  const std::size_t element = size_of(op.in.dtype), word = 16 / element;
  const auto size = static_cast<std::size_t>(comm.size);
  peer::ReduceArgs call{};
  call.signature = packed_signature(op);
  call.signature_count = count_per_rank(op, comm.size);
  call.in = op.in.data;
  call.out = op.out.data;
  call.count = op.in.count;
  call.scatters = op.kind == Collective::reduce_scatter;
  call.gathers = plan.two_shot;
  call.shards = call.scatters || call.gathers ? comm.size : 1;
  call.shard = call.scatters  ? op.out.count
               : call.gathers ? round_up(ceil_div(op.in.count, size), word)
                              : op.in.count;
  call.stripe = round_up(ceil_div(call.shard, static_cast<std::size_t>(plan.blocks)), word);
  call.chunk = comm.layout.slot_bytes / static_cast<std::size_t>(call.shards) / 16 * word;
  call.divisor = op.op.kind == ReduceOp::avg ? comm.size : 1;
  call.receives_result = op.kind != Collective::reduce || comm.rank == op.root;
  call.scales = op.op.kind == ReduceOp::premul_sum;
  call.factor = op.op.factor;
  call.in_source = plan.zero_copy && !call.scales ? handles.in : 0;
  call.out_source = plan.zero_copy ? handles.out : 0;
  call.exit_step = plan.zero_copy;
  return call;
}

namespace {

/// Sets the ranges sent to and received from each rank.
void set_ranges(peer::CopyArgs& call, const CollectiveCall& op, const peer::DeviceComm& comm) {
  const std::size_t element = size_of(operation_dtype(op)), in = op.in.bytes(), out = op.out.bytes();
  const auto size = static_cast<std::size_t>(comm.size);
  const bool root = comm.rank == op.root;
  for (std::size_t r = 0; r < size; ++r) {
    const bool to_root = static_cast<int>(r) == op.root;
    const auto set = [&](std::size_t send_offsets, std::size_t send, std::size_t recv_offsets,
                         std::size_t recv) {
      call.send_offsets[r] = send_offsets, call.send_bytes[r] = send;
      call.recv_offsets[r] = recv_offsets, call.recv_bytes[r] = recv;
    };
    switch (op.kind) {
      case Collective::all_gather:
        set(0, in, r * in, in);
        break;
      case Collective::broadcast:
        set(0, root ? in : 0, 0, to_root ? out : 0);
        break;
      case Collective::gather:
        set(0, to_root ? in : 0, root ? r * in : 0, root ? in : 0);
        break;
      case Collective::scatter:
        set(root ? r * out : 0, root ? out : 0, 0, to_root ? out : 0);
        break;
      case Collective::all_to_all_v:
        set(op.counts->send_offsets[r] * element, op.counts->send_counts[r] * element,
            op.counts->recv_offsets[r] * element, op.counts->recv_counts[r] * element);
        break;
      default:
        set(r * (in / size), in / size, r * (in / size), in / size);
        break;
    }
  }
}

}  // namespace

peer::CopyArgs copy_args(const CollectiveCall& op, const peer::DeviceComm& comm,
                         const tuning::CudaLaunchPlan& plan, PeerHandles handles) {
  peer::CopyArgs call{};
  call.signature = packed_signature(op);
  call.in = static_cast<const std::byte*>(op.in.data);
  call.out = static_cast<std::byte*>(op.out.data);
  set_ranges(call, op, comm);
  for (int r = 0; r < comm.size; ++r) {
    const auto i = static_cast<std::size_t>(r);
    const bool pairs = op.kind == Collective::all_to_all_v;
    call.count_to[r] = pairs ? op.counts->send_counts[i] : count_per_rank(op, comm.size);
    call.count_from[r] = pairs ? op.counts->recv_counts[i] : count_per_rank(op, comm.size);
  }
  call.same_to_all = !traits(op.kind).sends_per_rank();
  call.chunk =
      comm.layout.slot_bytes / (call.same_to_all ? 1 : static_cast<std::size_t>(comm.size)) / 16 * 16;
  // An in-place all_to_all would overwrite data that peers still read, so peers read copies.
  const bool swaps = op.kind == Collective::all_to_all && op.in.data == op.out.data;
  call.in_source = plan.zero_copy && !swaps ? handles.in : 0;
  call.exit_step = plan.zero_copy;
  return call;
}

}  // namespace rz
