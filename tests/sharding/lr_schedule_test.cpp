// Expected rates are those of DeepSpeed 0.19: `lr` of its runs in ../shared/fixtures/deepspeed, or what its
// scheduler objects set. They are compared bit for bit.

#include "sharding/config/lr_schedule.h"

#include <gtest/gtest.h>

#include <cmath>
#include <numbers>

#include "comm/core/error.h"
#include "tests/lab/training.h"
#include "tests/support/error_of.h"

namespace rz {
namespace {

using Rates = std::vector<double>;

Rates rates(const LrSchedule& schedule, std::size_t steps, const ScheduledGroup& group = {.base_lr = 1e-3}) {
  check(schedule, group.index + 1);
  Rates out;
  for (std::size_t s = 0; s < steps; ++s)
    out.push_back(learning_rate(schedule, static_cast<std::int64_t>(s), group));
  return out;
}

Rates betas(const LrSchedule& schedule, std::size_t steps) {
  Rates out;
  for (std::size_t s = 0; s < steps; ++s) {
    const auto both = scheduled_betas(schedule, static_cast<std::int64_t>(s));
    EXPECT_EQ(both->at(1), 0.99);
    out.push_back(both->at(0));
  }
  return out;
}

void expect_rates(const LrSchedule& schedule, const Rates& expected,
                  const ScheduledGroup& group = {.base_lr = 1e-3}) {
  const Rates found = rates(schedule, expected.size(), group);
  for (std::size_t s = 0; s < expected.size(); ++s) EXPECT_EQ(found[s], expected[s]) << "step " << s;
}

TEST(LrSchedule, WarmupIsDeepSpeedsRun) {
  expect_rates(
      WarmupLr{.min_lr = 1e-5, .max_lr = 0.001, .num_steps = 8},
      {1e-05, 1e-05, 0.0003400000000000001, 0.0005330376252379817, 0.0006700000000000001,
       0.0007762362713128295, 0.0008630376252379816, 0.0009364271242790094, 0.001, 0.001, 0.001, 0.001});
}

TEST(LrSchedule, WarmupThenLinearDecayIsDeepSpeedsRun) {
  expect_rates(WarmupDecayLr{.total_num_steps = 18, .num_steps = 6, .type = WarmupType::linear},
               {0.0,
                0.0,
                0.00016666666666666666,
                0.0003333333333333333,
                0.0005,
                0.0006666666666666666,
                0.0008333333333333334,
                0.001,
                0.0009166666666666666,
                0.0008333333333333334,
                0.00075,
                0.0006666666666666666,
                0.0005833333333333334,
                0.0005,
                0.0004166666666666667,
                0.0003333333333333333,
                0.00025,
                0.00016666666666666666,
                8.333333333333333e-05,
                0.0,
                0.0,
                0.0});
}

TEST(LrSchedule, WarmupThenCosineIsDeepSpeedsRun) {
  expect_rates(
      WarmupCosineLr{.total_num_steps = 16, .warmup_min_ratio = 0.05, .num_steps = 4, .cos_min_ratio = 0.1},
      {0.0, 5e-05, 0.0005250000000000001, 0.0008028571878425493, 0.001, 0.0009846666218300806,
       0.0009397114317029974, 0.0008681980515339464, 0.0007750000000000001, 0.0006664685702961343, 0.00055,
       0.0004335314297038656, 0.00032500000000000015, 0.00023180194846605365, 0.00016028856829700258,
       0.00011533337816991932, 0.0001, 0.0001});
}

TEST(LrSchedule, OneCycleIsDeepSpeedsRun) {
  expect_rates(OneCycle{.min_lr = 0.0001,
                        .max_lr = 0.001,
                        .decay_lr_rate = 0.2,
                        .first_step_size = 5,
                        .second_step_size = 7,
                        .decay_step_size = 3,
                        .cycle_momentum = false},
               {0.0001,
                0.0002799999999999998,
                0.0004600000000000001,
                0.00064,
                0.0008199999999999999,
                0.001,
                0.0008714285714285715,
                0.0007428571428571427,
                0.0006142857142857146,
                0.0004857142857142857,
                0.0003571428571428569,
                0.00022857142857142884,
                0.0001,
                9.375e-05,
                8.823529411764706e-05,
                8.333333333333334e-05,
                7.894736842105263e-05,
                7.5e-05,
                7.142857142857143e-05,
                6.818181818181818e-05,
                6.521739130434783e-05,
                6.25e-05,
                6e-05,
                5.769230769230769e-05});
}

TEST(LrSchedule, TheRangeTestIsDeepSpeedsRun) {
  expect_rates(LrRangeTest{.min_lr = 0.0001, .step_size = 4, .step_rate = 1.5},
               {0.0001, 0.0001375, 0.000175, 0.00021250000000000002, 0.00025, 0.0002875,
                0.00032500000000000004, 0.00036250000000000003, 0.0004, 0.0004375, 0.000475, 0.0005125});
}

TEST(LrSchedule, AWarmupWithoutMaximumRisesToTheRateOfEachGroup) {
  const LrSchedule schedule = WarmupLr{.num_steps = 4};
  expect_rates(schedule, {0, 0, 0.001, 0.0015849625007211563, 0.002, 0.002}, {.base_lr = 0.002});
  expect_rates(schedule, {0, 0, 0.015, 0.023774437510817342, 0.03, 0.03}, {.base_lr = 0.03, .index = 1});
}

/// DeepSpeed takes the logarithm of max(2, n).
TEST(LrSchedule, AWarmupOfNoUpdatesIsOneOfTwo) {
  const auto same = [](LrSchedule none, LrSchedule one, LrSchedule two) {
    EXPECT_EQ(rates(none, 8), rates(two, 8));
    EXPECT_EQ(rates(one, 8), rates(two, 8));
  };
  for (const WarmupType type : {WarmupType::log, WarmupType::linear}) {
    same(WarmupLr{.num_steps = 0, .type = type}, WarmupLr{.num_steps = 1, .type = type},
         WarmupLr{.num_steps = 2, .type = type});
    same(WarmupDecayLr{.total_num_steps = 6, .num_steps = 0, .type = type},
         WarmupDecayLr{.total_num_steps = 6, .num_steps = 1, .type = type},
         WarmupDecayLr{.total_num_steps = 6, .num_steps = 2, .type = type});
    same(WarmupCosineLr{.total_num_steps = 6, .num_steps = 0, .type = type},
         WarmupCosineLr{.total_num_steps = 6, .num_steps = 1, .type = type},
         WarmupCosineLr{.total_num_steps = 6, .num_steps = 2, .type = type});
  }
  expect_rates(WarmupLr{.num_steps = 0}, {0, 0, 1e-3, 1e-3});
}

TEST(LrSchedule, WarmupsOfOtherShapesAreDeepSpeeds) {
  expect_rates(WarmupLr{.min_lr = 0.0001, .max_lr = 0.0007, .num_steps = 5, .type = WarmupType::linear},
               {0.0001, 0.0001, 0.00021999999999999998, 0.00033999999999999997, 0.00045999999999999996,
                0.00058, 0.0007});
  expect_rates(WarmupLr{.max_lr = 0.001, .num_steps = 1}, {0, 0, 0.001, 0.001});
  expect_rates(WarmupLr{.min_lr = {0.1, 0.2}, .max_lr = {{0.5, 0.9}}, .num_steps = 3},
               {0.2, 0.2, 0.6416508275000201, 0.8999999999999999, 0.8999999999999999}, {.index = 1});
  expect_rates(WarmupDecayLr{.total_num_steps = 11, .min_lr = 1e-5, .max_lr = 0.003, .num_steps = 5},
               {1e-05, 1e-05, 0.0012977229086394452, 0.0020509925215130963, 0.0025854458172788904, 0.003,
                0.003, 0.002501666666666667, 0.002003333333333333, 0.001505, 0.0010066666666666666,
                0.0005083333333333333, 1e-05, 1e-05});
  expect_rates(WarmupCosineLr{.total_num_steps = 10, .num_steps = 3, .type = WarmupType::linear},
               {0.0, 0.0, 0.003333333333333333, 0.006666666666666666, 0.009504893855078144,
                0.008117637264392739, 0.006112993409314593, 0.0038880065906854067, 0.001883362735607262,
                0.000496106144921856, 1.0000000000000002e-06, 1.0000000000000002e-06},
               {.base_lr = 0.01});
  expect_rates(WarmupCosineLr{.total_num_steps = 3, .num_steps = 3, .cos_min_ratio = 0.2},
               {0.0, 0.0, 0.0063092975357145736, 0.01, 0.002, 0.002}, {.base_lr = 0.01});
}

TEST(LrSchedule, OneCycleMovesMomentumTheOppositeWay) {
  const LrSchedule cycle = OneCycle{.min_lr = 0.01,
                                    .max_lr = 0.1,
                                    .decay_lr_rate = 0.3,
                                    .first_step_size = 4,
                                    .second_step_size = 3,
                                    .decay_step_size = 2,
                                    .decay_momentum_rate = 0.05};
  expect_rates(cycle, {0.01, 0.032499999999999994, 0.054999999999999986, 0.07750000000000001, 0.1,
                       0.06999999999999998, 0.03999999999999999, 0.01, 0.008695652173913044,
                       0.007692307692307692, 0.006896551724137932, 0.0062499999999999995});
  EXPECT_EQ(betas(cycle, 12),
            (Rates{0.8, 0.875, 0.8500000000000001, 0.8250000000000001, 0.8, 0.8333333333333334,
                   0.8666666666666667, 0.9, 0.9225, 0.9450000000000001, 0.9675, 0.9900000000000001}));
  EXPECT_FALSE(scheduled_betas(OneCycle{.cycle_momentum = false}, 3));
  EXPECT_FALSE(scheduled_betas(WarmupLr{}, 3));
}

TEST(LrSchedule, OneCycleMayMoveInStairs) {
  const LrSchedule cycle = OneCycle{.min_lr = 0.01,
                                    .max_lr = 0.1,
                                    .first_step_size = 7,
                                    .second_step_size = 9,
                                    .first_stair_count = 3,
                                    .second_stair_count = 4,
                                    .min_momentum = 0.85,
                                    .max_momentum = 0.95};
  expect_rates(cycle, {0.01,
                       0.01,
                       0.01,
                       0.04,
                       0.04,
                       0.07,
                       0.07,
                       0.1,
                       0.0775,
                       0.0775,
                       0.05500000000000001,
                       0.05500000000000001,
                       0.0325,
                       0.0325,
                       0.01,
                       0.01,
                       0.01,
                       0.01,
                       0.01,
                       0.01});
  EXPECT_EQ(betas(cycle, 20), (Rates{0.85,
                                     0.95,
                                     0.95,
                                     0.9166666666666666,
                                     0.9166666666666666,
                                     0.8833333333333333,
                                     0.8833333333333333,
                                     0.85,
                                     0.875,
                                     0.875,
                                     0.8999999999999999,
                                     0.8999999999999999,
                                     0.9249999999999999,
                                     0.9249999999999999,
                                     0.95,
                                     0.95,
                                     0.95,
                                     0.95,
                                     0.95,
                                     0.95}));
}

TEST(LrSchedule, TheRangeTestMayMoveInStairs) {
  expect_rates(LrRangeTest{.min_lr = 0.0003, .step_size = 3, .step_rate = 0.7, .staircase = true},
               {0.0003, 0.0003, 0.0003, 0.0005099999999999999, 0.0005099999999999999, 0.0005099999999999999,
                0.0007199999999999999, 0.0007199999999999999, 0.0007199999999999999, 0.0009299999999999998});
  expect_rates(LrRangeTest{.min_lr = {0.0003, 0.01}, .step_size = 3, .step_rate = 0.7},
               {0.01, 0.012333333333333335, 0.014666666666666666}, {.index = 1});
}

TEST(LrSchedule, CosineAnnealingIsTorchs) {
  const CosineAnnealingLr schedule{.t_max = 10, .eta_min = 1e-6};
  // torch's scheduler multiplies the last rate by a factor per step.
  double last = 2e-4;
  for (int step = 1; step <= 10; ++step) {
    last = (1 + std::cos(std::numbers::pi * step / 10)) / (1 + std::cos(std::numbers::pi * (step - 1) / 10)) *
               (last - 1e-6) +
           1e-6;
    EXPECT_NEAR(learning_rate(schedule, step, {.base_lr = 2e-4}), last, 1e-18) << step;
  }
  const auto at = [&](std::int64_t step) { return learning_rate(schedule, step, {.base_lr = 2e-4}); };
  EXPECT_EQ(at(0), 2e-4);
  EXPECT_EQ(at(10), 1e-6);
  EXPECT_NEAR(at(20), 2e-4, 1e-18) << "rises again after t_max";
}

TEST(LrSchedule, AConstantRateIsThatOfTheGroup) {
  expect_rates(ConstantLr{}, {3e-4, 3e-4, 3e-4}, {.base_lr = 3e-4});
}

TEST(LrSchedule, NamesAreThoseOfConfigurations) {
  EXPECT_STREQ(name(LrSchedule(WarmupDecayLr{})), "WarmupDecayLR");
  EXPECT_STREQ(name(LrSchedule(CosineAnnealingLr{})), "CosineAnnealingLR");
  EXPECT_STREQ(name(WarmupType::linear), "linear");
}

TEST(LrSchedule, AFieldOutOfRangeIsNamed) {
  const auto refused = [](const LrSchedule& schedule, const char* part, std::size_t groups = 1) {
    const Error e = test::error_of([&] { check(schedule, groups); });
    EXPECT_EQ(e.code(), Errc::invalid_argument);
    EXPECT_NE(std::string(e.what()).find(part), std::string::npos) << e.what();
  };
  refused(WarmupLr{.num_steps = -1}, "WarmupLR: warmup_num_steps is -1, expected at least 0");
  refused(StepLr{}, "StepLR: step_size is 0, expected at least 1");
  refused(LinearLr{.end_factor = 2}, "LinearLR: end_factor is 2, expected from 0 to 1");
  refused(WarmupDecayLr{}, "total_num_steps is 0");
  refused(OneCycle{.first_step_size = 0}, "cycle_first_step_size is 0, expected more than 0");
  refused(OneCycle{.second_step_size = -1}, "cycle_second_step_size is -1");
  refused(LrRangeTest{.step_size = 0}, "lr_range_test_step_size");
  refused(WarmupCosineLr{.total_num_steps = 5, .cos_min_ratio = NAN}, "cos_min_ratio");
  refused(WarmupLr{.min_lr = {0.1, 0.2}}, "warmup_min_lr has 2 values for 3 parameter groups", 3);
  check(WarmupLr{.min_lr = {0.1, 0.2, 0.3}}, 3);
}

// ---- of engines

using lab::options;
using lab::Trainer;

TEST(SchedulesOfAnEngine, ASchedulePerEpochAdvancesWithEpochs) {
  lab::world(1, [](World& world) {
    EngineOptions o = options(lab::config(0));
    o.lr_schedule = CosineAnnealingLr{.t_max = 4, .eta_min = 0};
    o.schedule_unit = ScheduleUnit::epoch;
    Trainer t(world, std::move(o));
    std::vector<double> rates;
    for (int epoch = 0; epoch < 3; ++epoch) {
      for (int u = 0; u < 2; ++u) rates.push_back(t.update().lr);
      t.engine.end_epoch();
    }
    EXPECT_EQ(rates[0], rates[1]);
    EXPECT_EQ(rates[2], rates[3]);
    EXPECT_EQ(rates[0], 0.02);
    EXPECT_NEAR(rates[4], 0.01, 1e-12);
  });
}

/// Beta 1 moves from 0.9 to 0.8 and back while the rate goes up and down, as by hand with the same betas.
TEST(SchedulesOfAnEngine, OneCycleMovesTheBetasOfAdam) {
  lab::world(1, [](World& world) {
    const OneCycle schedule{.min_lr = 1e-3, .max_lr = 1e-2, .first_step_size = 3};
    const auto run = [&](const std::optional<OneCycle>& own) {
      EngineOptions o = options(R"({"train_micro_batch_size_per_gpu": 4, "optimizer": {"type": "Adam"}})");
      if (own) o.lr_schedule = *own;
      Trainer t(world, std::move(o));
      for (std::int64_t u = 0; u < 6; ++u) {
        if (!own) {
          t.engine.optimizer().set_learning_rate(learning_rate(schedule, u, {.base_lr = 1e-3}));
          t.engine.optimizer().set_betas(0, scheduled_betas(schedule, u).value());
        }
        t.update();
      }
      return lab::values_of(t.engine, t.net);
    };
    const std::vector<float> by_hand = run(std::nullopt);
    EXPECT_EQ(run(schedule), by_hand);
    OneCycle rates_only = schedule;
    rates_only.cycle_momentum = false;
    EXPECT_NE(run(rates_only), by_hand);
  });
}

TEST(SchedulesOfAnEngine, OnlyAPlateauTakesAMetricAndOnlyBetweenUpdates) {
  lab::world(1, [](World& world) {
    Trainer t(world, options(lab::config(0)));
    EXPECT_EQ(std::string(test::error_of([&] { t.engine.lr_scheduler_step(1); }).what()),
              "lr_scheduler_step(): the schedule is WarmupDecayLR, which counts updates by itself; only "
              "ReduceLROnPlateau takes a metric");
    EngineOptions o = options(R"({"train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 2,
        "optimizer": {"type": "Adam", "params": {"lr": 0.5}}})");
    o.lr_schedule = ReduceLrOnPlateau{.factor = 0.5, .patience = 0};
    Trainer other(world, std::move(o));
    Engine& plateau = other.engine;
    for (const double metric : {1.0, 2.0}) plateau.lr_scheduler_step(metric);
    EXPECT_EQ(plateau.optimizer().learning_rate(), 0.25);
    EXPECT_FALSE(other.pass());
    EXPECT_NE(std::string(test::error_of([&] { plateau.lr_scheduler_step(3); }).what()).find("in the middle"),
              std::string::npos);
    EXPECT_EQ(plateau.optimizer().learning_rate(), 0.25);
    plateau.cancel_update();
  });
}

TEST(SchedulesOfAnEngine, BetasOfAnOptimizerWithoutThemAreAnError) {
  const auto sgd = make_sgd({});
  EXPECT_FALSE(sgd->has_betas(0));
  EXPECT_EQ(test::error_of([&] { sgd->set_betas(0, {0.9, 0.99}); }).code(), Errc::unsupported);
  const auto adam = make_adam(AdamOptions{});
  EXPECT_TRUE(adam->has_betas(0));
  EXPECT_EQ(test::error_of([&] { adam->set_betas(0, {1, 0.99}); }).code(), Errc::invalid_argument);
}

TEST(SchedulesOfAnEngine, RatesSetByHandStayWithoutASchedule) {
  lab::world(1, [](World& world) {
    Trainer t(world, options(R"({"train_micro_batch_size_per_gpu": 4,
        "optimizer": {"type": "SGD", "params": {"lr": 0.5}}})"));
    EXPECT_EQ(t.update().lr, 0.5);
    t.engine.optimizer().set_learning_rate(0.125);
    EXPECT_EQ(t.update().lr, 0.125);
  });
}

TEST(SchedulesOfAnEngine, MaxStepsAreTheEndOfARunAndOfItsSchedule) {
  lab::world(1, [](World& world) {
    EngineOptions o = options(R"({"train_micro_batch_size_per_gpu": 4})");
    o.arguments.learning_rate = 0.5, o.arguments.lr_scheduler_type = "linear", o.arguments.warmup_steps = 2;
    o.arguments.max_steps = 5;
    Trainer t(world, std::move(o));
    while (!t.engine.should_stop()) t.pass();
    EXPECT_EQ(t.engine.global_steps(), 5);
    EXPECT_EQ(std::get<WarmupDecayLr>(t.engine.config().schedule).total_num_steps, 5);
  });
}

}  // namespace
}  // namespace rz
