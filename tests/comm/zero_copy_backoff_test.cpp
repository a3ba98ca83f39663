// Runs: pure

// Backoff of the handle exchange, and the adaptive choice between staged and single copy.
#include "comm/intranode/zero_copy_backoff.h"

#include <gtest/gtest.h>

#include <chrono>
#include <utility>
#include <vector>

namespace rz {
namespace {

using namespace std::chrono_literals;

// ---- backoff

TEST(ZeroCopyBackoff, FailedProbesBackOffExponentially) {
  intranode::ZeroCopyBackoff backoff;
  std::vector<unsigned> rows;  // calls without an exchange, before each one with it
  for (unsigned row = 0; rows.size() < 8;) {
    if (backoff.should_probe()) {
      backoff.record(false, false);
      rows.push_back(std::exchange(row, 0));
    } else {
      ++row;
    }
  }
  EXPECT_EQ(rows, (std::vector<unsigned>{0, 1, 3, 7, 15, 31, 63, 63}));
}

TEST(ZeroCopyBackoff, ASuccessfulProbeResetsTheBackoff) {
  intranode::ZeroCopyBackoff backoff;
  for (int i = 0; i < 3; ++i) backoff.record(false, false);
  backoff.record(true, false);
  for (int i = 0; i < 100; ++i) {
    EXPECT_TRUE(backoff.should_probe()) << i;
    backoff.record(true, false);
  }
}

TEST(ZeroCopyBackoff, TheTunerStartsAfterTheFirstCalls) {
  intranode::ZeroCopyBackoff backoff;
  int calls = 0;
  for (; !backoff.tuner().enabled(); ++calls)
    if (backoff.should_probe()) backoff.record(false, true);
  EXPECT_EQ(calls, 1 + 2 + 4 + 8 + 16 + 32);
  EXPECT_TRUE(backoff.should_probe()) << "the first trial";
  backoff.record(false, true);
  EXPECT_TRUE(backoff.tuner().enabled()) << "as long as all may read";
  backoff.record(false, false);
  EXPECT_FALSE(backoff.tuner().enabled());
  EXPECT_FALSE(backoff.should_probe()) << "backed off, like those before";
}

// ---- adaptive choice

// One rank's calls, with a fixed duration of each algorithm; returns the final choice.
bool choice_after_calls(intranode::SingleCopyTuner& way, unsigned calls, std::chrono::nanoseconds once,
                        std::chrono::nanoseconds staged) {
  for (unsigned i = 0; i < calls; ++i) {
    way.begin_call();
    if (way.is_decision()) way.decide(way.own_times().single_copy_ns, way.own_times().staged_ns);
    if (way.is_sample()) way.record(way.uses_single_copy() ? once : staged);
  }
  return way.uses_single_copy();
}

TEST(SingleCopyTuner, SamplesBothAndPicksTheFaster) {
  intranode::SingleCopyTuner way;
  EXPECT_FALSE(way.enabled());
  way.enable();
  constexpr unsigned trials = intranode::SingleCopyTuner::samples;
  for (unsigned i = 0; i < 2 * trials + 4; ++i) {
    const bool tries_once = i < trials, chooses = i == 2 * trials;
    EXPECT_EQ(way.begin_call(), tries_once || i >= 2 * trials) << "exchanges handles, call " << i;
    EXPECT_EQ(way.is_decision(), chooses) << i;
    EXPECT_EQ(way.is_sample(), i < 2 * trials) << i;
    if (chooses) {
      EXPECT_EQ(way.own_times(), (intranode::SingleCopyTuner::Times{70, 100})) << "the least of each";
      way.decide(70, 100);
    }
    EXPECT_EQ(way.uses_single_copy(), tries_once || i >= 2 * trials) << i;
    if (way.is_sample()) way.record(i % trials == 1 ? (tries_once ? 70ns : 100ns) : 130ns);
  }
}

TEST(SingleCopyTuner, StaysStagedWithinTheHysteresis) {
  intranode::SingleCopyTuner way;
  way.enable();
  EXPECT_FALSE(choice_after_calls(way, 2 * intranode::SingleCopyTuner::samples + 1, 95ns, 100ns));
  for (unsigned i = 0; i < intranode::SingleCopyTuner::min_hold; ++i) {
    EXPECT_FALSE(way.begin_call()) << i;
    EXPECT_FALSE(way.is_sample());
  }
  EXPECT_TRUE(way.begin_call()) << "tries again";
  EXPECT_TRUE(way.is_sample());
}

TEST(SingleCopyTuner, FollowsAChangeWithinTheMaximumHold) {
  intranode::SingleCopyTuner way;
  way.enable();
  constexpr unsigned round =
      2 * intranode::SingleCopyTuner::samples + 1 + intranode::SingleCopyTuner::max_hold;
  EXPECT_FALSE(choice_after_calls(way, 10 * round, 200ns, 100ns));
  EXPECT_TRUE(choice_after_calls(way, 2 * round, 50ns, 100ns));
  EXPECT_FALSE(choice_after_calls(way, 2 * round, 200ns, 100ns));
}

TEST(SingleCopyTuner, SamplesAreRareOnceTheChoiceIsStable) {
  intranode::SingleCopyTuner way;
  way.enable();
  choice_after_calls(way, 5000, 200ns, 100ns);
  int trials = 0;
  for (int i = 0; i < 10'000; ++i) {
    way.begin_call();
    if (way.is_decision()) way.decide(200, 100);
    trials += way.is_sample() && way.uses_single_copy();
  }
  EXPECT_LT(trials, 50);
}

}  // namespace
}  // namespace rz
