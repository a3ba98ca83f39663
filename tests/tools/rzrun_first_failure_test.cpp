// Needs: rzrun_lib rz_bench rzrun all_reduce_perf sendrecv_perf

// Which end of a rank rzrun takes for the first failure: without processes, and with a clock of the test.

#include <gtest/gtest.h>
#include <signal.h>

#include "comm/core/error.h"
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
  ASSERT_TRUE(f.take());
  EXPECT_FALSE(f.take()) << "once";
  EXPECT_EQ(f.line(4), "rank 2 of 4 exited with 5");
  EXPECT_EQ(f.later(), Lines{"rank 1 killed by SIGSEGV (Segmentation fault)"});
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
    EXPECT_EQ(f.later(), Lines{"rank 0 exited with 1"});
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
  EXPECT_EQ(f.later(), Lines{"rank 0 exited with 4"});
}

TEST(FirstFailure, ItIsDecidedAtOnceIfNoRankRuns) {
  FirstFailure f(true);
  f.add(exited(3, 1), false, start);
  f.decide(false, false, start);
  EXPECT_TRUE(f.is_known());
}

TEST(FirstFailure, TheOthersHaveTimeToReport) {
  for (const auto& [end, time] :
       {std::pair(exited(0, 2), 3000), {exited(0, 7), 1000}, {killed(0, 9), 1000}}) {
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
  EXPECT_EQ(f.later(), Lines{});
}

TEST(FirstFailure, RanksThatRzrunHasEndedAreNoNews) {
  FirstFailure f(false);
  f.add(exited(0, 3), false, start);
  for (const RankEnd& end : {killed(1, SIGTERM), killed(2, SIGKILL), exited(3, 3)}) f.add(end, true, start);
  EXPECT_EQ(f.later(), Lines{});
  f.add(lost(4, "b"), true, start);
  EXPECT_EQ(f.later(), Lines{"host b is lost: no sign of it"});
}

TEST(FirstFailure, TheStoryIsThatOfTheBlamedRank) {
  FirstFailure f(false);
  EXPECT_EQ(f.line(2), "");
  RankEnd first = exited(0, 1), second = exited(1, 3);
  first.error = "rank 1 is gone";
  first.culprit = 1;
  second.error = "no such\nfile";
  f.add(first, false, start);
  EXPECT_EQ(f.line(2), "rank 0 of 2 exited with 1: rank 1 is gone");
  f.add(second, true, start);
  EXPECT_EQ(f.line(2), "rank 1 of 2 exited with 3: no such file");
  f.begin();
  EXPECT_EQ(f.line(2), "");
  EXPECT_FALSE(f.is_known());
}

TEST(FirstFailure, ABlamedRankThatRzrunEndedIsNotTheCause) {
  FirstFailure f(false);
  RankEnd first = exited(0, 1);
  first.error = "timeout: rank 1 did not call it";
  first.culprit = 1;
  f.add(first, false, start);
  f.add(killed(1, SIGKILL), true, start);
  EXPECT_EQ(f.line(2), "rank 0 of 2 exited with 1: timeout: rank 1 did not call it");
}

TEST(FirstFailure, ABlamedRankThatWasStoppedOrLateIsTheHeadline) {
  for (const auto& [state, what] : {std::pair('T', "was stopped (state T, as by SIGSTOP)"),
                                    {'S', "held up others (state S, it slept)"},
                                    {'R', "held up others (state R, it ran)"}}) {
    FirstFailure f(true);
    RankEnd first = exited(0, 1), blamed = killed(2, SIGTERM), other = killed(3, SIGTERM);
    first.host = "a";
    first.error = "rank 0: timeout: rank 2 sends no reply";
    first.culprit = 2;
    blamed.host = other.host = "b";
    blamed.state = state;
    other.state = 'S';
    f.add(first, false, start);
    f.decide(false, false, start);
    f.add(other, true, start);
    f.add(blamed, true, start);
    EXPECT_EQ(f.line(4), concat("rank 2 of 4 on host b ", what,
                                "; rank 0 exited with 1: rank 0: timeout: rank 2 sends no reply"));
    EXPECT_EQ(f.later(), Lines{});
  }
}

TEST(FirstFailure, ABlamedRankThatFailsByItselfHasItsOwnReason) {
  FirstFailure f(false);
  RankEnd first = exited(0, 1), blamed = exited(1, 3);
  first.error = "rank 1 did not call it";
  first.culprit = 1;
  blamed.state = 'R';
  blamed.error = "no such file";
  f.add(first, false, start);
  f.add(blamed, true, start);
  EXPECT_EQ(f.line(2), "rank 1 of 2 exited with 3: no such file");
}

TEST(FirstFailure, ManyEndsAreOneLine) {
  FirstFailure f(true);
  f.add(lost(2, "b"), false, start);
  for (const int rank : {0, 1, 4, 5, 7}) f.add(exited(rank, 1), true, start);
  RankEnd other = exited(6, 3);
  other.host = "c";
  f.add(other, true, start);
  EXPECT_EQ(f.later(), (Lines{"ranks 0, 1, 4, 5, 7 exited with 1", "rank 6 on host c exited with 3"}));
  EXPECT_EQ(f.line(8), "host b is lost: no sign of it");
}

TEST(Ranks, AreListedWithRanges) {
  EXPECT_EQ(list_ranks({3}), "rank 3");
  EXPECT_EQ(list_ranks({5, 1, 0}), "ranks 0, 1, 5");
  EXPECT_EQ(list_ranks({0, 9, 3, 1, 2, 7, 8}), "ranks 0 to 3, 7 to 9");
}

// ---- what the other ranks waited for

constexpr const char* reduce = "all_reduce #204 (2 f32, sum) of 'world'";

/// Ended by rzrun in the call of a communicator of all ranks, whose last call has this number.
RankEnd in_call(int rank, const char* call = reduce, std::uint32_t number = 204) {
  RankEnd end = killed(rank, SIGTERM);
  end.call = call;
  end.group = "'world'";
  end.last_calls = {{"'world'", number}};
  return end;
}

RankEnd failed_after(int rank, std::uint32_t number) {
  RankEnd end = exited(rank, 1);
  end.last_calls = {{"'world'", number}};
  return end;
}

std::string waits_of(const RankEnd& first, const std::vector<RankEnd>& others) {
  FirstFailure f(false);
  f.add(first, false, start);
  for (const RankEnd& end : others) f.add(end, true, start);
  return f.waits();
}

TEST(FirstFailure, TheOthersWaitedForTheRankThatFailed) {
  const std::vector<RankEnd> others{in_call(1), in_call(3), in_call(2)};
  EXPECT_EQ(waits_of(failed_after(0, 203), others), concat("ranks 1 to 3 waited in ", reduce, " for rank 0"));
  EXPECT_EQ(waits_of(failed_after(0, 203), {in_call(2)}), concat("rank 2 waited in ", reduce, " for rank 0"));
  EXPECT_EQ(waits_of(failed_after(0, 204), others), concat("ranks 1 to 3 were in ", reduce))
      << "it was in the call";
  EXPECT_EQ(waits_of(exited(0, 1), others), concat("ranks 1 to 3 were in ", reduce)) << "nothing is known";
  EXPECT_EQ(waits_of(failed_after(0, 203), {}), "");
  EXPECT_EQ(waits_of(failed_after(0, 203), {killed(1, SIGTERM)}), "");
  EXPECT_EQ(waits_of(failed_after(0, 0xffffffff), {in_call(1, "barrier #0 of 'world'", 0)}),
            "rank 1 waited in barrier #0 of 'world' for rank 0")
      << "numbers begin again";
}

TEST(FirstFailure, ARankThatIsLateWithoutAFailureIsWaitedFor) {
  RankEnd late = killed(3, SIGTERM);
  late.last_calls = {{"'world'", 203}};
  EXPECT_EQ(waits_of(failed_after(0, 204), {in_call(1), late}),
            concat("rank 1 waited in ", reduce, " for rank 3"));
}

TEST(FirstFailure, GroupsOfRanksAreNotTakenForAll) {
  RankEnd a = in_call(1), b = in_call(2);
  a.group = b.group = "";
  EXPECT_EQ(waits_of(failed_after(0, 203), {a, b}), concat("ranks 1, 2 were in ", reduce));
  RankEnd twice = failed_after(0, 203);
  twice.last_calls.push_back(twice.last_calls.front());
  EXPECT_EQ(waits_of(twice, {in_call(1)}), concat("rank 1 was in ", reduce)) << "two of one name";
}

TEST(FirstFailure, ManyCallsAreOneLine) {
  EXPECT_EQ(waits_of(exited(0, 1), {in_call(1, "a"), in_call(2, "b"), in_call(3, "b"), in_call(4, "c"),
                                    in_call(5, "d"), in_call(6, "e")}),
            "ranks 2, 3 were in b; rank 1 was in a; rank 4 was in c; 2 more in other calls");
}

}  // namespace
}  // namespace rz::rzrun
