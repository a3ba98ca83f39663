/// What decides on later updates besides parameters and the states of the optimizer: after every update of a
/// run it is saved, and a run that goes on from there reports and computes the same.
#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <functional>
#include <limits>
#include <string>
#include <vector>

#include "sharding/checkpoint/checkpoint_folder.h"
#include "sharding/engine/checkpoints/engine_state.h"
#include "sharding/engine/engine.h"
#include "sharding/strategy/strategy.h"
#include "tests/lab/training.h"
#include "tests/support/written_checkpoint.h"

namespace rz {
namespace {

constexpr std::size_t in = 3, classes = 5;
constexpr std::int64_t updates = 10;

struct Net : Module {
  Net() { register_buffer(count, "count", {2}, DType::i64); }
  nn::Linear body{*this, "body", in, 7}, head{*this, "head", 7, classes}, rare{*this, "rare", 7, classes};
  ModuleBuffer count;
};

/// What an update reports, and the values after it.
struct Seen {
  StepReport report;
  double loss = 0;
  std::vector<float> values;
  std::vector<std::int64_t> counted;
};

void expect_same(const Seen& a, const Seen& b) {
  EXPECT_EQ(a.report.step, b.report.step);
  EXPECT_EQ(a.report.lr, b.report.lr);
  EXPECT_EQ(a.report.loss_scale, b.report.loss_scale);
  EXPECT_EQ(a.report.samples, b.report.samples);
  EXPECT_EQ(a.report.skipped_steps, b.report.skipped_steps);
  EXPECT_EQ(a.report.skipped, b.report.skipped);
  EXPECT_TRUE(a.loss == b.loss || (std::isnan(a.loss) && std::isnan(b.loss))) << a.loss << ' ' << b.loss;
  EXPECT_EQ(a.values, b.values);
  EXPECT_EQ(a.counted, b.counted);
}

Seen seen(Engine& engine, Net& net) {
  Seen s{engine.report(), engine.loss(), lab::values_of(engine, net), {}};
  const auto* counts = net.count.value.data<std::int64_t>();
  s.counted = {counts, counts + net.count.value.count()};
  return s;
}

/// Different for every update and rank.
Tensor inputs(const Engine& engine, std::int64_t update, std::size_t rows) {
  Tensor x = Tensor::empty({rows, in});
  for (std::size_t i = 0; i < x.count(); ++i)
    x.data<float>()[i] =
        static_cast<float>(random_uniform(static_cast<std::uint64_t>(7 + engine.world().rank()), "x",
                                          static_cast<std::uint64_t>(update) * 100 + i) -
                           0.5);
  return x;
}

nn::Loss loss_of(Engine& engine, nn::Linear& head, Net& net, const Tensor& x) {
  Tensor y = Tensor::empty({x.shape()[0]}, DType::i32);
  for (std::size_t i = 0; i < y.count(); ++i)
    y.data<std::int32_t>()[i] = static_cast<std::int32_t>(i % classes);
  Tape& t = engine.tape();
  return nn::cross_entropy(t, head(t, nn::gelu(t, net.body(t, x))), y);
}

struct Scenario {
  std::string config;  ///< keys, each with a comma before it
  std::function<void(EngineOptions&)> options = {};
  /// Update number u.
  std::function<void(Engine&, Net&, std::int64_t)> update = [](Engine& engine, Net& net, std::int64_t u) {
    engine.backward(loss_of(engine, net.head, net, inputs(engine, u, 4)));
    engine.step();
  };
};

/// From the checkpoint `tag` of a folder, or from the start; what each update of each rank shows. Saves after
/// every update if it starts.
std::vector<std::vector<Seen>> run(const Scenario& scenario, int stage, const std::string& dir,
                                   const std::string& tag = "") {
  std::vector<std::vector<Seen>> all(2);
  lab::world(2, [&](World& world) {
    Net net;
    EngineOptions options{
        .config = concat(R"({"train_micro_batch_size_per_gpu": 4, "zero_optimization": {"stage": )", stage,
                         R"(, "stage3_param_persistence_threshold": 0})", scenario.config, "}"),
        .seed = 5,
        .log = nullptr};
    if (scenario.options) scenario.options(options);
    auto engine = initialize(world, net, std::move(options));
    if (!tag.empty()) {
      ASSERT_TRUE(engine.load_checkpoint(dir, {.tag = tag}));
    }
    for (std::int64_t u = engine.global_steps(); u < updates; ++u) {
      net.count.value.data<std::int64_t>()[1] += 10 + u;
      scenario.update(engine, net, u);
      all[static_cast<std::size_t>(world.rank())].push_back(seen(engine, net));
      if (tag.empty()) engine.save_checkpoint(dir);
    }
  });
  return all;
}

/// In ddp and zero3, from every update on. Returns what an uninterrupted run shows on rank 0.
std::vector<Seen> expect_resumable(const Scenario& scenario) {
  std::vector<Seen> shown;
  for (const int stage : {0, 3}) {
    const test::Folder folder;
    const auto whole = run(scenario, stage, folder.path());
    for (std::int64_t saved = 1; saved < updates; ++saved) {
      const auto part = run(scenario, stage, folder.path(), step_tag(saved));
      for (std::size_t rank = 0; rank < 2; ++rank) {
        EXPECT_EQ(part[rank].size(), static_cast<std::size_t>(updates - saved));
        for (std::size_t u = 0; u < part[rank].size(); ++u) {
          SCOPED_TRACE(concat("stage ", stage, ", rank ", rank, ", saved after ", saved, ", update ",
                              saved + static_cast<std::int64_t>(u)));
          expect_same(part[rank][u], whole[rank][static_cast<std::size_t>(saved) + u]);
        }
      }
    }
    shown = whole[0];
  }
  return shown;
}

constexpr const char* adamw = R"(, "optimizer": {"type": "AdamW", "params": {"lr": 0.02}})";

TEST(ResumedState, UpdatesThatAParameterMissed) {
  // Their number is in the bias correction of that parameter.
  const auto shown =
      expect_resumable({.config = adamw, .update = [](Engine& engine, Net& net, std::int64_t u) {
                          const Tensor x = inputs(engine, u, 4);
                          nn::Loss loss = loss_of(engine, net.head, net, x);
                          if (u >= 2 && u != 5) loss = 0.5 * loss + 0.5 * loss_of(engine, net.rare, net, x);
                          engine.backward(loss);
                          engine.step();
                        }});
  EXPECT_EQ(shown.size(), static_cast<std::size_t>(updates));
}

TEST(ResumedState, RatesThatALoopHasSet) {
  Scenario scenario{.config = adamw};
  const auto update = scenario.update;
  scenario.update = [update](Engine& engine, Net& net, std::int64_t u) {
    if (u == 2) engine.optimizer().set_learning_rate(0, 0.003);
    update(engine, net, u);
  };
  EXPECT_EQ(expect_resumable(scenario).back().report.lr, 0.003);
}

TEST(ResumedState, TheTermsThatTheFirstLossHad) {
  // Gradients are divided by that number, and then multiplied by its ratio to their own.
  expect_resumable({.config = adamw, .update = [](Engine& engine, Net& net, std::int64_t u) {
                      engine.backward(loss_of(engine, net.head, net, inputs(engine, u, u == 0 ? 3 : 5)));
                      engine.step();
                    }});
}

TEST(ResumedState, EpochsOfASchedule) {
  Scenario scenario{.config = adamw};
  scenario.options = [](EngineOptions& o) {
    o.lr_schedule = WarmupLr{.max_lr = 0.02, .num_steps = 5, .type = WarmupType::linear};
    o.schedule_unit = ScheduleUnit::epoch;
  };
  const auto update = scenario.update;
  scenario.update = [update](Engine& engine, Net& net, std::int64_t u) {
    update(engine, net, u);
    if (u % 2 == 1) engine.end_epoch();
  };
  const auto shown = expect_resumable(scenario);
  EXPECT_EQ(shown[2].report.lr, shown[3].report.lr);
  EXPECT_NE(shown[3].report.lr, shown[4].report.lr);
}

/// The metrics of the ranks differ; their mean counts. Every second update has one.
TEST(ResumedState, WhatAPlateauHasSeen) {
  Scenario scenario{
      .config = concat(adamw, R"(, "scheduler": {"type": "ReduceLROnPlateau", "params": {"patience": 1,)"
                              R"( "factor": 0.5, "cooldown": 1, "threshold": 0}})")};
  const auto update = scenario.update;
  scenario.update = [update](Engine& engine, Net& net, std::int64_t u) {
    update(engine, net, u);
    const double metric = u < 4 ? 4.0 - static_cast<double>(u) : 3;
    engine.lr_scheduler_step(metric + (engine.world().rank() == 0 ? 0.25 : -0.25));
  };
  std::vector<double> rates;
  for (const Seen& s : expect_resumable(scenario)) rates.push_back(s.report.lr);
  // Improvements in 0 to 3; 4 and 5 are bad, so 6 has half; 6 is cooldown; 7 and 8 are bad, so 9 has a
  // quarter.
  EXPECT_EQ(rates, (std::vector<double>{0.02, 0.02, 0.02, 0.02, 0.02, 0.02, 0.01, 0.01, 0.01, 0.005}));
}

TEST(ResumedState, StepsOfTorchsSchedules) {
  Scenario scenario{.config =
                        concat(R"(, "optimizer": {"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9}})",
                               R"(, "scheduler": {"type": "OneCycleLR", "params": {"max_lr": 0.5,)"
                               R"( "total_steps": 10}})")};
  const auto shown = expect_resumable(scenario);
  EXPECT_NEAR(shown[0].report.lr, 0.5 / 25, 1e-15);
  EXPECT_EQ(shown[2].report.lr, 0.5);
}

