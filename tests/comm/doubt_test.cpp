// Whether calls ask where memory lies, and which of two ways they take then.
#include "comm/backends/doubt.h"

#include <gtest/gtest.h>

#include <chrono>
#include <utility>
#include <vector>

namespace rz {
namespace {

using namespace std::chrono_literals;

// ---- whether to ask

TEST(Doubt, WhoAskedInVainAsksLessAndLessOften) {
  Doubt doubt;
  std::vector<unsigned> rows;  // of calls that did not ask, before each that did
  for (unsigned row = 0; rows.size() < 8;) {
    if (doubt.asks()) {
      doubt.told(false, false);
      rows.push_back(std::exchange(row, 0));
    } else {
      ++row;
    }
  }
  EXPECT_EQ(rows, (std::vector<unsigned>{0, 1, 3, 7, 15, 31, 63, 63}));
}

TEST(Doubt, WhoFoundMemoryThatCanBeUsedAsksEveryTime) {
  Doubt doubt;
  for (int i = 0; i < 3; ++i) doubt.told(false, false);
  doubt.told(true, false);
  for (int i = 0; i < 100; ++i) {
    EXPECT_TRUE(doubt.asks()) << i;
    doubt.told(true, false);
  }
}

TEST(Doubt, TimeTellsOnceTheFirstCallsAreOver) {
  Doubt doubt;
  int calls = 0;
  for (; !doubt.by_time().on(); ++calls)
    if (doubt.asks()) doubt.told(false, true);
  EXPECT_EQ(calls, 1 + 2 + 4 + 8 + 16 + 32);
  EXPECT_TRUE(doubt.asks()) << "the first trial";
  doubt.told(false, true);
  EXPECT_TRUE(doubt.by_time().on()) << "as long as all may read";
  doubt.told(false, false);
  EXPECT_FALSE(doubt.by_time().on());
  EXPECT_FALSE(doubt.asks()) << "in vain, like those before";
}

// ---- which way

// One rank's calls, of which each way takes so long; what is chosen at last.
bool choice_after(WayByTime& way, unsigned calls, std::chrono::nanoseconds once,
                  std::chrono::nanoseconds staged) {
  for (unsigned i = 0; i < calls; ++i) {
    way.begin();
    if (way.chooses()) way.choose(way.mine().once_ns, way.mine().staged_ns);
    if (way.is_trial()) way.took(way.once() ? once : staged);
  }
  return way.once();
}

TEST(WayByTime, TriesBothAndTakesTheFaster) {
  WayByTime way;
  EXPECT_FALSE(way.on());
  way.start();
  constexpr unsigned trials = WayByTime::trials;
  for (unsigned i = 0; i < 2 * trials + 4; ++i) {
    const bool tries_once = i < trials, chooses = i == 2 * trials;
    EXPECT_EQ(way.begin(), tries_once || i >= 2 * trials) << "asks where memory lies, call " << i;
    EXPECT_EQ(way.chooses(), chooses) << i;
    EXPECT_EQ(way.is_trial(), i < 2 * trials) << i;
    if (chooses) {
      EXPECT_EQ(way.mine(), (WayByTime::Times{70, 100})) << "the least of each";
      way.choose(70, 100);
    }
    EXPECT_EQ(way.once(), tries_once || i >= 2 * trials) << i;
    if (way.is_trial()) way.took(i % trials == 1 ? (tries_once ? 70ns : 100ns) : 130ns);
  }
}

TEST(WayByTime, StaysStagedWhereLittleIsWonAndAsksNoMore) {
  WayByTime way;
  way.start();
  EXPECT_FALSE(choice_after(way, 2 * WayByTime::trials + 1, 95ns, 100ns));
  for (unsigned i = 0; i < WayByTime::least_rest; ++i) {
    EXPECT_FALSE(way.begin()) << i;
    EXPECT_FALSE(way.is_trial());
  }
  EXPECT_TRUE(way.begin()) << "tries again";
  EXPECT_TRUE(way.is_trial());
}

TEST(WayByTime, FollowsATurnOfTimesWithinTheLongestRest) {
  WayByTime way;
  way.start();
  constexpr unsigned round = 2 * WayByTime::trials + 1 + WayByTime::most_rest;
  EXPECT_FALSE(choice_after(way, 10 * round, 200ns, 100ns));
  EXPECT_TRUE(choice_after(way, 2 * round, 50ns, 100ns));
  EXPECT_FALSE(choice_after(way, 2 * round, 200ns, 100ns));
}

TEST(WayByTime, TrialsAreFewOnceTheChoiceStands) {
  WayByTime way;
  way.start();
  choice_after(way, 5000, 200ns, 100ns);
  int trials = 0;
  for (int i = 0; i < 10'000; ++i) {
    way.begin();
    if (way.chooses()) way.choose(200, 100);
    trials += way.is_trial() && way.once();
  }
  EXPECT_LT(trials, 50);
}

}  // namespace
}  // namespace rz
