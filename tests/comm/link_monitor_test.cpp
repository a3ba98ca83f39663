// Waits, failures and wait-for messages of a group over links that are replaced, and routing by peer.

#include "comm/transport/link_monitor.h"

#include <gtest/gtest.h>
#include <poll.h>

#include <array>
#include <vector>

#include "comm/transport/group/group_transport.h"
#include "tests/support/error_of.h"
#include "tests/support/sim_transport.h"

namespace rz {
namespace {

using std::chrono::milliseconds;

Failure loss_of(int rank) { return {rank, Errc::peer_lost, concat("rank ", rank, " is lost")}; }

/// Records what the monitor calls.
struct Links final : MonitoredLinks {
  std::optional<Failure> poll_failures() override { return ++polls, lost; }
  Failure spread_failure(const Failure& failure) override {
    spread.push_back(failure.culprit);
    return agreed ? *agreed : failure;
  }
  std::optional<std::uint32_t> cancelled_after() const override { return calls_of_others; }
  void flush_failure() noexcept override { ++flushes; }
  void send_wait_message(int peer, const WaitMessage& message) override {
    (message.kind == WaitMessage::query ? queried : replied).push_back(peer);
    sent_waits = message.waits_for;
  }
  bool changed() override { return ++looks, std::exchange(has_changed, false); }
  void set_sleeping(bool asleep) override {
    sleeps.push_back(asleep);
    if (asleep) looks_awake = looks, has_changed = changes_before_sleep;
  }
  std::optional<Failure> group_failure() const override { return agreed; }

