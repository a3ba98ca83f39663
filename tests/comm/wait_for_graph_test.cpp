// Runs: pure

#include "comm/transport/wait_for_graph.h"

#include <gtest/gtest.h>

namespace rz {
namespace {

WaitMessage waits_for(RankSet ranks) { return {WaitMessage::reply, ranks}; }

TEST(WaitForGraph, FollowsWaitsToTheUnresponsiveRank) {
  WaitForGraph graph(0);
  graph.receive(1, waits_for(0b101));  // 0 and 2
  graph.receive(2, waits_for(0b1010));
  EXPECT_EQ(graph.culprit(1, 0b10), 3);
  EXPECT_TRUE(graph.unresponsive(3));
  EXPECT_EQ(graph.culprit(4, 0b10010), 4) << "the suspect comes first";
}

TEST(WaitForGraph, ARankWithoutWaitsIsTheCulpritIfAllRespond) {
  WaitForGraph graph(0);
  graph.receive(1, waits_for(0b1100));
  graph.receive(2, waits_for(0));
  EXPECT_EQ(graph.culprit(1, 0b10), 3);
  graph.receive(3, waits_for(0b10));
  EXPECT_EQ(graph.culprit(1, 0b10), 2);
}

TEST(WaitForGraph, ACycleOfWaitsHasNoCulprit) {
  WaitForGraph graph(0);
  EXPECT_EQ(graph.culprit(-1, 0), -1);
  graph.receive(1, waits_for(0b100));
  graph.receive(2, waits_for(0b11));
  EXPECT_EQ(graph.culprit(1, 0b10), -1);
  graph.clear_replies();
  EXPECT_EQ(graph.culprit(1, 0b10), 1);
}

TEST(WaitForGraph, RanksBeyondItsBoundAreSuspectsLikeOthers) {
  WaitForGraph graph(0);
  const int far = static_cast<int>(RankSet().size());
  EXPECT_EQ(graph.culprit(far, 0), far);
  graph.receive(far, waits_for(0b100));
  EXPECT_EQ(graph.culprit(far, 0), 2);
}

TEST(WaitForGraph, AQueryIsRepliedToOnce) {
  WaitForGraph graph(0);
  EXPECT_FALSE(graph.has_requests());
  graph.receive(2, {WaitMessage::query, {}});
  EXPECT_TRUE(graph.has_requests());
  EXPECT_TRUE(graph.unresponsive(2));
  const auto replies = graph.drain_replies(waits_for(0b10));
  ASSERT_EQ(replies.size(), 1U);
  EXPECT_EQ(replies[0].first, 2);
  EXPECT_EQ(replies[0].second.waits_for, RankSet(0b10));
  EXPECT_FALSE(graph.has_requests());
}

TEST(WaitForGraph, RepliesHaveTheCallOfTheQuery) {
  WaitForGraph graph(0);
  EXPECT_FALSE(graph.call(0)) << "before the first call";
  const auto reply_to = [&](std::uint32_t number) {
    graph.receive(2, {.kind = WaitMessage::query, .number = number});
    return graph.drain_replies(waits_for(0)).at(0).second.numbered;
  };
  for (std::uint32_t i = 0; i < 100; ++i) graph.record({.sequence = i, .count = 2 * i});
  EXPECT_EQ(graph.last_call().sequence, 99U);
  ASSERT_TRUE(reply_to(98));
  EXPECT_EQ(reply_to(98)->count, 196U);
  EXPECT_FALSE(reply_to(100)) << "not begun";
  EXPECT_FALSE(reply_to(20)) << "forgotten";
}

}  // namespace
}  // namespace rz
