// Which end of a rank rzrun takes for the first failure: without processes, and with a clock of the test.

#include <gtest/gtest.h>
#include <signal.h>

#include "tools/rzrun/ranks/first_failure.h"

namespace rz::rzrun {
namespace {

using std::chrono::milliseconds;
using Lines = std::vector<std::string>;

constexpr FirstFailure::Clock::time_point start{};

RankEnd exited(int rank, int code) {
  RankEnd end;
  end.rank = rank;
  end.status.exit_code = code;
  return end;
}

RankEnd killed(int rank, int signal) {
  RankEnd end;
  end.rank = rank;
  end.status.signal = signal;
  return end;
}

RankEnd lost(int rank, const std::string& host) {
  RankEnd end = exited(rank, 255);
  end.host = host;
  end.lost = "no sign of it";
  return end;
}

TEST(FirstFailure, OnOneHostItIsTheEarliestEnd) {
  FirstFailure f(false);
  f.add(exited(2, 5), false, start);
  f.add(killed(1, SIGSEGV), false, start);
  const auto first = f.take();
  ASSERT_TRUE(first);
  EXPECT_EQ(describe_first(*first, 4), "rank 2 of 4 failed first: exited with 5");
  EXPECT_FALSE(f.take()) << "once";
  EXPECT_EQ(f.take_later(), Lines{"rank 1 killed by SIGSEGV (Segmentation fault) after that"});
  EXPECT_EQ(f.take_later(), Lines{});
}

TEST(FirstFailure, OnSeveralHostsAnExitWaitsForItsCause) {
  for (const bool is_lost : {false, true}) {
    FirstFailure f(true);
    f.add(exited(0, 1), false, start);
    EXPECT_FALSE(f.take());
    EXPECT_EQ(f.next(), start + milliseconds(1000));
    f.decide(true, false, start + milliseconds(999));
    EXPECT_FALSE(f.take());
    f.add(is_lost ? lost(2, "b") : killed(3, SIGSEGV), false, start + milliseconds(999));
    const auto first = f.take();
    ASSERT_TRUE(first) << "a signal and a lost host need no other cause";
    EXPECT_EQ(first->rank, is_lost ? 2 : 3);
    EXPECT_EQ(f.take_later(), Lines{"rank 0 exited with 1 after that"});
  }
}

TEST(FirstFailure, OnSeveralHostsTheEarliestOfEqualEndsIsFirstAfterAWhile) {
  FirstFailure f(true);
  f.add(exited(3, 1), false, start);
  f.add(exited(0, 4), false, start + milliseconds(10));
  f.decide(true, false, start + milliseconds(1000));
  ASSERT_TRUE(f.is_known());
  EXPECT_EQ(f.take()->rank, 3);
  EXPECT_TRUE(f.is_reported(start + milliseconds(1000))) << "the others have had their time";
  EXPECT_EQ(f.take_later(), Lines{"rank 0 exited with 4 after that"});
}

TEST(FirstFailure, ItIsDecidedAtOnceIfNoRankRuns) {
  FirstFailure f(true);
  f.add(exited(3, 1), false, start);
  f.decide(false, false, start);
  EXPECT_TRUE(f.is_known());
}

TEST(FirstFailure, TheOthersHaveTimeToReport) {
  for (const auto& [end, time] : {std::pair(exited(0, 2), 3000), {exited(0, 7), 1000}, {killed(0, 9), 0}}) {
    FirstFailure f(false);
    EXPECT_FALSE(f.is_reported(start));
    f.add(end, false, start);
    EXPECT_EQ(f.next(), start + milliseconds(time));
    EXPECT_EQ(f.is_reported(start + milliseconds(time - 1)), false);
    EXPECT_TRUE(f.is_reported(start + milliseconds(time)));
  }
}

TEST(FirstFailure, EndsOfAGroupThatIsBeingEndedAreNotTheFirst) {
  FirstFailure f(true);
  f.add(killed(0, SIGKILL), true, start);
  f.decide(false, true, start);
  EXPECT_FALSE(f.is_known());
  EXPECT_EQ(f.take_later(), Lines{});
}

TEST(FirstFailure, RanksThatRzrunHasEndedAreNoNews) {
  FirstFailure f(false);
  f.add(exited(0, 3), false, start);
  for (const RankEnd& end : {killed(1, SIGTERM), killed(2, SIGKILL), exited(3, 3)}) f.add(end, true, start);
  EXPECT_EQ(f.take_later(), Lines{});
  f.add(lost(4, "b"), true, start);
  EXPECT_EQ(f.take_later(), Lines{"host b is lost: no sign of it after that"});
}

TEST(FirstFailure, TheStoryIsThatOfTheBlamedRank) {
  FirstFailure f(false);
  EXPECT_EQ(f.story(2), "");
  RankEnd first = exited(0, 1), second = exited(1, 3);
  first.error = "rank 1 is gone";
  first.culprit = 1;
  second.error = "no such\nfile";
  f.add(first, false, start);
  EXPECT_EQ(f.story(2), "rank 0 of 2 exited with 1: rank 1 is gone");
  f.add(second, true, start);
  EXPECT_EQ(f.story(2), "rank 1 of 2 exited with 3: no such file");
  EXPECT_TRUE(f.has_story());
  f.begin();
  EXPECT_EQ(f.story(2), "");
  EXPECT_FALSE(f.is_known());
}

TEST(FirstFailure, TheLineIsRepeatedOnlyIfItHasMoreOrOtherLinesFollowed) {
  FirstFailure alone(true);
  alone.add(lost(2, "b"), false, start);
  EXPECT_FALSE(alone.has_story());
  alone.add(exited(0, 1), true, start);
  EXPECT_TRUE(alone.has_story());
  EXPECT_EQ(alone.story(4), "host b is lost: no sign of it");
}

}  // namespace
}  // namespace rz::rzrun
