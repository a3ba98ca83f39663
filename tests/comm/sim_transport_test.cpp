// Runs: ci pure
// Not under sanitizers: GivesExactResultsInLargeGroups

// Algorithms and point-to-point messages over a simulated network, and the faults of that network.

#include "tests/support/sim_transport.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <numeric>
#include <vector>

#include "comm/core/error.h"
#include "comm/progress/point_to_point.h"
#include "comm/schedule/algorithms/algorithm.h"
#include "comm/schedule/executor.h"
#include "tests/support/error_of.h"
#include "tests/support/sim_collective.h"

namespace rz {
namespace {

using test::SimNetwork;
using test::SimOptions;
using test::SimProgram;
using test::SimTime;
using test::SimTransport;

// ---- collectives ----

/// Ranks per node: hierarchical algorithms depend on it. Groups of 10 or more have one placement.
std::vector<int> ranks_per_node(const schedule::Algorithm& a, int size) {
  if (size >= 10) return {8};
  if (!a.is(schedule::hierarchical)) return {1};
  return {1, 2, 3, size};
}

std::vector<int> nodes_of(int size, int per_node) {
  std::vector<int> node;
  for (int r = 0; r < size; ++r) node.push_back(r / per_node);
  return node;
}

template <class T>
void expect_exact(const schedule::Algorithm& a, int size, std::size_t count, std::uint64_t seed,
                  int calls = 2) {
  for (const int per_node : ranks_per_node(a, size))
    for (const int root :
         traits(a.collective).rooted() && size > 1 ? std::vector{0, size - 1} : std::vector{0}) {
      SCOPED_TRACE(testing::Message()
                   << size << " ranks, " << per_node << " a node, root " << root << ", seed " << seed);
      SimNetwork network(size, {.seed = seed, .node_of_rank = nodes_of(size, per_node)});
      test::SimCollective<T> collective(network, a.schedule, a.collective, root, count, calls);
      collective.run();
      collective.expect_results();
      if (testing::Test::HasFailure()) return;
    }
}

class EveryAlgorithmOverSim : public testing::TestWithParam<schedule::Algorithm> {};
INSTANTIATE_TEST_SUITE_P(List, EveryAlgorithmOverSim, testing::ValuesIn(schedule::algorithms()),
                         [](const auto& info) {
                           return std::string(name(info.param.collective)) + "_" + info.param.name;
                         });

TEST_P(EveryAlgorithmOverSim, GivesExactResults) {
  for (int size = 1; size <= 9; ++size) {
    for (const std::uint64_t seed : {1, 2, 3}) expect_exact<std::uint32_t>(GetParam(), size, 501, seed);
    expect_exact<std::int64_t>(GetParam(), size, 3, 4);
    expect_exact<float>(GetParam(), size, 111, 5);
    if (HasFailure()) return;
  }
}

TEST_P(EveryAlgorithmOverSim, GivesExactResultsInLargeGroups) {
  for (const int size : {16, 33, 65}) expect_exact<std::uint32_t>(GetParam(), size, 131, 6, 1);
}

constexpr Collective all_reduce = Collective::all_reduce;

SimTime end_time(std::uint64_t seed) {
  SimNetwork network(5, {.seed = seed});
  test::SimCollective<std::uint32_t> collective(
      network, schedule::find_algorithm(all_reduce, "ring").schedule, all_reduce, 0, 5000);
  collective.run();
  return network.now();
}

TEST(SimNetwork, TheSeedDeterminesTheVirtualTime) {
  EXPECT_EQ(end_time(1), end_time(1));
  EXPECT_EQ(end_time(2), end_time(2));
  EXPECT_NE(end_time(1), end_time(2));
  EXPECT_NE(end_time(2), end_time(3));
}

/// Time of one message of `bytes` from rank 0 to rank 1 without random delays.
SimTime message_time(std::size_t bytes, test::SimLink link) {
  SimNetwork network(2, {.jitter = {.max_delay = {}, .max_piece_bytes = 1024, .max_unread_bytes = 1 << 20}});
  network.set_link(0, 1, link);
  SimTransport &sender = network.transport(0), &receiver = network.transport(1);
  std::vector<std::byte> out(bytes), in(bytes);
  std::size_t sent = 0, received = 0;
  while (received < bytes) {
    if (sent < bytes) {
      const std::size_t n = sender.post(1, Channel::collective, {}, std::span(out).subspan(sent));
      sent += n;
      if (n == 0) sender.wait(std::chrono::seconds(1), false);
      continue;
    }
    const std::size_t n = receiver.receive(0, Channel::collective, std::span(in).subspan(received));
    received += n;
    if (n == 0) receiver.wait(std::chrono::seconds(1), false);
  }
  return network.now();
}

TEST(SimNetwork, LatencyAndBandwidthOfALinkDetermineTheTime) {
  EXPECT_EQ(message_time(1, {SimTime(700), 1000}), SimTime(701));
  EXPECT_EQ(message_time(100'000, {SimTime(700), 1000}), SimTime(100'700));
  EXPECT_EQ(message_time(100'000, {SimTime(5000), 500}), SimTime(205'000));
}

// ---- streams ----

TEST(SimTransport, AStreamArrivesInOrderInPiecesWithOneSignatureEach) {
  for (std::uint64_t seed = 1; seed <= 20; ++seed) {
    SimNetwork network(2, {.seed = seed, .jitter = {.max_piece_bytes = 100, .max_unread_bytes = 500}});
    SimTransport &sender = network.transport(0), &receiver = network.transport(1);
    std::vector<std::uint16_t> out(4000), in(out.size());
    std::iota(out.begin(), out.end(), std::uint16_t{0});
    const auto source = std::as_bytes(std::span(out));
    const auto target = std::as_writable_bytes(std::span(in));
    constexpr std::size_t first = 3001;  // bytes of the first message
    std::size_t sent = 0, received = 0;
    bool refused = false, partial = false;
    while (received < source.size()) {
      const std::size_t end = sent < first ? first : source.size();
      const std::size_t n = sender.post(1, Channel::collective, {.sequence = end == first ? 1u : 2u},
                                        source.subspan(sent, end - sent));
      refused |= n == 0 && sent < end;
      partial |= n > 0 && sent + n < end;
      sent += n;
      const ReceiveView view = receiver.peek(0, Channel::collective);
      if (!view.bytes.empty()) {
        EXPECT_EQ(view.signature.sequence, received < first ? 1u : 2u);
        EXPECT_EQ(receiver.peek(0, Channel::collective).bytes.data(), view.bytes.data());
        std::copy(view.bytes.begin(), view.bytes.end(),
                  target.begin() + static_cast<std::ptrdiff_t>(received));
        receiver.consume(0, Channel::collective, view.bytes.size());
        received += view.bytes.size();
      }
      EXPECT_LE(sender.released(1, Channel::collective), sent);
      EXPECT_EQ(receiver.peek(0, Channel::point_to_point).bytes.size(), 0u);
      if (n == 0) sender.wait(std::chrono::microseconds(1), false);
    }
    EXPECT_TRUE(refused && partial);
    EXPECT_EQ(in, out);
    EXPECT_LT(sender.released(1, Channel::collective), sent) << "released at once";
    sender.wait(std::chrono::seconds(1), false);
    for (int i = 0; i < 100; ++i) sender.wait(std::chrono::milliseconds(1), false);
    EXPECT_EQ(sender.released(1, Channel::collective), sent);
  }
}

TEST(SimTransport, APostMayBeAcceptedInPartThoughThereIsSpace) {
  const std::vector<std::byte> bytes(1000);
  std::size_t in_part = 0, whole = 0;
  for (std::uint64_t seed = 1; seed <= 50; ++seed) {
    SimNetwork network(2, {.seed = seed});
    const std::size_t n = network.transport(0).post(1, Channel::collective, {}, bytes);
    in_part += n > 0 && n < bytes.size();
    whole += n == bytes.size();
  }
  EXPECT_GT(in_part, 5u);
  EXPECT_GT(whole, 5u);
}

TEST(SimTransport, AStreamHasBackPressureOfItsOwn) {
  SimNetwork network(2, {.jitter = {.max_unread_bytes = 5000}});
  SimTransport& sender = network.transport(0);
  const std::vector<std::byte> bytes(1000);
  for (const Channel channel : {Channel::collective, Channel::point_to_point}) {
    std::size_t sent = 0;
    for (int i = 0; i < 1000; ++i) {
      sent += sender.post(1, channel, {}, bytes);
      sender.wait(std::chrono::microseconds(1), false);
    }
    EXPECT_EQ(sent, 5000u);
  }
}

TEST(SimTransport, ConsumingMoreThanWasShownFails) {
  SimNetwork network(2);
  const Error e = test::error_of([&] { network.transport(1).consume(0, Channel::collective, 1); });
  EXPECT_EQ(e.code(), Errc::invalid_argument);
}

TEST(SimTransport, AChangeOfPostedMemoryBeforeItsReleaseIsAnError) {
  SimNetwork network(2);
  SimTransport &sender = network.transport(0), &receiver = network.transport(1);
  std::byte memory{1};
  while (sender.post(1, Channel::collective, {}, {&memory, 1}) == 0)
    sender.wait(std::chrono::milliseconds(1), false);
  while (receiver.peek(0, Channel::collective).bytes.empty())
    receiver.wait(std::chrono::milliseconds(1), false);
  ASSERT_EQ(sender.released(1, Channel::collective), 0u);
  memory = std::byte{2};
  receiver.consume(0, Channel::collective, 1);
  const Error e = test::error_of([&] { sender.wait(std::chrono::milliseconds(1), false); });
  EXPECT_STREQ(e.what(), "rank 0 changed memory that it had posted to rank 1 before it was released");
}

TEST(SimTransport, SomeMemoryIsReleasedOnlyOnceItIsConsumed) {
  std::size_t released_unread = 0;
  constexpr std::size_t seeds = 40;
  for (std::uint64_t seed = 1; seed <= seeds; ++seed) {
    SimNetwork network(2, {.seed = seed});
    SimTransport &sender = network.transport(0), &receiver = network.transport(1);
    const std::byte memory{1};
    while (sender.post(1, Channel::collective, {}, {&memory, 1}) == 0)
      sender.wait(std::chrono::milliseconds(1), false);
    for (int i = 0; i < 5; ++i) sender.wait(std::chrono::milliseconds(1), false);
    released_unread += sender.released(1, Channel::collective);
    receiver.consume(0, Channel::collective, 1);
    for (int i = 0; i < 5; ++i) sender.wait(std::chrono::milliseconds(1), false);
    EXPECT_EQ(sender.released(1, Channel::collective), 1u);
  }
  EXPECT_GT(released_unread, 5u);
  EXPECT_LT(released_unread, seeds - 5);
}

TEST(SimTransport, MemoryIsAlignedAndZeroed) {
  SimNetwork network(1);
  for (const std::size_t bytes : {0, 1, 1000, 1000}) {
    const auto memory = network.transport(0).allocate(bytes);
    EXPECT_EQ(reinterpret_cast<std::uintptr_t>(memory.get()) % 256, 0u);
    EXPECT_EQ(std::count(memory.get(), memory.get() + bytes, std::byte{0}),
              static_cast<std::ptrdiff_t>(bytes));
    std::fill_n(memory.get(), bytes, std::byte{0xff});
  }
}

// ---- waits ----

TEST(SimTransport, WaitEndsAtItsLimitOrAtAWake) {
  SimNetwork network(1);
  SimTransport& transport = network.transport(0);
  transport.wait(std::chrono::microseconds(3), false);
  EXPECT_EQ(network.now(), SimTime(3000));
  transport.wake();
  transport.wait(std::chrono::microseconds(3), false);
  EXPECT_EQ(network.now(), SimTime(3000));
  transport.wait(std::chrono::microseconds(3), false);
  EXPECT_EQ(network.now(), SimTime(6000));
}

TEST(SimTransport, RepliesToAQueryOfWaitsNameTheCulprit) {
  SimNetwork network(3);
  network.transport(0).query_waits();
  for (const int peer : {1, 2}) {
    network.transport(peer).wait(std::chrono::milliseconds(1), false);
    EXPECT_TRUE(network.transport(peer).wait_graph().has_requests());
  }
  RankSet two;
  two[2] = true;
  network.transport(1).reply_waits({WaitMessage::reply, two});
  for (int i = 0; i < 3; ++i) network.transport(0).wait(std::chrono::milliseconds(1), false);
  const WaitForGraph& graph = network.transport(0).wait_graph();
  EXPECT_FALSE(graph.unresponsive(1));
  EXPECT_TRUE(graph.unresponsive(2));
  RankSet one;
  one[1] = true;
  EXPECT_EQ(graph.culprit(1, one), 2);
}

TEST(SimTransport, NodesAreThoseOfTheOptions) {
  SimNetwork two(3, {.node_of_rank = {0, 0, 1}}), one(2, {.node_of_rank = {0, 0}}), apart(2);
  EXPECT_FALSE(two.transport(0).one_node());
  EXPECT_EQ(two.transport(2).nodes()[2], 1);
  EXPECT_TRUE(one.transport(0).one_node());
  EXPECT_FALSE(apart.transport(0).one_node());
  EXPECT_EQ(one.transport(1).describe(), "sim");
}

// ---- faults ----

TEST(SimNetwork, ARankThatStopsIsNamedByAllOthersInBoundedTime) {
  for (const schedule::Algorithm& a : schedule::algorithms()) {
    if (a.collective != all_reduce) continue;
    for (const std::uint64_t seed : {1, 2, 3})
      for (const int victim : {0, 3}) {
        SimNetwork network(6, {.seed = seed});
        const SimTime stop{30'000}, bound = stop + SimTime(1'000'000) + SimTime(21'000);
        network.stop_rank(victim, stop);
        test::SimCollective<std::uint32_t> collective(network, a.schedule, all_reduce, 0, 20'000);
        const auto errors = network.run_until_complete(collective.programs());
        for (std::size_t r = 0; r < errors.size(); ++r) {
          SCOPED_TRACE(testing::Message() << a.name << ", seed " << seed << ", rank " << r);
          ASSERT_EQ(errors[r].has_value(), static_cast<int>(r) != victim);
          if (!errors[r]) continue;
          EXPECT_EQ(errors[r]->code(), Errc::peer_lost);
          EXPECT_EQ(errors[r]->culprit(), victim);
          EXPECT_EQ(errors[r]->what(), concat("rank ", victim, " is lost: it has stopped"));
        }
        EXPECT_LE(network.now(), bound);
        EXPECT_GT(network.now(), stop);
      }
  }
}

TEST(SimNetwork, ALinkThatDropsOutFailsTheGroupWithOneCulprit) {
  for (const std::uint64_t seed : {1, 2, 3, 4}) {
    SimNetwork network(4, {.seed = seed});
    network.drop_link(1, 2, SimTime(25'000));
    test::SimCollective<std::uint32_t> collective(
        network, schedule::find_algorithm(all_reduce, "ring").schedule, all_reduce, 0, 20'000);
    const auto errors = network.run_until_complete(collective.programs());
    for (const auto& e : errors) {
      ASSERT_TRUE(e);
      EXPECT_EQ(e->code(), Errc::peer_lost);
      EXPECT_TRUE(e->culprit() == 1 || e->culprit() == 2);
      EXPECT_STREQ(e->what(), errors[0]->what());
    }
  }
}

/// Posts one byte to rank 1 and adds the fault. Returns the number of bytes that have arrived after 10 us; a
/// byte takes 1 us.
std::size_t received_after(const std::function<void(SimNetwork&)>& fault) {
  SimNetwork network(2, {.jitter = {.max_delay = {}}, .max_detection_time = std::chrono::seconds(1)});
  SimTransport &sender = network.transport(0), &receiver = network.transport(1);
  const std::byte memory{1};
  while (sender.post(1, Channel::collective, {}, {&memory, 1}) == 0)
    sender.wait(std::chrono::microseconds(0), false);
  fault(network);
  while (network.now() < SimTime(10'000)) receiver.wait(std::chrono::microseconds(10), false);
  return receiver.peek(0, Channel::collective).bytes.size();
}

TEST(SimNetwork, BytesOnTheirWayAreLostWithTheirLinkOrTheirSender) {
  EXPECT_EQ(received_after([](SimNetwork&) {}), 1u);
  EXPECT_EQ(received_after([](SimNetwork& n) { n.drop_link(1, 0, SimTime(500)); }), 0u);
  EXPECT_EQ(received_after([](SimNetwork& n) { n.drop_link(0, 1, SimTime(5000)); }), 1u);
  EXPECT_EQ(received_after([](SimNetwork& n) { n.stop_rank(0, SimTime(500)); }), 0u);
  EXPECT_EQ(received_after([](SimNetwork& n) { n.stop_rank(0, SimTime(5000)); }), 1u);
}

TEST(SimNetwork, ControlMessagesAreLostWithTheirLink) {
  SimNetwork network(3, {.max_detection_time = std::chrono::seconds(1)});
  network.drop_link(0, 1, SimTime(0));
  network.transport(0).query_waits();
  for (const int peer : {1, 2}) network.transport(peer).wait(std::chrono::milliseconds(1), false);
  EXPECT_FALSE(network.transport(1).wait_graph().has_requests());
  EXPECT_TRUE(network.transport(2).wait_graph().has_requests());
}

TEST(SimNetwork, AnAbortReachesEveryRank) {
  SimNetwork network(3);
  test::SimCollective<std::uint32_t> collective(
      network, schedule::find_algorithm(all_reduce, "ring").schedule, all_reduce, 0, 20'000);
  network.transport(1).abort({1, Errc::aborted, "rank 1 ends the group"});
  for (const auto& e : network.run_until_complete(collective.programs())) {
    ASSERT_TRUE(e);
    EXPECT_EQ(e->code(), Errc::aborted);
    EXPECT_EQ(e->culprit(), 1);
    EXPECT_STREQ(e->what(), "rank 1 ends the group");
  }
}

TEST(SimNetwork, AnErrorOfOneRankFailsTheGroup) {
  SimNetwork network(3);
  test::SimCollective<std::uint32_t> collective(
      network, schedule::find_algorithm(all_reduce, "ring").schedule, all_reduce, 0, 100);
  std::vector<SimProgram> programs = collective.programs();
  programs[2].advance = []() -> bool { throw Error(Errc::mismatch, "not this call", 2); };
  const auto errors = network.run_until_complete(programs);
  for (const auto& e : errors) {
    ASSERT_TRUE(e);
    EXPECT_EQ(e->culprit(), 2);
    EXPECT_STREQ(e->what(), "not this call");
  }
}

/// Rank 1 sends nothing to rank 2.
schedule::Schedule with_a_send_left_out(schedule::RankContext context) {
  schedule::Schedule s = schedule::find_algorithm(all_reduce, "two_shot").schedule(context);
  if (context.rank == 1)
    std::erase_if(s.steps, [](const schedule::Step& step) {
      return step.kind == schedule::Step::send && step.peer == 2;
    });
  return s;
}

TEST(SimNetwork, ADeadlockNamesTheRanksThatWaitAndTheirPeers) {
  SimNetwork network(3);
  test::SimCollective<std::uint32_t> collective(network, with_a_send_left_out, all_reduce, 0, 100);
  const Error e = test::error_of([&] { collective.run(); });
  EXPECT_EQ(e.code(), Errc::timeout);
  const std::string text = e.what();
  EXPECT_EQ(text.find("deadlock at "), 0u) << text;
  EXPECT_NE(text.find("rank 2 waits for rank 1 to send"), std::string::npos) << text;
  EXPECT_NE(text.find("rank 0 waits for rank 2"), std::string::npos) << text;
}

TEST(SimNetwork, NoRankLeavesABarrierBeforeAllHaveEntered) {
  for (std::uint64_t seed = 1; seed <= 30; ++seed) {
    SimNetwork network(16, {.seed = seed});
    test::SimCollective<std::uint32_t> collective(
        network, schedule::find_algorithm(Collective::barrier, "dissemination").schedule, Collective::barrier,
        0, 0, 1);
    std::vector<SimProgram> programs = collective.programs();
    SimTime last_entry{}, first_exit = SimTime::max();
    std::vector<bool> entered(programs.size());
    for (std::size_t r = 0; r < programs.size(); ++r)
      programs[r].advance = [&, r, program = programs[r]] {
        if (!entered[r]) last_entry = network.now(), entered[r] = true;
        const bool moved = program.advance();
        if (program.complete()) first_exit = std::min(first_exit, network.now());
        return moved;
      };
    for (const auto& e : network.run_until_complete(programs)) ASSERT_FALSE(e) << e->what();
    EXPECT_LT(last_entry, first_exit);
  }
}

// ---- point-to-point ----

struct Message {
  int from, to;
  std::vector<std::uint32_t> sent, in, out;
};

/// Several messages between each two ranks, and from each rank to itself, some of them empty.
std::vector<Message> messages_of(int size) {
  std::vector<Message> all;
  for (int from = 0; from < size; ++from)
    for (int to = 0; to < size; ++to)
      for (const std::size_t count : {0, 1, 5000, 77}) {
        std::vector<std::uint32_t> sent(count);
        std::iota(sent.begin(), sent.end(), static_cast<std::uint32_t>(from * 1'000'000 + to * 10'000 + 1));
        all.push_back({from, to, sent, sent, std::vector<std::uint32_t>(count)});
      }
  return all;
}

TEST(PointToPointOverSim, MessagesArriveInTheOrderOfEachPair) {
  constexpr int size = 4;
  for (const std::uint64_t seed : {1, 2, 3, 4, 5}) {
    SimNetwork network(size, {.seed = seed});
    std::vector<Message> messages = messages_of(size);
    std::vector<std::unique_ptr<PointToPoint>> ranks;
    std::vector<SimProgram> programs;
    std::size_t finished = 0;
    for (int r = 0; r < size; ++r) {
      PointToPoint& rank = *ranks.emplace_back(std::make_unique<PointToPoint>(network.transport(r), r, size));
      for (Message& m : messages) {
        if (m.from == r)
          rank.add({.kind = Collective::send, .in = Buffer(m.in.data(), m.in.size()), .root = m.to}, &m.in);
        if (m.to == r)
          rank.add({.kind = Collective::recv, .out = Buffer(m.out.data(), m.out.size()), .root = m.from},
                   &m.out);
      }
      // Memory of finished sends is overwritten.
      const auto advance = [&] {
        const bool moved = rank.advance();
        for (void* tag : rank.finished())
          for (Message& m : messages)
            if (tag == &m.in) std::fill(m.in.begin(), m.in.end(), 0u);
        finished += rank.finished().size();
        rank.finished().clear();
        return moved;
      };
      programs.push_back({advance, [&rank] { return rank.idle(); }, [] { return std::string("messages"); }});
    }
    for (const auto& e : network.run_until_complete(programs)) ASSERT_FALSE(e) << e->what();
    for (const Message& m : messages)
      EXPECT_EQ(m.out, m.sent) << m.from << " to " << m.to << ", seed " << seed;
    EXPECT_EQ(finished, 2 * messages.size());
  }
}

TEST(PointToPointOverSim, AReceiveOfAnotherLengthIsAMismatch) {
  SimNetwork network(2);
  std::vector<std::uint32_t> out(10), in(11);
  PointToPoint sender(network.transport(0), 0, 2), receiver(network.transport(1), 1, 2);
  sender.add({.kind = Collective::send, .in = Buffer(out.data(), out.size()), .root = 1}, &out);
  receiver.add({.kind = Collective::recv, .out = Buffer(in.data(), in.size()), .root = 0}, &in);
  const std::vector<SimProgram> programs{
      {[&] { return sender.advance(); }, [] { return false; }, [&] { return sender.waiting_on(&out).text; }},
      {[&] { return receiver.advance(); }, [&] { return receiver.idle(); },
       [&] { return receiver.waiting_on(&in).text; }}};
  for (const auto& e : network.run_until_complete(programs)) {
    ASSERT_TRUE(e);
    EXPECT_EQ(e->code(), Errc::mismatch) << e->what();
  }
}

TEST(PointToPointOverSim, AReceiveWithoutASendIsADeadlock) {
  SimNetwork network(3);
  std::vector<std::uint32_t> in(11);
  PointToPoint receiver(network.transport(1), 1, 3);
  receiver.add({.kind = Collective::recv, .out = Buffer(in.data(), in.size()), .root = 2}, &in);
  const SimProgram idle{[] { return false; }, [] { return true; }, [] { return std::string(); }};
  const std::vector<SimProgram> programs{idle,
                                         {[&] { return receiver.advance(); }, [&] { return receiver.idle(); },
                                          [&] { return receiver.waiting_on(&in).text; }},
                                         idle};
  const Error e = test::error_of([&] { (void)network.run_until_complete(programs); });
  EXPECT_NE(std::string(e.what()).find("rank 1 waits for rank 2 to send"), std::string::npos) << e.what();
}

}  // namespace
}  // namespace rz