TEST(ResumedState, TheLossScaleAndItsHistory) {
  Scenario scenario{.config = concat(adamw, R"(, "fp16": {"enabled": true, "initial_scale_power": 8,)"
                                            R"( "loss_scale_window": 2, "hysteresis": 2})")};
  scenario.update = [](Engine& engine, Net& net, std::int64_t u) {
    nn::Loss loss = loss_of(engine, net.head, net, inputs(engine, u, 4));
    if (u == 1 || u == 5 || u == 6) loss = 1e9 * loss;  // its gradients overflow
    engine.backward(loss);
    engine.step();
  };
  const auto shown = expect_resumable(scenario);
  std::vector<double> scales;
  for (const Seen& s : shown) scales.push_back(s.report.loss_scale);
  EXPECT_EQ(shown.back().report.skipped_steps, 3);
  EXPECT_EQ(scales, (std::vector<double>{256, 256, 256, 256, 256, 512, 512, 256, 256, 256}));
}

TEST(ResumedState, BuffersOfTheModel) {
  const auto shown = expect_resumable({.config = adamw});
  EXPECT_EQ(shown.back().counted, (std::vector<std::int64_t>{0, 145}));
}

TEST(EngineState, ComesBackFromItsText) {
  EngineState s{
      .strategy = "zero2", .ranks = 3, .accumulation = 4, .seed = std::numeric_limits<std::uint64_t>::max()};
  s.updates = {.count = {.steps = 11, .skipped_steps = 2, .samples = std::int64_t{1} << 60},
               .training = {.epochs = 5,
                            .scaler = LossScaler::State{.scale = 0x1p-3,
                                                        .hysteresis_left = 3,
                                                        .updates = 17,
                                                        .last_overflow = 7,
                                                        .growth_tracker = 19,
                                                        .skipped = 23},
                            .plateau = PlateauState{.best = 0.1, .num_bad_epochs = 3, .cooldown_counter = 2}},
               .passes = std::uint64_t{1} << 63,
               .expected_terms = 0.1};
  s.optimizer = {.name = "AdamW",
                 .updates = 29,
                 .groups = {{"a", 0.1, 0.3}, {"b", 1e-300, 0}},
                 .missed_updates = {{"w", 2}}};
  s.loaders = {{"train", {.epoch = 31, .samples = 37, .data = "50 samples, in order"}},
               {"eval", {.epoch = 41, .samples = 43}}};
  const EngineState again = parse_engine_state(to_json(s), "FILE");
  EXPECT_EQ(again.strategy, s.strategy);
  EXPECT_EQ(again.ranks, s.ranks);
  EXPECT_EQ(again.accumulation, s.accumulation);
  EXPECT_EQ(again.seed, s.seed);
  EXPECT_TRUE(again.updates == s.updates);
  EXPECT_TRUE(again.optimizer == s.optimizer);
  EXPECT_TRUE(again.loaders == s.loaders);
  s.updates.training.plateau->best.reset();
  EXPECT_TRUE(parse_engine_state(to_json(s), "FILE").updates == s.updates);
  s.updates.training.scaler.reset(), s.updates.expected_terms.reset(), s.updates.training.plateau.reset();
  EXPECT_TRUE(parse_engine_state(to_json(s), "FILE").updates == s.updates);
}

}  // namespace
}  // namespace rz
