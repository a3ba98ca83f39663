// Runs: pure

/// What another rank writes into a frame is not trusted: bytes outside of the mapped memory are not shown.

#include "comm/transport/shm/shm_channel.h"

#include <gtest/gtest.h>
#include <sys/socket.h>

#include <array>
#include <limits>

namespace rz::shm {
namespace {

struct Claim {
  std::uint32_t location, length;
  std::uint64_t offset;
  bool inside;
};

TEST(ShmChannel, ShowsNoBytesOutsideOfItsMemory) {
  constexpr std::uint32_t most = std::numeric_limits<std::uint32_t>::max(), unknown_segment = 5;
  constexpr std::uint64_t last = std::numeric_limits<std::uint64_t>::max();
  const Claim claims[] = {{in_frame, frame_inline_bytes, 0, true},
                          {in_frame, frame_inline_bytes + 1, 0, false},
                          {in_frame, most, 0, false},
                          {in_ring, 64, 0, true},
                          {in_ring, 1, 63, true},
                          {in_ring, 65, 0, false},
                          {in_ring, 1, 64, false},
                          {in_ring, most, 0, false},
                          {in_ring, 32, last - 15, false},
                          {unknown_segment, 1, 0, false}};
  int ends[2];
  ASSERT_EQ(::socketpair(AF_UNIX, SOCK_SEQPACKET, 0, ends), 0);
  const UniqueFd other(ends[1]);
  net::Poller poller;
  WaitForGraph graph(0);
  SegmentSocket segments(1, UniqueFd(ends[0]), poller, graph);
  for (const Claim& c : claims) {
    std::array<Frame, 2> frames{};
    std::array<std::byte, 64> ring{};
    ChannelCounters counters{};
    Receiver receiver({frames.data(), &counters, ring.data(), frames.size(), ring.size()});
    frames[0].length = c.length, frames[0].location = c.location, frames[0].offset = c.offset;
    frames[0].ready = 1;
    const ReceiveView view = receiver.peek(segments);
    EXPECT_EQ(view.bytes.size(), c.inside ? c.length : 0)
        << c.location << ", " << c.length << ", " << c.offset;
    EXPECT_EQ(receiver.damaged(), c.inside ? nullptr : &frames[0]);
  }
  segments.close();
}

}  // namespace
}  // namespace rz::shm