  std::optional<Failure> lost, agreed;
  std::optional<std::uint32_t> calls_of_others;
  bool has_changed = false;
  bool changes_before_sleep = false;  ///< just before set_sleeping(true), too late for an earlier look
  int polls = 0, flushes = 0, looks = 0;
  int looks_awake = 0;  ///< before the last sleep
  RankSet sent_waits;
  std::vector<int> spread, queried, replied;
  std::vector<bool> sleeps;
};

/// Rank 0 of four: memory shared with rank 1, sockets to ranks 2 and 3.
class MonitorOfBoth : public testing::Test {
 protected:
  MonitorOfBoth() {
    monitor.add(memory, std::array{1}, LinkData::memory);
    monitor.add(sockets, std::array{2, 3}, LinkData::sockets);
  }
  Links memory, sockets;
  LinkMonitor monitor{0, {0, 0, 1, 2}, false};
};

/// Rank 0 of two on one node.
class MonitorOfMemory : public testing::Test {
 protected:
  MonitorOfMemory() { monitor.add(links, std::array{1}, LinkData::memory); }
  /// As a peer does that has changed the memory.
  void ring() { net::Poller::ring_doorbell(monitor.poller().doorbell()); }
  bool is_rung() { return monitor.poller().poll({}); }
  Links links;
  LinkMonitor monitor{0, {0, 0}, false};
};

const std::vector<bool> one_sleep{true, false};

TEST_F(MonitorOfBoth, TheFirstFailureIsSentOnceOverAllLinks) {
  monitor.progress(0);
  monitor.abort({2, Errc::aborted, "enough"});
  monitor.abort(loss_of(3));
  const Error e = test::error_of([&] { monitor.progress(0); });
  EXPECT_EQ(e.code(), Errc::aborted);
  EXPECT_EQ(e.culprit(), 2);
  EXPECT_STREQ(e.what(), "enough");
  EXPECT_EQ(memory.spread, std::vector{2});
  EXPECT_EQ(sockets.spread, std::vector{2});
  EXPECT_EQ(sockets.flushes, 1) << "the rest of what the sockets could not send";
}

TEST_F(MonitorOfBoth, WhatPeersInMemoryHaveAgreedOnReplacesAFailure) {
  memory.agreed = loss_of(1);
  monitor.abort(loss_of(2));
  EXPECT_EQ(memory.spread, std::vector{2});
  EXPECT_EQ(sockets.spread, std::vector{1});
  EXPECT_EQ(test::error_of([&] { monitor.progress(0); }).culprit(), 1);
}

TEST_F(MonitorOfBoth, AFailureThatPeersInMemoryHaveAgreedOnIsThrown) {
  memory.agreed = loss_of(1);
  EXPECT_EQ(test::error_of([&] { monitor.progress(0); }).culprit(), 1);
  EXPECT_EQ(sockets.spread, std::vector{1});
  EXPECT_EQ(memory.polls, 0);
}

TEST_F(MonitorOfBoth, AFailureThatAnotherHostReportsComesBeforeALossOnThisOne) {
  memory.lost = loss_of(1), sockets.lost = loss_of(3);
  EXPECT_EQ(test::error_of([&] { monitor.progress(0); }).culprit(), 3);
}

TEST_F(MonitorOfBoth, ADepartedPeerIsTheCulpritUnlessALossIsFound) {
  monitor.report_departed(1);
  monitor.report_departed(2);
  sockets.lost = loss_of(3);
  EXPECT_EQ(test::error_of([&] { monitor.progress(0); }).culprit(), 3);
}

TEST_F(MonitorOfBoth, TheFirstReportWins) {
  monitor.report_departed(1);
  monitor.report_departed(2);
  monitor.report(loss_of(3));
  const Error e = test::error_of([&] { monitor.progress(0); });
  EXPECT_EQ(e.code(), Errc::peer_lost);
  EXPECT_EQ(e.culprit(), 1);
  EXPECT_STREQ(e.what(), "rank 1 left the group, and rank 0 still needs it");
}

// ---- cancelled groups

TEST_F(MonitorOfBoth, ACancelledGroupFirstCompletesWhatARankHasThatCancelledIt) {
  memory.agreed = Failure{1, Errc::cancelled, "rank 1 goes on", 7};
  memory.calls_of_others = 7;
  monitor.progress(6);
  EXPECT_EQ(sockets.spread, std::vector{1}) << "the others learn of it at once";
  monitor.wait(milliseconds(0), false);
  const Error e = test::error_of([&] { monitor.progress(7); });
  EXPECT_EQ(e.code(), Errc::cancelled);
  EXPECT_STREQ(e.what(), "rank 1 goes on");
  sockets.calls_of_others = 5;  // another rank has cancelled it before, too
  EXPECT_EQ(test::error_of([&] { monitor.progress(5); }).culprit(), 1);
  monitor.progress(4);
}

TEST_F(MonitorOfBoth, ARankThatCancelsTellsItsOwnCount) {
  memory.agreed = Failure{1, Errc::cancelled, "rank 1 goes on", 7};
  memory.calls_of_others = 7;
  monitor.progress(3);
  monitor.abort({0, Errc::cancelled, "rank 0 goes on", 3});
  EXPECT_EQ(sockets.spread, (std::vector{1, 1})) << "agreed in memory, and sent again with another count";
  EXPECT_EQ(test::error_of([&] { monitor.progress(3); }).culprit(), 1);
}

TEST_F(MonitorOfBoth, APeerThatIsLostEndsACallThatACancelledGroupWouldComplete) {
  memory.agreed = Failure{1, Errc::cancelled, "rank 1 goes on", 7};
  memory.calls_of_others = 7;
  monitor.progress(6);
  sockets.lost = loss_of(3);
  const Error e = test::error_of([&] {
    for (;;) monitor.progress(6);
  });
  EXPECT_EQ(e.code(), Errc::peer_lost);
  EXPECT_EQ(e.culprit(), 3);
}

TEST_F(MonitorOfBoth, ALossIsFoundAfterAFailure) {
  monitor.abort({2, Errc::cancelled, "enough"});
  EXPECT_FALSE(monitor.find_lost());
  sockets.lost = loss_of(3);
  EXPECT_EQ(monitor.find_lost()->culprit, 3);
}

TEST_F(MonitorOfBoth, WaitMessagesTakeTheLinksOfTheirPeer) {
  monitor.query_waits();
  EXPECT_EQ(memory.queried, std::vector{1});
  EXPECT_EQ(sockets.queried, (std::vector{2, 3}));
  monitor.wait_graph().receive(3, {WaitMessage::query, {}});
  const RankSet waits_for(0b110);
  monitor.reply_waits({WaitMessage::reply, waits_for});
  EXPECT_TRUE(memory.replied.empty());
  EXPECT_EQ(sockets.replied, std::vector{3});
  EXPECT_EQ(sockets.sent_waits, waits_for);
}

TEST_F(MonitorOfBoth, AQueryForgetsEarlierReplies) {
  monitor.wait_graph().receive(3, {WaitMessage::reply, {}});
  EXPECT_FALSE(monitor.wait_graph().unresponsive(3));
  monitor.query_waits();
  EXPECT_TRUE(monitor.wait_graph().unresponsive(3));
}

TEST_F(MonitorOfBoth, PeersInMemoryRingOnlyWhileThisRankSleeps) {
  monitor.wait(milliseconds(1), false);
  EXPECT_EQ(memory.sleeps, one_sleep);
  EXPECT_TRUE(sockets.sleeps.empty());
  memory.has_changed = true;
  monitor.wait(std::chrono::seconds(10), true);
  monitor.wake();
  monitor.wait(std::chrono::seconds(10), true);
  EXPECT_EQ(memory.sleeps.size(), 2u) << "a change and a wake end a wait before it sleeps";
}

TEST_F(MonitorOfBoth, AnEventOfADescriptorEndsAWaitBeforeItSleeps) {
  for (const bool eager : {false, true}) {
    net::Poller::ring_doorbell(monitor.poller().doorbell());
    monitor.wait(std::chrono::seconds(10), eager);
    EXPECT_TRUE(memory.sleeps.empty()) << "eager " << eager;
  }
}

TEST_F(MonitorOfMemory, AWakeEndsOneWaitBeforeItLooksAtMemory) {
  monitor.wake();
  monitor.wait(std::chrono::seconds(10), true);
  EXPECT_EQ(links.looks, 0);
  EXPECT_TRUE(links.sleeps.empty());
  monitor.wait(milliseconds(1), true);
  EXPECT_EQ(links.sleeps, one_sleep) << "the next wait is another one";
}

TEST_F(MonitorOfMemory, AWakeAndAnAbortEndASleep) {
  EXPECT_FALSE(is_rung());
  monitor.wake();
  EXPECT_TRUE(is_rung());
  monitor.abort(loss_of(1));
  EXPECT_TRUE(is_rung());
}

TEST_F(MonitorOfMemory, NoWaitSleepsOnceTheGroupHasFailed) {
  links.agreed = loss_of(1);  // by the peers
  monitor.wait(std::chrono::seconds(10), false);
  EXPECT_TRUE(links.sleeps.empty());
  links.agreed.reset();
  monitor.abort(loss_of(1));
  monitor.wait(std::chrono::seconds(10), false);
  EXPECT_TRUE(links.sleeps.empty());
}

TEST_F(MonitorOfMemory, AChangeAfterTheLastLookIsSeenBeforeItSleeps) {
  links.changes_before_sleep = true;
  monitor.wait(milliseconds(1), false);
  EXPECT_EQ(links.sleeps, one_sleep);
  EXPECT_EQ(links.looks, links.looks_awake + 1);
  EXPECT_FALSE(links.has_changed);
}

/// True if `descriptor` is readable.
bool is_readable(int descriptor) {
  pollfd file{descriptor, POLLIN, 0};
  return poll(&file, 1, 0) == 1;
}

TEST_F(MonitorOfMemory, ASleepOutsideWaitHasADescriptorThatAWakeMakesReadable) {
  const int descriptor = monitor.begin_sleep();
  EXPECT_EQ(links.sleeps, std::vector{true});
  EXPECT_FALSE(is_readable(descriptor));
  monitor.wake();
  EXPECT_TRUE(is_readable(descriptor));
  monitor.end_sleep();
  EXPECT_EQ(links.sleeps, one_sleep);
  EXPECT_EQ(monitor.begin_sleep(), -1) << "the wake has not been seen";
}

TEST_F(MonitorOfMemory, NoSleepBeginsAfterAChange) {
  links.has_changed = true;
  EXPECT_EQ(monitor.begin_sleep(), -1);
  EXPECT_TRUE(links.sleeps.empty());
  links.changes_before_sleep = true;
  EXPECT_EQ(monitor.begin_sleep(), -1) << "after the last look";
  EXPECT_EQ(links.sleeps, one_sleep);
  ring();
  monitor.progress(0);
  EXPECT_EQ(monitor.begin_sleep(), -1) << "progress() has seen an event";
}

TEST_F(MonitorOfMemory, AnEventThatProgressHasSeenEndsOneWait) {
  ring();
  monitor.progress(0);
  monitor.wait(std::chrono::seconds(10), true);
  EXPECT_TRUE(links.sleeps.empty());
  monitor.wait(milliseconds(1), false);
  EXPECT_EQ(links.sleeps, one_sleep);
}

TEST_F(MonitorOfMemory, SocketsArePolledAfterEverySleep) {
  for (int i = 1; i < 4; ++i) {
    monitor.progress(0);
    EXPECT_EQ(links.polls, i);
    monitor.wait({}, false);
  }
}

TEST_F(MonitorOfBoth, SocketsAreAlwaysPolledIfTheyCarryData) {
  monitor.progress(0), monitor.progress(0);
  EXPECT_EQ(sockets.polls, 2);
  LinkMonitor in_memory(0, {0, 0}, false);
  Links links;
  in_memory.add(links, std::array{1}, LinkData::memory);
  in_memory.progress(0), in_memory.progress(0);
  EXPECT_EQ(links.polls, 1) << "again after failure_poll_interval";
}

TEST(LinkMonitor, SpinsOnMemoryUnlessProcessorsAreOversubscribed) {
  for (const bool oversubscribed : {false, true})
    for (const bool eager : {false, true}) {
      LinkMonitor monitor(0, {0, 0}, oversubscribed);
      Links links;
      monitor.add(links, std::array{1}, LinkData::memory);
      monitor.wait(milliseconds(1), eager);
      const TransportWaitPolicy& policy = wait_policy(oversubscribed).transport;
      EXPECT_EQ(links.looks, 2 + (oversubscribed || !eager ? policy.yields : policy.memory_spins));
    }
}

/// Streams of a simulated network as a transport of a group; keeps the addresses that it connects with.
class Simulated final : public MonitoredTransport {
 public:
  Simulated(test::SimNetwork& network, std::shared_ptr<LinkMonitor> monitor, std::string address = "")
      : MonitoredTransport(std::move(monitor)), sim_(network, 0), address_(std::move(address)) {}
  std::string address() const override { return address_; }
  void connect(const net::HandshakeInfo&, const std::vector<std::string>& all, Deadline) override {
    connected = all;
  }
  std::size_t post(int peer, Channel channel, const CallSignature& signature,
                   std::span<const std::byte> bytes) override {
    return sim_.post(peer, channel, signature, bytes);
  }
  std::uint64_t released(int peer, Channel channel) override { return sim_.released(peer, channel); }
  ReceiveView peek(int peer, Channel channel) override { return sim_.peek(peer, channel); }
  void consume(int peer, Channel channel, std::size_t n) override { sim_.consume(peer, channel, n); }
  std::string describe() const override { return sim_.describe(); }

