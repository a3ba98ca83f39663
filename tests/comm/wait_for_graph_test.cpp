#include "comm/transports/wait_for_graph.h"

#include <gtest/gtest.h>

namespace rz {
namespace {

WaitNote waits_for(RankSet ranks) { return {WaitNote::answer, ranks}; }

TEST(WaitForGraph, FollowsThoseWhoWaitToTheOneThatIsSilent) {
  WaitForGraph graph(0);
  graph.hear(1, waits_for(0b101));  // 0 and 2
  graph.hear(2, waits_for(0b1010));
  EXPECT_EQ(graph.culprit(1, 0b10), 3);
  EXPECT_TRUE(graph.silent(3));
  EXPECT_EQ(graph.culprit(4, 0b10010), 4) << "the suspect comes first";
}

TEST(WaitForGraph, WhoWaitsForNobodyIsToBlameIfNoneIsSilent) {
  WaitForGraph graph(0);
  graph.hear(1, waits_for(0b1100));
  graph.hear(2, waits_for(0));
  EXPECT_EQ(graph.culprit(1, 0b10), 3);
  graph.hear(3, waits_for(0b10));
  EXPECT_EQ(graph.culprit(1, 0b10), 2);
}

TEST(WaitForGraph, NobodyIsToBlameWhereAllWaitForEachOther) {
  WaitForGraph graph(0);
  EXPECT_EQ(graph.culprit(-1, 0), -1);
  graph.hear(1, waits_for(0b100));
  graph.hear(2, waits_for(0b11));
  EXPECT_EQ(graph.culprit(1, 0b10), -1);
  graph.forget();
  EXPECT_EQ(graph.culprit(1, 0b10), 1);
}

TEST(WaitForGraph, RanksBeyondItsBoundAreSuspectsLikeOthers) {
  WaitForGraph graph(0);
  const int far = static_cast<int>(RankSet().size());
  EXPECT_EQ(graph.culprit(far, 0), far);
  graph.hear(far, waits_for(0b100));
  EXPECT_EQ(graph.culprit(far, 0), 2);
}

TEST(WaitForGraph, WhoHasAskedIsAnsweredOnce) {
  WaitForGraph graph(0);
  EXPECT_FALSE(graph.asked());
  graph.hear(2, {WaitNote::question, {}});
  EXPECT_TRUE(graph.asked());
  EXPECT_TRUE(graph.silent(2));
  EXPECT_EQ(graph.take_askers(), std::vector{2});
  EXPECT_FALSE(graph.asked());
}

}  // namespace
}  // namespace rz
