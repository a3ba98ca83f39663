#include "sharding/optim/loss_scaler.h"

#include <gtest/gtest.h>

#include <string>

#include "comm/core/error.h"

namespace rz {
namespace {

/// Scales after each of the updates that a text lists: 'o' an overflow, '.' none.
std::vector<double> scales(LossScaler scaler, const std::string& updates) {
  std::vector<double> out;
  for (const char u : updates) {
    scaler.update(u == 'o');
    out.push_back(scaler.scale());
  }
  return out;
}
using Scales = std::vector<double>;

TEST(LossScaler, StartsAtAPowerOfTwo) {
  EXPECT_EQ(LossScaler().scale(), 65536);
  EXPECT_EQ(LossScaler({.initial_power = 0}).scale(), 1);
}

TEST(LossScaler, AFixedScaleStays) {
  EXPECT_EQ(scales(LossScaler({.fixed = 128, .window = 1}), "oo.."), (Scales{128, 128, 128, 128}));
}

TEST(LossScaler, HalvesWhenHysteresisIsUsedUp) {
  EXPECT_EQ(scales(LossScaler({.initial_power = 4, .hysteresis = 2}), "ooo"), (Scales{16, 8, 4}));
  EXPECT_EQ(scales(LossScaler({.initial_power = 4, .hysteresis = 1}), "oo"), (Scales{8, 4}));
  // An update without an overflow restores the count only if that is configured.
  EXPECT_EQ(scales(LossScaler({.initial_power = 4, .hysteresis = 2}), "o.o"), (Scales{16, 16, 8}));
  EXPECT_EQ(scales(LossScaler({.initial_power = 4, .hysteresis = 2, .consecutive_hysteresis = true}), "o.o"),
            (Scales{16, 16, 16}));
}

TEST(LossScaler, DoublesAfterEachWindowWithoutOverflow) {
  // The first update counts as the one after an overflow: as in DeepSpeed, s = iteration - last - 1 > 0.
  EXPECT_EQ(scales(LossScaler({.initial_power = 2, .window = 2}), "....."), (Scales{4, 4, 8, 8, 16}));
  EXPECT_EQ(scales(LossScaler({.initial_power = 4, .window = 2, .hysteresis = 1}), "o..."),
            (Scales{8, 8, 8, 16}));
}

TEST(LossScaler, DoublingRefillsHysteresis) {
  EXPECT_EQ(scales(LossScaler({.initial_power = 4, .window = 1, .hysteresis = 2}), "o..o"),
            (Scales{16, 16, 32, 32}));
}

TEST(LossScaler, StopsAtTheMinimum) {
  LossScaler scaler({.initial_power = 1, .hysteresis = 1, .minimum = 1});
  scaler.update(true);
  EXPECT_EQ(scaler.scale(), 1);
  try {
    scaler.update(true);
    FAIL() << "no error";
  } catch (const Error& e) {
    EXPECT_EQ(e.code(), Errc::diverged);
    EXPECT_NE(std::string(e.what()).find("min_loss_scale"), std::string::npos) << e.what();
  }
}

/// The factor of DeepSpeed 0.19's DynamicLossScaler after each of 22 updates, by its rules: a count of 3 is
/// used up before the factor falls, and a window is counted from the update after an overflow.
TEST(LossScaler, FollowsDeepSpeedUpdateByUpdate) {
  const std::string updates = "ooo....o..oo.....o.ooo";
  EXPECT_EQ(scales(LossScaler({.initial_power = 6, .window = 3, .hysteresis = 3}), updates),
            (Scales{64, 64, 32, 32, 32, 32, 64, 64, 64, 64, 64, 32, 32, 32, 32, 64, 64, 64, 64, 64, 32, 16}));
  EXPECT_EQ(
      scales(LossScaler({.initial_power = 6, .window = 3, .hysteresis = 3, .consecutive_hysteresis = true}),
             updates),
      (Scales{64, 64, 32, 32, 32, 32, 64, 64, 64, 64, 64, 64, 64, 64, 64, 128, 128, 128, 128, 128, 128, 64}));
}

TEST(LossScaler, HalvingStopsAtAMinimumThatIsNoPowerOfTwo) {
  LossScaler scaler({.initial_power = 3, .hysteresis = 1, .minimum = 3});
  scaler.update(true), scaler.update(true);
  EXPECT_EQ(scaler.scale(), 3);
  EXPECT_THROW(scaler.update(true), Error);
}

constexpr LossScaleRule grad_scaler = LossScaleRule::grad_scaler;

TEST(LossScaler, FollowsGradScalerUpdateByUpdate) {
  EXPECT_EQ(
      scales(LossScaler({.initial_power = 3, .rule = grad_scaler, .growth_interval = 3}), "...o.o......"),
      (Scales{8, 8, 16, 8, 8, 4, 4, 4, 8, 8, 8, 16}));
  EXPECT_EQ(
      scales(
          LossScaler(
              {.initial_power = 2, .rule = grad_scaler, .growth = 3, .backoff = 0.25, .growth_interval = 2}),
          "..oo"),
      (Scales{4, 12, 3, 0.75}));
  const Scales all = scales(LossScaler({.rule = grad_scaler}), std::string(2000, '.'));
  EXPECT_EQ(all[1998], 65536);
  EXPECT_EQ(all[1999], 131072);
}

TEST(LossScaler, GradScalersFactorStaysFinite) {
  EXPECT_EQ(scales(LossScaler({.initial_power = 127, .rule = grad_scaler, .growth_interval = 1}), "."),
            (Scales{0x1p127}));
}

TEST(LossScaler, CountsSkippedUpdates) {
  for (const LossScaleOptions& o :
       {LossScaleOptions{}, LossScaleOptions{.fixed = 8}, LossScaleOptions{.rule = grad_scaler}}) {
    LossScaler scaler(o);
    for (const char u : std::string("o..oo.")) scaler.update(u == 'o');
    EXPECT_EQ(scaler.skipped(), 3);
    EXPECT_EQ(scaler.state().updates, 6);
  }
}

TEST(LossScaler, ContinuesFromItsState) {
  const std::string before = "o..o.", after = "..o...o";
  for (const LossScaleRule rule : {LossScaleRule::deepspeed, grad_scaler}) {
    const LossScaleOptions o{.initial_power = 6, .window = 2, .rule = rule, .growth_interval = 4};
    LossScaler whole(o), second(o);
    for (const char u : before) whole.update(u == 'o');
    second.set_state(whole.state());
    EXPECT_EQ(scales(second, after), scales(whole, after));
  }
}

TEST(LossScaler, OptionsOutOfRangeAreRefused) {
  EXPECT_THROW(LossScaler({.fixed = -1}), Error);
  EXPECT_THROW(LossScaler({.window = 0}), Error);
  EXPECT_THROW(LossScaler({.hysteresis = 0}), Error);
  EXPECT_THROW(LossScaler({.minimum = 0}), Error);
  EXPECT_THROW(LossScaler({.rule = grad_scaler, .growth = 1}), Error);
  EXPECT_THROW(LossScaler({.rule = grad_scaler, .backoff = 1}), Error);
}

}  // namespace
}  // namespace rz