  std::vector<std::string> connected;

 private:
  test::SimTransport sim_;
  const std::string address_;
};

TEST(GroupTransport, RoutesEachPeerToItsTransport) {
  test::SimNetwork near(3), far(3);
  const auto monitor = std::make_shared<LinkMonitor>(0, std::vector{0, 0, 1}, false);
  GroupTransport group(monitor);
  group.add(std::make_unique<Simulated>(near, monitor), std::array{1});
  group.add(std::make_unique<Simulated>(far, monitor), std::array{2});
  const std::byte memory{1};
  for (const int peer : {1, 2}) {
    test::SimNetwork &right = peer == 1 ? near : far, &wrong = peer == 1 ? far : near;
    while (group.post(peer, Channel::collective, {}, {&memory, 1}) == 0)
      right.transport(0).wait(milliseconds(1), false);
    for (auto* network : {&right, &wrong}) {
      for (int i = 0; i < 5; ++i) network->transport(peer).wait(milliseconds(1), false);
      EXPECT_EQ(network->transport(peer).peek(0, Channel::collective).bytes.size(), network == &right);
    }
  }
  EXPECT_EQ(group.describe(), "sim+sim");
  EXPECT_EQ(group.shared_memory(), nullptr);
  EXPECT_FALSE(group.one_node());
}

TEST(GroupTransport, EachTransportConnectsWithAddressesOfItsKind) {
  test::SimNetwork near(3), far(3);
  const auto monitor = std::make_shared<LinkMonitor>(0, std::vector{0, 0, 1}, false);
  auto first = std::make_unique<Simulated>(near, monitor, "a0"),
       second = std::make_unique<Simulated>(far, monitor, "b0");
  const auto &a = *first, &b = *second;
  GroupTransport group(monitor);
  group.add(std::move(first), std::array{1});
  group.add(std::move(second), std::array{2});
  EXPECT_EQ(group.address(), "a0 b0");
  group.connect({}, {"a0 b0", "a1 ", " b2"}, Deadline::after(milliseconds(0)));
  EXPECT_EQ(a.connected, (std::vector<std::string>{"a0", "a1", ""}));
  EXPECT_EQ(b.connected, (std::vector<std::string>{"b0", "", "b2"}));
}

}  // namespace
}  // namespace rz
