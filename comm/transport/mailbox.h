#pragma once
/// Where the ranks of one host meet: a part of every rank's shared memory that it alone writes and all its
/// peers read. Plain data.

#include <atomic>
#include <cstddef>
#include <cstdint>

#include "comm/transport/call_signature.h"

namespace rz {

inline constexpr std::size_t mailbox_depth = 256;

inline constexpr std::size_t inline_bytes = 56;

/// What a rank offers at one step: one cache line, so that a tiny message arrives with its own news.
struct alignas(64) MailboxSlot {
  std::atomic<std::uint64_t>
      tag;  ///< step + 1, and above it what comm/intranode/mailbox_channel.h says; written last
  std::byte payload[inline_bytes];
};
static_assert(sizeof(MailboxSlot) == 64 && std::atomic<std::uint64_t>::is_always_lock_free);

struct Mailbox {
  MailboxSlot slots[mailbox_depth];  ///< of step s in letter s % mailbox_depth
  CallSignature
      call_log[mailbox_depth];  ///< at the first of a call's steps; between its letter and `written`
  alignas(
      64) std::atomic<std::uint32_t> acked;  ///< what peers offered at steps before this one is not needed
  alignas(64) std::atomic<std::uint32_t> produced;  ///< letters of the steps before this one
};

/// A rank's place and its ring of bytes, for what letters do not hold, as this process has mapped them.
struct MailboxView {
  Mailbox* mailbox = nullptr;
  std::byte* staging_ring = nullptr;
  std::size_t staging_bytes = 0;
  std::atomic<std::uint32_t>* sleeping = nullptr;  ///< it has to be woken: Transport::wake_peers()
  bool needs_full_fence = false;                   ///< who writes must fence before it looks at `asleep`
};

/// A part of memory from allocate(), as peers find it.
struct SharedMemoryHandle {
  std::uint32_t segment;
  std::uint64_t offset;
  bool operator==(const SharedMemoryHandle&) const = default;
};

}  // namespace rz
