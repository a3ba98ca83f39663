// Rates and momenta of torch's schedules, by their names in a configuration: tests/data/lr_schedules has what
// torch 2.15 sets. torch multiplies the last rate by a factor per step, so its rounding differs.

#include <gtest/gtest.h>

#include <cmath>
#include <nlohmann/json.hpp>
#include <set>

#include "comm/core/error.h"
#include "sharding/config/ds_config.h"
#include "sharding/engine/loop/training_step.h"
#include "sharding/io/json.h"
#include "sharding/optim/optimizers.h"
#include "tests/support/error_of.h"

namespace rz {
namespace {

using nlohmann::json;

LrSchedule schedule_of(const json& type, const json& params) {
  return parse_ds_config(json{{"scheduler", {{"type", type}, {"params", params}}}}.dump(), "ds.json")
      .schedule;
}

std::unique_ptr<Optimizer> optimizer_of(const std::string& kind, const std::vector<double>& rates) {
  if (kind == "betas")
    return make_adamw(ParameterGroups<AdamOptions>(
        {{"a", is_matrix, {.learning_rate = rates[0]}}, {"b", {}, {.learning_rate = rates[1]}}}));
  return make_sgd(ParameterGroups<SgdOptions>({{"a", is_matrix, {.learning_rate = rates[0], .momentum = 0.9}},
                                               {"b", {}, {.learning_rate = rates[1], .momentum = 0.9}}}));
}

/// What a description of the optimizer has behind "beta1 " or "momentum " of group g.
double momentum_of(const Optimizer& optimizer, const std::string& kind, int group) {
  const std::string text = optimizer.describe(), word = kind == "betas" ? "beta1 " : "momentum ";
  std::size_t at = 0;
  for (int g = 0; g <= group; ++g) at = text.find(word, at) + word.size();
  return std::stod(text.substr(at));
}

TEST(TorchSchedules, SetTheRatesAndMomentaOfTorch) {
  const std::string file = RZ_SOURCE_DIR "/tests/data/lr_schedules/schedules.json";
  const json data = parse_json(read_text_file(file), file, JsonDialect::strict);
  const auto base = data["base_rates"].get<std::vector<double>>();
  std::set<std::string> types;
  for (const json& run : data["runs"]) {
    SCOPED_TRACE(concat(run["type"].dump(), " ", run["params"].dump()));
    types.insert(run["type"].get<std::string>());
    const auto kind = run["optimizer"].get<std::string>();
    const auto optimizer = optimizer_of(kind, base);
    ScheduledRates rates(schedule_of(run["type"], run["params"]), *optimizer);
    for (std::size_t s = 0; s < run["rows"].size(); ++s) {
      const auto row = run["rows"][s].get<std::vector<double>>();
      if (run.contains("metrics")) {
        rates.step(run["metrics"][s].get<double>(), *optimizer);
        for (int g = 0; g < 2; ++g)
          EXPECT_EQ(optimizer->learning_rate(g), row[static_cast<std::size_t>(g)]) << "step " << s;
        continue;
      }
      rates.apply(static_cast<std::int64_t>(s), *optimizer);
      for (std::size_t g = 0; g < 2; ++g)
        EXPECT_NEAR(optimizer->learning_rate(static_cast<int>(g)), row[g], 1e-12 * base[g]) << "step " << s;
      for (std::size_t g = 2; g < row.size(); ++g)
        EXPECT_NEAR(momentum_of(*optimizer, kind, static_cast<int>(g) - 2), row[g], 1e-14) << "step " << s;
    }
  }
  EXPECT_EQ(types, (std::set<std::string>{"StepLR", "MultiStepLR", "ConstantLR", "LinearLR", "ExponentialLR",
                                          "PolynomialLR", "CosineAnnealingLR", "CosineAnnealingWarmRestarts",
                                          "OneCycleLR", "ReduceLROnPlateau"}));
}

/// torch throws.
TEST(TorchSchedules, AOneCycleKeepsItsLastRate) {
  const LrSchedule cycle = OneCycleLr{.max_lr = 0.1, .total_steps = 10};
  EXPECT_NEAR(learning_rate(cycle, 9, {}), 0.1 / 25 / 1e4, 1e-18);
  EXPECT_EQ(learning_rate(cycle, 10, {}), learning_rate(cycle, 9, {}));
  EXPECT_EQ(learning_rate(cycle, 1000, {}), learning_rate(cycle, 9, {}));
}

TEST(TorchSchedules, APhaseWithoutStepsEndsAtOnce) {
  const LrSchedule cycle = OneCycleLr{.max_lr = 0.1, .total_steps = 10, .pct_start = 0.1};
  EXPECT_EQ(learning_rate(cycle, 0, {}), 0.1);
}

TEST(TorchSchedules, AMomentumNeedsAnOptimizerWithOne) {
  const LrSchedule cycle = OneCycleLr{.max_lr = 0.1, .total_steps = 10};
  const auto refusal = [&](const LrSchedule& s, const Optimizer& o) {
    return std::string(test::error_of([&] { check(s, o); }).what());
  };
  check(cycle, *make_sgd({.momentum = 0.9}));
  check(cycle, *make_adamw(AdamOptions{}));
  check(OneCycleLr{.max_lr = 0.1, .total_steps = 10, .cycle_momentum = false}, *make_sgd({}));
  EXPECT_EQ(refusal(cycle, *make_sgd({})),
            "OneCycleLR: cycle_momentum: sgd has neither betas nor a momentum above 0; set one, or "
            "cycle_momentum to false");
  EXPECT_NE(refusal(cycle, *make_adagrad(AdagradOptions{})).find("adagrad has neither"), std::string::npos);
  EXPECT_NE(refusal(OneCycleLr{.max_lr = 0.1, .total_steps = 10, .base_momentum = 0.0},
                    *make_sgd({.momentum = 0.9}))
                .find("must be above 0 for sgd"),
            std::string::npos);
}

TEST(TorchSchedules, AMetricThatIsNoNumberDoesNotImprove) {
  PlateauState state;
  std::vector<double> rates{1};
  const ReduceLrOnPlateau plateau{.factor = 0.5, .patience = 0};
  for (const double metric : {2.0, 1.0, std::nan(""), 0.5}) step(plateau, metric, state, rates);
  EXPECT_EQ(rates[0], 0.5);
  EXPECT_EQ(state.best, 0.5);
}

TEST(TorchSchedules, AKeyThatIsMissingOrOutOfRangeIsNamed) {
  const auto refusal = [](const char* type, const json& params) {
    return std::string(test::error_of([&] { check(schedule_of(type, params)); }).what());
  };
  const auto contains = [](const std::string& text, const char* part) {
    EXPECT_NE(text.find(part), std::string::npos) << text;
  };
  contains(refusal("StepLR", json::object()), "ds.json: scheduler.params.step_size: missing");
  contains(refusal("StepLR", {{"step_size", 0}}), "step_size: must be from 1");
  contains(refusal("MultiStepLR", json::object()), "milestones: missing");
  contains(refusal("MultiStepLR", {{"milestones", {1, 2.5}}}), "expected a list of whole numbers");
  contains(refusal("ExponentialLR", json::object()), "gamma: missing");
  contains(refusal("LinearLR", {{"start_factor", 0}}), "start_factor: must be from");
  contains(refusal("LinearLR", {{"end_factor", 1.5}}), "end_factor: must be from 0 to 1");
  contains(refusal("OneCycleLR", {{"max_lr", 1}}), "total_steps: missing; give it, or both epochs");
  contains(refusal("OneCycleLR", {{"max_lr", 1}, {"total_steps", 5}, {"max_momentum", 1}}),
           "max_momentum is 1, expected less than 1");
  contains(refusal("ReduceLROnPlateau", {{"factor", 1}}), "factor is 1, expected less than 1");
  contains(refusal("ReduceLROnPlateau", {{"mode", "lowest"}}), "choose min or max");
  contains(refusal("StepLR", {{"step_size", 2}, {"last_epoch", 5}}), "last_epoch: not supported");
  contains(refusal("CyclicLR", json::object()), "not supported in this build yet: CyclicLR; choose one of");
}

TEST(TorchSchedules, AutoIsTheNumberOfUpdates) {
  const auto parse = [](const json& scheduler) {
    return parse_ds_config(json{{"train_batch_size", 8}, {"scheduler", scheduler}}.dump(), "ds.json", {},
                           {.updates = [](const BatchSizes&) { return std::int64_t{70}; }})
        .schedule;
  };
  EXPECT_EQ(parse({{"type", "OneCycleLR"}, {"params", {{"max_lr", 1}, {"total_steps", "auto"}}}}),
            LrSchedule(OneCycleLr{.max_lr = 1.0, .total_steps = 70}));
  EXPECT_EQ(parse({{"type", "CosineAnnealingLR"}, {"params", {{"T_max", "auto"}}}}),
            LrSchedule(CosineAnnealingLr{.t_max = 70}));
  EXPECT_EQ(parse({{"type", "PolynomialLR"}, {"params", {{"total_iters", "auto"}}}}),
            LrSchedule(PolynomialLr{.total_iters = 70}));
  EXPECT_EQ(parse({{"type", "PolynomialLR"}}), LrSchedule(PolynomialLr{}));
}

}  // namespace
}  // namespace rz
