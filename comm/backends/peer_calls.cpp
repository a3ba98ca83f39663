#include "comm/backends/peer_calls.h"

#include <algorithm>

#include "comm/core/rounding.h"
#include "comm/core/text.h"

namespace rz {

namespace {

DType type_of(const Operation& op) {
  return op.kind == Collective::send || op.in.data ? op.in.dtype : op.out.dtype;
}

}  // namespace

std::uint64_t signature(const Operation& op) {
  return static_cast<std::uint64_t>(op.kind) | static_cast<std::uint64_t>(type_of(op)) << 8 |
         static_cast<std::uint64_t>(op.op.kind) << 16 |
         (traits(op.kind).point_to_point
              ? 0
              : static_cast<std::uint64_t>(static_cast<std::uint16_t>(op.root)) << 32);
}

std::string in_words(std::uint64_t what, std::uint64_t count) {
  const auto kind = static_cast<Collective>(what & 0xff);
  const auto dtype = static_cast<DType>(what >> 8 & 0xff);
  const ReduceOp op(static_cast<ReduceOp::Kind>(what >> 16 & 0xff));
  return str(name(kind), traits(kind).reduces ? str(" (", name(op), ")") : "", " of ", count, " ",
             name(dtype), traits(kind).rooted() ? str(" with root ", what >> 32 & 0xffff) : "");
}

PeerChoice choose(const Operation& op, const peer::Seat& seat, const std::string& forced) {
  const std::size_t bytes =
      op.kind == Collective::all_to_all_v
          ? op.in.bytes()
          : whole_bytes(op.kind, common_count(op, seat.size), seat.size) * size_of(type_of(op));
  return select_peer({.collective = op.kind,
                      .bytes = bytes,
                      .size = seat.size,
                      .most_blocks = seat.layout.blocks,
                      .forced = op.kind == Collective::all_reduce ? forced : std::string()});
}

peer::FoldCall fold_call(const Operation& op, const peer::Seat& seat, const PeerChoice& choice,
                         PeerReach reach) {
  const std::size_t element = size_of(op.in.dtype), word = 16 / element;
  const auto size = static_cast<std::size_t>(seat.size);
  peer::FoldCall call{};
  call.what = signature(op);
  call.signature_count = common_count(op, seat.size);
  call.in = op.in.data;
  call.out = op.out.data;
  call.count = op.in.count;
  call.scatters = op.kind == Collective::reduce_scatter;
  call.gathers = choice.two_shot;
  call.parts = call.scatters || call.gathers ? seat.size : 1;
  call.part = call.scatters  ? op.out.count
              : call.gathers ? round_up(ceil_div(op.in.count, size), word)
                             : op.in.count;
  call.stripe = round_up(ceil_div(call.part, static_cast<std::size_t>(choice.blocks)), word);
  call.piece = seat.layout.slot_bytes / static_cast<std::size_t>(call.parts) / 16 * word;
  call.divisor = op.op.kind == ReduceOp::avg ? seat.size : 1;
  call.here = op.kind != Collective::reduce || seat.rank == op.root;
  call.scales = op.op.kind == ReduceOp::premul_sum;
  call.factor = op.op.factor;
  call.in_source = choice.zero_copy && !call.scales ? reach.in : 0;
  call.out_source = choice.zero_copy ? reach.out : 0;
  call.last_step = choice.zero_copy;
  return call;
}

namespace {

/// Which bytes go to and come from each rank.
void set_ranges(peer::MoveCall& call, const Operation& op, const peer::Seat& seat) {
  const std::size_t element = size_of(type_of(op)), in = op.in.bytes(), out = op.out.bytes();
  const auto size = static_cast<std::size_t>(seat.size);
  const bool root = seat.rank == op.root;
  for (std::size_t r = 0; r < size; ++r) {
    const bool to_root = static_cast<int>(r) == op.root;
    const auto set = [&](std::size_t send_at, std::size_t send, std::size_t recv_at, std::size_t recv) {
      call.send_at[r] = send_at, call.send_bytes[r] = send;
      call.recv_at[r] = recv_at, call.recv_bytes[r] = recv;
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
        set(op.pairs->send_offsets[r] * element, op.pairs->send_counts[r] * element,
            op.pairs->recv_offsets[r] * element, op.pairs->recv_counts[r] * element);
        break;
      default:
        set(r * (in / size), in / size, r * (in / size), in / size);
        break;
    }
  }
}

}  // namespace

peer::MoveCall move_call(const Operation& op, const peer::Seat& seat, const PeerChoice& choice,
                         PeerReach reach) {
  peer::MoveCall call{};
  call.what = signature(op);
  call.in = static_cast<const std::byte*>(op.in.data);
  call.out = static_cast<std::byte*>(op.out.data);
  set_ranges(call, op, seat);
  for (int r = 0; r < seat.size; ++r) {
    const auto i = static_cast<std::size_t>(r);
    const bool pairs = op.kind == Collective::all_to_all_v;
    call.count_to[r] = pairs ? op.pairs->send_counts[i] : common_count(op, seat.size);
    call.count_from[r] = pairs ? op.pairs->recv_counts[i] : common_count(op, seat.size);
  }
  call.same = !traits(op.kind).sends_per_rank();
  call.piece = seat.layout.slot_bytes / (call.same ? 1 : static_cast<std::size_t>(seat.size)) / 16 * 16;
  // In place, an all_to_all's parts change places: peers then read copies.
  const bool swaps = op.kind == Collective::all_to_all && op.in.data == op.out.data;
  call.in_source = choice.zero_copy && !swaps ? reach.in : 0;
  call.last_step = choice.zero_copy;
  return call;
}

}  // namespace rz
