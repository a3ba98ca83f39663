#pragma once
/// Kernel arguments and the device memory layout for kernels that synchronize across ranks. Plain data, the
/// same for g++ and nvcc.
///
/// Each rank has an arena in its device's memory, mapped by all peers. Block b of a kernel synchronizes only
/// with blocks b of its peers. A collective is a sequence of steps. In each step a block writes a sync slot
/// with the location of its data into every peer's arena, waits for the sync slots of all peers, and reads
/// their data.
///
/// Sync slots and data slots are double-buffered. A block at step k + 2 has seen every peer at step k + 1, so
/// no peer still reads data of step k and no exit barrier is needed. The exception is zero copy, where peers
/// read the caller's memory: such a call ends with one empty step. Steps are counted on the device, so that a
/// captured graph can be replayed.

#include <cstddef>
#include <cstdint>

#include "comm/core/math.h"
#include "comm/core/types.h"

namespace rz::peer {

inline constexpr int max_ranks = 16, max_blocks = 64, message_blocks = 2, channel_count = 2, max_windows = 64;
enum Channel : int { collective_channel = 0, message_channel = 1 };

/// 32 bytes, written by a peer. `source` is an offset in the writer's arena (in_arena), an offset in its part
/// of a window (in_window), or an address.
struct SyncSlot {
  std::uint64_t step;  ///< step number + 1; written last (release)
  std::uint64_t signature, count, source;
};
inline constexpr std::uint64_t in_arena = std::uint64_t{1} << 63, in_window = std::uint64_t{1} << 62;
inline constexpr int window_shift = 56;
/// Encodes `offset` bytes into a window. Adding bytes to the result advances the offset, as for an address.
constexpr std::uint64_t window_source(int window, std::size_t offset) {
  return in_window | static_cast<std::uint64_t>(window) << window_shift | offset;
}
/// Flag in SyncSlot::signature: the writer has more chunks.
inline constexpr std::uint64_t more_data = std::uint64_t{1} << 63;

/// First page of an arena.
struct DeviceCounters {
  std::uint64_t steps[max_blocks];  ///< next step, per block of this rank
  std::uint64_t sent[max_ranks][message_blocks], received[max_ranks][message_blocks];  ///< chunks
  std::uint64_t acked[max_ranks][message_blocks];  ///< written by peers: chunks that they have read
  std::uint32_t departed[max_ranks];               ///< written by departing peers: a Departure
  std::uint64_t calls[channel_count];
  std::uint32_t finished[channel_count];  ///< blocks of the current call that have ended
  std::uint32_t failed;
};
enum Departure : std::uint32_t { present = 0, left_group = 1, aborted_group = 2 };

/// Pinned memory shared by a rank's kernels and its host code.
struct DeviceStatus {
  std::uint32_t stop;     ///< written by the host and by report_error(): kernels exit at once
  std::uint32_t error;    ///< a DeviceError, written after the fields below
  std::uint32_t culprit;  ///< a rank
  std::uint64_t own_call[2], peer_call[2];  ///< signature and count of the mismatched calls
  std::uint64_t started[channel_count], finished[channel_count];  ///< number of calls
  std::uint32_t waiting_on[channel_count][max_ranks];  ///< 1: a kernel waits for it (set after a while)
};
enum DeviceError : std::uint32_t { no_error = 0, mismatch = 1, peer_left = 2, peer_aborted = 3 };

/// Offsets in an arena; the same on every rank.
struct ArenaLayout {
  int size, blocks;
  std::size_t slot_bytes, message_bytes;  ///< multiples of 256 bytes

  /// Table of the addresses of all ranks' parts of a window, as mapped by this rank's device; written by the
  /// host.
  RZ_HOST_DEVICE std::size_t window(int number) const {
    return 4096 + static_cast<std::size_t>(number) * max_ranks * sizeof(std::uint64_t);
  }
  RZ_HOST_DEVICE std::size_t sync_slots() const { return window(max_windows); }
  RZ_HOST_DEVICE std::size_t sync_slot(int block, std::uint64_t step, int from) const {
    return sync_slots() + ((static_cast<std::size_t>(block) * 2 + step % 2) * static_cast<std::size_t>(size) +
                           static_cast<std::size_t>(from)) *
                              sizeof(SyncSlot);
  }
  /// Sync slot of the point-to-point channel.
  RZ_HOST_DEVICE std::size_t message_slot(int block, std::uint64_t chunk, int from) const {
    return sync_slot(blocks + block, chunk, from);
  }
  RZ_HOST_DEVICE std::size_t slots() const {
    return (sync_slot(blocks + message_blocks, 0, 0) + 4095) / 4096 * 4096;
  }
  RZ_HOST_DEVICE std::size_t slot(int block, std::uint64_t step) const {
    return slots() + (static_cast<std::size_t>(block) * 2 + step % 2) * slot_bytes;
  }
  RZ_HOST_DEVICE std::size_t message_buffer(int to, int block, std::uint64_t chunk) const {
    return slot(blocks, 0) +
           ((static_cast<std::size_t>(to) * message_blocks + static_cast<std::size_t>(block)) * 2 +
            chunk % 2) *
               message_bytes;
  }
  RZ_HOST_DEVICE std::size_t bytes() const { return message_buffer(size, 0, 0); }
};
static_assert(sizeof(DeviceCounters) <= 4096);

struct DeviceComm {
  int rank, size;
  ArenaLayout layout;
  std::byte* arenas[max_ranks];  ///< as mapped by this rank's device
  DeviceStatus* status;
};

/// all_reduce, reduce_scatter and reduce. The buffer has `shards` shards of `shard` elements (the last ones
/// may be shorter). Each block processes the same `stripe` of every shard, `chunk` elements per step.
/// `stripe` and `chunk` are multiples of 16 bytes.
struct ReduceArgs {
  std::uint64_t signature, signature_count;
  const void* in;
  void* out;
  std::size_t count, shard, stripe, chunk;
  int shards, divisor;
  bool receives_result;  ///< false on ranks other than the root of a reduce
  bool gathers;          ///< a second step copies every shard's result to all ranks
  bool scatters;         ///< shard r goes to rank r, and `out` is that shard alone
  bool scales;           ///< multiplies the input by `factor` first
  bool exit_step;        ///< ends with an empty step, since peers may read this rank's memory in place
  double factor;
  /// Location of the caller's memory for peers, encoded as SyncSlot::source. 0: peers read slots.
  std::uint64_t in_source, out_source;
};

/// Collectives that only move data: sends a range of `in` to each peer and receives a range of `out` from
/// each.
struct CopyArgs {
  std::uint64_t signature;
  std::uint64_t count_to[max_ranks], count_from[max_ranks];  ///< for the mismatch check
  const std::byte* in;
  std::byte* out;
  std::size_t send_offsets[max_ranks], send_bytes[max_ranks], recv_offsets[max_ranks], recv_bytes[max_ranks];
  std::size_t chunk;        ///< bytes per peer and step, a multiple of 16
  std::uint64_t in_source;  ///< as ReduceArgs::in_source
  bool same_to_all;         ///< all peers receive the same range (or nothing)
  bool exit_step;
};

/// At most one send to and one receive from each peer.
struct SendRecvArgs {
  std::uint64_t signature_to[max_ranks], signature_from[max_ranks];
  const std::byte* send[max_ranks];
  std::byte* recv[max_ranks];
  std::size_t send_bytes[max_ranks], recv_bytes[max_ranks];
  bool sends[max_ranks], recvs[max_ranks];
};

}  // namespace rz::peer
