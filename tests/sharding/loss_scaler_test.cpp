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
    EXPECT_EQ(e.code(), Errc::unsupported);
    EXPECT_NE(std::string(e.what()).find("min_loss_scale"), std::string::npos) << e.what();
  }
}

}  // namespace
}  // namespace rz
