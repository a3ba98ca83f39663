// Point-to-point messages, many at a time. The sender copies a chunk to a slot in its own arena and writes a
// sync slot in the receiver's. The receiver copies the chunk and acknowledges it. Each pair and block has two
// slots, so a short message is sent without waiting. A block progresses all its messages in turn as they
// become ready, so that no order of calls blocks another pair.

#include "comm/backends/peer_cuda/kernels/device_sync.cuh"
#include "comm/backends/peer_cuda/kernels/peer_kernels.h"
#include "comm/device/launch.h"

namespace rz::peer {

namespace {

/// One message of this block. Tasks [0, size) are sends, [size, 2 size) are receives.
struct Task {
  std::uint64_t chunk;    // number of the next chunk, counted over all messages of this pair and block
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

__device__ SyncSlot* message_slot(const DeviceComm& comm, int of, int from, std::uint64_t chunk) {
  return reinterpret_cast<SyncSlot*>(comm.arenas[of] +
                                     comm.layout.message_slot(static_cast<int>(blockIdx.x), chunk, from));
}

__device__ bool is_ready(const DeviceComm& comm, const Task& task, int peer, bool sends) {
  if (sends)
    return task.chunk < 2 || load_acquire(&own_counters(comm).acked[peer][blockIdx.x]) >= task.chunk - 1;
  return load_acquire(&message_slot(comm, comm.rank, peer, task.chunk)->step) >= task.chunk + 1;
}

__device__ void send_chunk(const DeviceComm& comm, const SendRecvArgs& call, Task& task, int peer,
                           std::size_t bytes) {
  const std::size_t slot = comm.layout.message_buffer(peer, static_cast<int>(blockIdx.x), task.chunk);
  copy(comm.arenas[comm.rank] + slot, call.send[peer] + task.done, bytes, block_thread());
  __syncthreads();
  if (threadIdx.x != 0) return;
  SyncSlot* const to = message_slot(comm, peer, comm.rank, task.chunk);
  to->signature = call.signature_to[peer];
  to->count = call.send_bytes[peer];
  to->source = in_arena | slot;
  store_release(&to->step, task.chunk + 1);
}

/// False: mismatch with the expected message.
__device__ bool receive_chunk(const DeviceComm& comm, const SendRecvArgs& call, Task& task, int peer,
                              std::size_t bytes) {
  const SyncSlot* const from = message_slot(comm, comm.rank, peer, task.chunk);
  if (from->signature != call.signature_from[peer] || from->count != call.recv_bytes[peer]) {
    if (threadIdx.x == 0)
      report_error(comm, mismatch, peer, call.signature_from[peer], call.recv_bytes[peer], from->signature,
                   from->count);
    return false;
  }
  copy(call.recv[peer] + task.done,
       reinterpret_cast<const std::byte*>(resolve_source(comm, peer, from->source)), bytes, block_thread());
  __syncthreads();
  if (threadIdx.x == 0)
    store_release(&reinterpret_cast<DeviceCounters*>(comm.arenas[peer])->acked[comm.rank][blockIdx.x],
                  task.chunk + 1);
  return true;
}

__global__ void __launch_bounds__(512, 2)
    send_recv_kernel(const __grid_constant__ DeviceComm comm, const __grid_constant__ SendRecvArgs call) {
  RZ_SHARED(BlockState, states, 1);
  RZ_SHARED(Task, tasks, 2 * max_ranks);
  BlockState& block = states[0];
  begin_call(comm, message_channel, block);
  const int mine = static_cast<int>(threadIdx.x), all = 2 * comm.size;
  const int peer_of_mine = mine % comm.size;
  const bool sends = mine < comm.size;
  if (mine < all) {
    DeviceCounters& counters = own_counters(comm);
    const Stripe s = stripe_of(sends ? call.send_bytes[peer_of_mine] : call.recv_bytes[peer_of_mine]);
    tasks[mine] = {
        sends ? counters.sent[peer_of_mine][blockIdx.x] : counters.received[peer_of_mine][blockIdx.x],
        s.begin, s.end, sends ? call.sends[peer_of_mine] : call.recvs[peer_of_mine], 0};
  }
  unsigned turn = 1;
  for (bool open = true; open;) {
    if (mine < all) {
      Task& task = tasks[mine];
      task.ready = task.open && is_ready(comm, task, peer_of_mine, sends);
      if (task.open && !task.ready && !should_continue(comm, message_channel, peer_of_mine, turn))
        block.failed = 1;
    }
    __syncthreads();
    bool moved = false;
    open = false;
    for (int t = 0; t < all && block.failed == 0; ++t) {
      Task& task = tasks[t];
      open |= task.open != 0;
      if (!task.ready) continue;
      moved = true;
      const std::size_t left = task.end - task.done, max_bytes = comm.layout.message_bytes;
      const std::size_t bytes = left < max_bytes ? left : max_bytes;
      bool ok = true;
      if (t < comm.size)
        send_chunk(comm, call, task, t, bytes);
      else
        ok = receive_chunk(comm, call, task, t - comm.size, bytes);
      __syncthreads();
      if (threadIdx.x == 0) {
        if (!ok) block.failed = 1;
        task.chunk += 1;
        task.done += bytes;
        task.open = task.done < task.end;
      }
      __syncthreads();
    }
    __syncthreads();
    const bool failed = block.failed != 0;
    __syncthreads();  // read by all threads before it is written again
    if (failed) break;
    turn = moved ? 1 : turn + 1;
    if (!moved && open) backoff(turn);
  }
  if (mine < all && (sends ? call.sends[peer_of_mine] : call.recvs[peer_of_mine])) {
    DeviceCounters& counters = own_counters(comm);
    (sends ? counters.sent : counters.received)[peer_of_mine][blockIdx.x] = tasks[mine].chunk;
    if (block.failed == 0) store_release(&comm.status->waiting_on[message_channel][peer_of_mine], 0u);
  }
  end_call(comm, message_channel, 0);
}

}  // namespace

void send_recv(const DeviceComm& comm, const SendRecvArgs& call, int threads, const Stream& stream) {
  cuda::launch("send_recv", send_recv_kernel,
               cuda::Grid{{message_blocks}, {static_cast<unsigned>(threads)}, 0}, stream, comm, call);
}

}  // namespace rz::peer
