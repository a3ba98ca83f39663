// The contract of a poller, for one descriptor and for many: each event is reported once, and no old event
// ends a sleep.

#include "comm/net/poller.h"

#include <gtest/gtest.h>
#include <sys/socket.h>
#include <unistd.h>

#include <deque>
#include <thread>
#include <vector>

#include "comm/core/deadline.h"

namespace rz {
namespace {

using std::chrono::microseconds;
using std::chrono::milliseconds;

struct Pair {
  UniqueFd here, there;
  net::FdEvents watched;
  Pair() {
    int fd[2];
    EXPECT_EQ(socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK, 0, fd), 0);
    here = UniqueFd(fd[0]), there = UniqueFd(fd[1]);
  }
};

class Pollers : public testing::TestWithParam<int> {
 protected:
  Pollers() {
    for (int i = 0; i < GetParam(); ++i) pairs.emplace_back();
    for (Pair& p : pairs) poller.add(p.here.get(), p.watched, EPOLLIN | EPOLLOUT);
    poller.poll(microseconds(0));
  }
  ~Pollers() override {
    for (Pair& p : pairs) poller.remove(p.here.get());
  }
  void write_byte(Pair& p) { EXPECT_EQ(write(p.there.get(), "x", 1), 1); }
  void read_byte(Pair& p) {
    char byte;
    while (read(p.here.get(), &byte, 1) == 1) {
    }
    p.watched.events &= ~static_cast<std::uint32_t>(EPOLLIN);
  }
  net::Poller poller;
  std::deque<Pair> pairs;
};

INSTANTIATE_TEST_SUITE_P(FewAndMany, Pollers, testing::Values(1, 3, 8, 9, 40));

TEST_P(Pollers, ReportReadyDescriptors) {
  for (Pair& p : pairs) EXPECT_TRUE(p.watched.writable() && !p.watched.readable());
  Pair& last = pairs.back();
  write_byte(last);
  EXPECT_TRUE(poller.poll(milliseconds(1000)));
  for (Pair& p : pairs) EXPECT_EQ(p.watched.readable(), &p == &last);
  read_byte(last);
  EXPECT_FALSE(poller.poll(microseconds(0)));
  EXPECT_FALSE(last.watched.readable());
  write_byte(last);
  EXPECT_TRUE(poller.poll(milliseconds(1000)));
  EXPECT_TRUE(last.watched.readable());
}

// Unread old bytes are no new event.
TEST_P(Pollers, AnEventAlreadyReportedDoesNotWake) {
  write_byte(pairs.front());
  EXPECT_TRUE(poller.poll(milliseconds(1000)));
  EXPECT_FALSE(poller.poll(milliseconds(20)));
  EXPECT_TRUE(pairs.front().watched.readable());
}

TEST_P(Pollers, AClosedPeerIsReportedOnce) {
  pairs.front().there.close();
  EXPECT_TRUE(poller.poll(milliseconds(1000)));
  EXPECT_TRUE(pairs.front().watched.hung_up());
  EXPECT_FALSE(poller.poll(milliseconds(20)));
}

TEST_P(Pollers, ASignalEndsASleepOnce) {
  for (int i = 0; i < 3; ++i) {
    std::thread other([&] { net::Poller::ring_doorbell(poller.doorbell()); });
    EXPECT_TRUE(poller.poll(milliseconds(1000)));
    other.join();
    EXPECT_FALSE(poller.poll(microseconds(0)));
  }
}

TEST_P(Pollers, ARemovedDescriptorIsNotWatched) {
  Pair& first = pairs.front();
  poller.remove(first.here.get());
  write_byte(first);
  EXPECT_FALSE(poller.poll(milliseconds(20)));
  EXPECT_FALSE(first.watched.readable());
}

}  // namespace
}  // namespace rz
