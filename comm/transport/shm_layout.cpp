#include "comm/transport/shm_layout.h"

#include <algorithm>

#include "comm/core/integer_math.h"
#include "comm/transport/call_signature.h"

namespace rz::shm {

namespace {

/// Sizes of a channel. The rings shrink when many ranks share the node, since the number of channels grows
/// with the square of the number of ranks.
struct ChannelLayout {
  std::size_t frames, ring_bytes;
  std::size_t bytes() const { return sizeof(ChannelCounters) + frames * sizeof(Frame) + ring_bytes; }
};
ChannelLayout channel_layout(int channel, std::size_t ranks) {
  const std::size_t ring =
      std::clamp<std::size_t>((std::size_t{4} << 20) / ranks / 4096 * 4096, 16 << 10, 256 << 10);
  return channel == static_cast<int>(Channel::collective) ? ChannelLayout{256, ring}
                                                          : ChannelLayout{64, ring / 4};
}

/// Bytes of the channels from one peer. An odd number of lines beyond whole pages, so that the channels of
/// different peers do not compete for the same cache sets.
std::size_t peer_stride(std::size_t ranks) {
  return round_up(channel_layout(0, ranks).bytes() + channel_layout(1, ranks).bytes(), 4096) +
         13 * cache_line;
}
constexpr std::size_t header_bytes = round_up(sizeof(Header), 4096) + cache_line;

// The staging ring does not start at a page boundary, so that it does not compete with whole pages for the
// same cache sets.
constexpr std::size_t staging_offset = 5 * cache_line;
std::size_t mailbox_offset(std::size_t ranks) {
  return round_up(header_bytes + (ranks - 1) * peer_stride(ranks), 4096);
}

}  // namespace

std::size_t channels_bytes(std::size_t ranks) { return mailbox_offset(ranks); }

std::size_t rank_memory_bytes(std::size_t ranks, std::size_t ring_bytes) {
  return mailbox_offset(ranks) + round_up(sizeof(Mailbox), 4096) + staging_offset + ring_bytes;
}

// A rank has no channel from itself.
ChannelMemory channel_memory(Header* header, std::size_t owner, std::size_t sender, int channel,
                             std::size_t ranks) {
  const std::size_t slot = sender - (sender > owner);
  const ChannelLayout size = channel_layout(channel, ranks);
  std::byte* at = reinterpret_cast<std::byte*>(header) + header_bytes + slot * peer_stride(ranks);
  if (channel == 1) at += channel_layout(0, ranks).bytes();
  auto* counters = reinterpret_cast<ChannelCounters*>(at);
  auto* frames = reinterpret_cast<Frame*>(at + sizeof(ChannelCounters));
  return {frames, counters, reinterpret_cast<std::byte*>(frames + size.frames), size.frames, size.ring_bytes};
}

MailboxView mailbox_view(std::byte* memory, std::size_t ranks, std::size_t ring_bytes,
                         bool needs_full_fence) {
  std::byte* const at = memory + mailbox_offset(ranks);
  return {reinterpret_cast<Mailbox*>(at), at + round_up(sizeof(Mailbox), 4096) + staging_offset, ring_bytes,
          &reinterpret_cast<Header*>(memory)->sleeping, needs_full_fence};
}

}  // namespace rz::shm

namespace rz {

namespace {

constexpr std::size_t page = 64 << 10;  // the largest common page size
constexpr std::size_t min_staging_bytes = 1 << 20;
constexpr std::size_t l2_multiple = 2, l3_share_divisor = 4;

}  // namespace

std::size_t staging_ring_bytes(const Caches& caches, std::size_t ranks) {
  const std::size_t sharers =
      std::clamp<std::size_t>(ranks, 1, static_cast<std::size_t>(caches.l3_processors));
  const std::size_t limit = caches.l3 / sharers / l3_share_divisor;
  return std::max(std::min(l2_multiple * caches.l2, limit) / page * page, min_staging_bytes);
}

}  // namespace rz
