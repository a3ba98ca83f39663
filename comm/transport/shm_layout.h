#pragma once
/// Layout of the shared memory of a rank, which its peers on the node map: header, incoming channels,
/// mailbox, staging ring. Plain data.

#include <atomic>
#include <cstddef>
#include <cstdint>

#include "comm/net/random.h"
#include "comm/topology.h"
#include "comm/transport/mailbox.h"

namespace rz {

/// Size in bytes of the staging ring, through which peers on the same node receive data, of each of `ranks`
/// ranks on a node with these caches: twice the L2, but at most a quarter of the rank's share of the L3, and
/// at least 1 MiB. A multiple of 64 KiB, the largest common page size.
///
/// Reason: a store to a line that is still in a reader's L2 must first invalidate it there. In a ring of this
/// size, most lines have left the reader's L2 before the writer reuses them. The ring must fit into the L3,
/// since it would otherwise be read from memory.
std::size_t staging_ring_bytes(const Caches&, std::size_t ranks);

namespace shm {

constexpr std::uint64_t magic = 0x336f72657a676e72;  // "rngzero3"
constexpr std::size_t cache_line = 64;
constexpr std::size_t frame_inline_bytes = 24;
constexpr std::uint32_t in_frame = 0xffffffff, in_ring = 0xfffffffe;
constexpr std::uint32_t not_cancelled = 0xffffffff;

enum State : std::uint32_t { active = 0, departed = 1 };

/// At the start of the memory.
struct Header {
  std::uint64_t magic_word = magic;
  std::uint32_t rank = 0, ranks = 0;
  std::uint64_t staging_bytes = 0;     ///< size of its staging ring
  std::uint32_t asymmetric_fence = 0;  ///< register_asymmetric_fence() succeeded
  net::JobId cma_probe{};  ///< random: what a peer finds there by CMA shows whose process it reads
  std::uint64_t cma_probe_address = 0;  ///< its address in the rank's process
  alignas(cache_line) std::atomic<std::uint32_t> sleeping{0};
  alignas(cache_line) std::atomic<std::uint32_t> state{active};
  /// In the leader's header: 1 + the rank whose header has the group's first failure; 0: no failure.
  std::atomic<std::uint32_t> elected_rank{0};
  std::atomic<std::uint64_t> beats{0};                        ///< of the rank's process (heartbeats.h)
  std::atomic<std::uint32_t> cancelled_after{not_cancelled};  ///< Failure::calls of this rank's cancellation
  std::int32_t culprit = -1;
  std::uint32_t code = 0;
  char reason[488] = {};
};

/// `ready` is the frame's number + 1 and is written last. The reader polls this line alone.
struct alignas(cache_line) Frame {
  std::atomic<std::uint64_t> ready;
  CallSignature signature;
  std::uint32_t length;
  std::uint32_t location;  ///< in_frame, in_ring, or a segment's number
  union {
    std::uint64_t offset;
    std::byte payload[frame_inline_bytes];
  };
};
static_assert(sizeof(Frame) == cache_line && sizeof(CallSignature) == 24);
static_assert(std::atomic<std::uint64_t>::is_always_lock_free);

/// Written only by the channel's reader.
struct alignas(cache_line) ChannelCounters {
  std::atomic<std::uint64_t> frames_done, ring_done, consumed;
};

/// One channel, as mapped in this process: a ring of frames and a ring of bytes.
struct ChannelMemory {
  Frame* frames = nullptr;
  ChannelCounters* counters = nullptr;
  std::byte* ring = nullptr;
  std::uint64_t frame_count = 0, ring_bytes = 0;
};

/// Size of the memory of one of `ranks` ranks, and of the channels in front of its mailbox.
std::size_t channels_bytes(std::size_t ranks);
std::size_t rank_memory_bytes(std::size_t ranks, std::size_t ring_bytes);
/// The channel number `channel` from the rank with index `sender` to the one with index `owner`, in the
/// owner's memory, which starts with `header`. Indices are those among the `ranks` ranks of the node.
ChannelMemory channel_memory(Header* header, std::size_t owner, std::size_t sender, int channel,
                             std::size_t ranks);
MailboxView mailbox_view(std::byte* memory, std::size_t ranks, std::size_t ring_bytes, bool needs_full_fence);

}  // namespace shm

}  // namespace rz
