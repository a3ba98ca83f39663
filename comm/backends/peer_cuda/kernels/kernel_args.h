#pragma once
/// What the host tells the kernels that ranks run together, and the memory in which these meet: plain data,
/// the same for g++ and nvcc.
///
/// Every rank has an arena in its device's memory, which its peers reach. Block b of a kernel talks to the
/// blocks b of its peers alone. A collective is a row of steps: a block offers each peer some memory (by a
/// letter in the peer's arena), waits for the letters of all peers, and reads what they offer. Letters and
/// slots are double: whoever is at step k + 2 has seen everybody at step k + 1, so nobody reads what was
/// offered at step k any more. That makes exit barriers needless, but where a peer reads memory of the caller
/// (zero copy): then the call ends with one empty step. Steps are counted on the device, so that a captured
/// graph can be replayed.

#include <cstddef>
#include <cstdint>

#include "comm/core/math.h"
#include "comm/core/types.h"

namespace rz::peer {

inline constexpr int max_ranks = 16, max_blocks = 64, message_blocks = 2, channel_count = 2, max_windows = 64;
enum Channel : int { collective_channel = 0, message_channel = 1 };

/// 32 bytes, written by a peer. `source` is an offset in the writer's arena, or in its part of a window, or
/// an address.
struct SyncSlot {
  std::uint64_t step;  ///< written last: this letter belongs to step `step - 1`
  std::uint64_t signature, count, source;
};
inline constexpr std::uint64_t in_arena = std::uint64_t{1} << 63, in_window = std::uint64_t{1} << 62;
inline constexpr int window_shift = 56;
/// The source of what lies `offset` bytes into a window; bytes may be added to it, as to an address.
constexpr std::uint64_t window_source(int window, std::size_t offset) {
  return in_window | static_cast<std::uint64_t>(window) << window_shift | offset;
}
inline constexpr std::uint64_t more_data = std::uint64_t{1} << 63;  ///< in `what`

/// The first page of an arena.
struct DeviceCounters {
  std::uint64_t steps[max_blocks];  ///< of this rank's blocks
  std::uint64_t sent[max_ranks][message_blocks], received[max_ranks][message_blocks];  ///< chunks
  std::uint64_t acked[max_ranks][message_blocks];  ///< written by peers: chunks of ours that they have read
  std::uint32_t departed[max_ranks];               ///< written by peers that leave: a Leaving
  std::uint64_t calls[channel_count];
  std::uint32_t finished[channel_count];  ///< blocks of the call that runs
  std::uint32_t failed;
};
enum Departure : std::uint32_t { present = 0, left_group = 1, aborted_group = 2 };

/// Pinned memory: how the kernels of one rank and its host talk.
struct DeviceStatus {
  std::uint32_t stop;                                             ///< the host's: kernels leave at once
  std::uint32_t error;                                            ///< a Trouble, written after the rest
  std::uint32_t culprit;                                          ///< a rank
  std::uint64_t own_call[2], peer_call[2];                        ///< what and count of calls that differ
  std::uint64_t started[channel_count], finished[channel_count];  ///< calls
  std::uint32_t waiting_on[channel_count][max_ranks];
};
enum DeviceError : std::uint32_t { no_error = 0, mismatch = 1, peer_left = 2, peer_aborted = 3 };

/// Where things lie in an arena; the same on every rank.
struct ArenaLayout {
  int size, blocks;
  std::size_t slot_bytes, message_bytes;  ///< multiples of 256 bytes

  /// The addresses of all ranks' parts of a window, as this rank's device reaches them; written by the host.
  RZ_HOST_DEVICE std::size_t window(int number) const {
    return 4096 + static_cast<std::size_t>(number) * max_ranks * sizeof(std::uint64_t);
  }
  RZ_HOST_DEVICE std::size_t sync_slots() const { return window(max_windows); }
  RZ_HOST_DEVICE std::size_t sync_slot(int block, std::uint64_t step, int from) const {
    return sync_slots() + ((static_cast<std::size_t>(block) * 2 + step % 2) * static_cast<std::size_t>(size) +
                           static_cast<std::size_t>(from)) *
                              sizeof(SyncSlot);
  }
  /// Of the lane of messages.
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
  std::byte* arenas[max_ranks];  ///< as this rank's device reaches them
  DeviceStatus* status;
};

/// all_reduce, reduce_scatter and reduce. The buffer has `parts` parts of `part` elements (the last ones may
/// be shorter); a block has the same `stripe` of each part, and moves `piece` elements of it in a step.
/// `stripe` and `piece` are multiples of 16 bytes.
struct ReduceArgs {
  std::uint64_t signature, signature_count;
  const void* in;
  void* out;
  std::size_t count, shard, stripe, chunk;
  int shards, divisor;
  bool receives_result;  ///< this rank wants the result
  bool gathers;          ///< then every part's result goes to everybody
  bool scatters;         ///< part r goes to rank r, and `out` is that part alone
  bool scales;           ///< by `factor`, before
  bool exit_step;        ///< an empty step at the end, since peers may read a rank's memory where it lies
  double factor;
  /// Where peers read the caller's memory: what letters call it (Letter::source). 0: they read slots.
  std::uint64_t in_source, out_source;
};

/// Everything that moves bytes as they are: to each peer its range of `in`, from each peer to a range of
/// `out`.
struct CopyArgs {
  std::uint64_t signature;
  std::uint64_t count_to[max_ranks], count_from[max_ranks];  ///< for the signature
  const std::byte* in;
  std::byte* out;
  std::size_t send_offsets[max_ranks], send_bytes[max_ranks], recv_offsets[max_ranks], recv_bytes[max_ranks];
  std::size_t chunk;        ///< bytes a peer and step, a multiple of 16
  std::uint64_t in_source;  ///< as ReduceArgs's
  bool same_to_all;         ///< all peers get the same range (or nothing)
  bool exit_step;
};

/// At most one message to and one from each peer.
struct SendRecvArgs {
  std::uint64_t signature_to[max_ranks], signature_from[max_ranks];
  const std::byte* send[max_ranks];
  std::byte* recv[max_ranks];
  std::size_t send_bytes[max_ranks], recv_bytes[max_ranks];
  bool sends[max_ranks], recvs[max_ranks];
};

}  // namespace rz::peer
