// Messages between two ranks, many at a time. A sender copies chunks to slots of its own and writes a note to
// the receiver, which takes them and says so. Two slots a pair and block: a short message leaves at once. A
// block serves all its messages in turn, whichever is ready, so that no order of calls can block another
// pair.

#include "comm/core/cuda/launch.h"
#include "comm/kernels/meeting.cuh"
#include "comm/kernels/peer_kernels.h"

namespace rz::peer {

namespace {

/// One message of this block; those to peers come first.
struct Task {
  std::uint64_t chunk;    // number of the next one, of all between these two blocks
  std::size_t done, end;  // bytes of the message
  std::uint32_t open, ready;
};

/// This block's bytes of a message.
struct Stripe {
  std::size_t begin, end;
};
__device__ Stripe stripe_of(std::size_t total) {
  const std::size_t each = ((total + gridDim.x - 1) / gridDim.x + 15) / 16 * 16;
  const std::size_t begin = blockIdx.x * each < total ? blockIdx.x * each : total;
  return {begin, begin + each < total ? begin + each : total};
}

__device__ Letter* note(const Seat& seat, int of, int from, std::uint64_t chunk) {
  return reinterpret_cast<Letter*>(seat.arenas[of] +
                                   seat.layout.note(static_cast<int>(blockIdx.x), chunk, from));
}

__device__ bool is_ready(const Seat& seat, const Task& task, int peer, bool sends) {
  if (sends) return task.chunk < 2 || load_acquire(&own(seat).taken[peer][blockIdx.x]) >= task.chunk - 1;
  return load_acquire(&note(seat, seat.rank, peer, task.chunk)->step) >= task.chunk + 1;
}

__device__ void send_chunk(const Seat& seat, const MessagesCall& call, Task& task, int peer,
                           std::size_t bytes) {
  const std::size_t slot = seat.layout.message(peer, static_cast<int>(blockIdx.x), task.chunk);
  copy(seat.arenas[seat.rank] + slot, call.send[peer] + task.done, bytes, lane_of_block());
  __syncthreads();
  if (threadIdx.x != 0) return;
  Letter* const to = note(seat, peer, seat.rank, task.chunk);
  to->what = call.what_to[peer];
  to->count = call.send_bytes[peer];
  to->source = in_arena | slot;
  store_release(&to->step, task.chunk + 1);
}

/// False: it is not the message that was expected.
__device__ bool receive_chunk(const Seat& seat, const MessagesCall& call, Task& task, int peer,
                              std::size_t bytes) {
  const Letter* const from = note(seat, seat.rank, peer, task.chunk);
  if (from->what != call.what_from[peer] || from->count != call.recv_bytes[peer]) {
    if (threadIdx.x == 0)
      report(seat, mismatch, peer, call.what_from[peer], call.recv_bytes[peer], from->what, from->count);
    return false;
  }
  copy(call.recv[peer] + task.done, reinterpret_cast<const std::byte*>(address_of(seat, peer, from->source)),
       bytes, lane_of_block());
  __syncthreads();
  if (threadIdx.x == 0)
    store_release(&reinterpret_cast<Counters*>(seat.arenas[peer])->taken[seat.rank][blockIdx.x],
                  task.chunk + 1);
  return true;
}

__global__ void __launch_bounds__(512, 2)
    messages_together_kernel(const __grid_constant__ Seat seat, const __grid_constant__ MessagesCall call) {
  RZ_SHARED(BlockState, states, 1);
  RZ_SHARED(Task, tasks, 2 * most_ranks);
  BlockState& block = states[0];
  begin(seat, messages, block);
  const int mine = static_cast<int>(threadIdx.x), all = 2 * seat.size;
  const int peer_of_mine = mine % seat.size;
  const bool sends = mine < seat.size;
  if (mine < all) {
    Counters& counters = own(seat);
    const Stripe s = stripe_of(sends ? call.send_bytes[peer_of_mine] : call.recv_bytes[peer_of_mine]);
    tasks[mine] = {
        sends ? counters.sent[peer_of_mine][blockIdx.x] : counters.received[peer_of_mine][blockIdx.x],
        s.begin, s.end, sends ? call.sends[peer_of_mine] : call.recvs[peer_of_mine], 0};
  }
  unsigned turn = 1;
  for (bool open = true; open;) {
    if (mine < all) {
      Task& task = tasks[mine];
      task.ready = task.open && is_ready(seat, task, peer_of_mine, sends);
      if (task.open && !task.ready && !go_on(seat, messages, peer_of_mine, turn)) block.failed = 1;
    }
    __syncthreads();
    bool moved = false;
    open = false;
    for (int t = 0; t < all && block.failed == 0; ++t) {
      Task& task = tasks[t];
      open |= task.open != 0;
      if (!task.ready) continue;
      moved = true;
      const std::size_t left = task.end - task.done, most = seat.layout.message_bytes;
      const std::size_t bytes = left < most ? left : most;
      bool well = true;
      if (t < seat.size)
        send_chunk(seat, call, task, t, bytes);
      else
        well = receive_chunk(seat, call, task, t - seat.size, bytes);
      __syncthreads();
      if (threadIdx.x == 0) {
        if (!well) block.failed = 1;
        task.chunk += 1;
        task.done += bytes;
        task.open = task.done < task.end;
      }
      __syncthreads();
    }
    __syncthreads();
    const bool failed = block.failed != 0;
    __syncthreads();  // nobody writes it before all have read it
    if (failed) break;
    turn = moved ? 1 : turn + 1;
    if (!moved && open) rest(turn);
  }
  if (mine < all && (sends ? call.sends[peer_of_mine] : call.recvs[peer_of_mine])) {
    Counters& counters = own(seat);
    (sends ? counters.sent : counters.received)[peer_of_mine][blockIdx.x] = tasks[mine].chunk;
    if (block.failed == 0) store_release(&seat.status->waits_for[messages][peer_of_mine], 0u);
  }
  end(seat, messages, 0);
}

}  // namespace

void messages_together(const Seat& seat, const MessagesCall& call, int threads, const Stream& stream) {
  cuda::launch("messages_together", messages_together_kernel,
               cuda::Grid{{message_blocks}, {static_cast<unsigned>(threads)}, 0}, stream, seat, call);
}

}  // namespace rz::peer
