#pragma once
/// Mailboxes of the intra-node engine: a part of every rank's shared memory that the rank alone writes and
/// all its peers on the node read. Plain data. comm/intranode/mailbox/mailbox_channel.h has the protocol.

#include <atomic>
#include <cstddef>
#include <cstdint>

#include "comm/transport/call_signature.h"

namespace rz {

inline constexpr std::size_t cache_line_bytes = 64;
inline constexpr std::size_t mailbox_depth = 256;  ///< slots of a mailbox
inline constexpr std::size_t inline_bytes = 56;    ///< payload of a slot

/// Data that a rank publishes at one step: one cache line, so that an inline payload arrives with its flag.
struct alignas(64) MailboxSlot {
  /// Step + 1 in the lower half, a hash of the call history in the upper half. Written last.
  std::atomic<std::uint64_t> tag;
  std::byte payload[inline_bytes];
};
static_assert(sizeof(MailboxSlot) == 64 && std::atomic<std::uint64_t>::is_always_lock_free);

struct Mailbox {
  /// Step s uses slot s % mailbox_depth.
  MailboxSlot slots[mailbox_depth];
  /// The call that begins at each step. Written after the step's slot and before `produced` covers it.
  CallSignature call_log[mailbox_depth];
  /// The rank no longer needs what its peers published at steps before this one.
  alignas(64) std::atomic<std::uint32_t> acked;
  /// The rank has written the slots of all steps before this one.
  alignas(64) std::atomic<std::uint32_t> produced;
};

/// A rank's mailbox and its staging ring (payloads longer than inline_bytes), as mapped in this process.
struct MailboxView {
  Mailbox* mailbox = nullptr;
  std::byte* staging_ring = nullptr;
  std::size_t staging_bytes = 0;
  std::atomic<std::uint32_t>* sleeping = nullptr;  ///< nonzero: wake it (SharedMemoryGroup::wake_peers())
  bool needs_full_fence = false;                   ///< writers need a full fence before they read `sleeping`
};

/// Location of shared memory, for peers to map (SharedMemoryGroup::export_handle(), map_handle()).
struct SharedMemoryHandle {
  std::uint32_t segment;  ///< Segment::number
  std::uint64_t offset;   ///< bytes from the segment's start
  bool operator==(const SharedMemoryHandle&) const = default;
};

}  // namespace rz
