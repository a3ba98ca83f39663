// The rates and groups of a run.

#include <gtest/gtest.h>

#include "sharding/lm/engine_of_run.h"
#include "sharding/optim/optimizers.h"
#include "tests/lab/training.h"

namespace rz::lm {
namespace {

TEST(TrainLmSchedule, EachUpdateHasTheRateOfItsStep) {
  const auto train_by = [](const LrSchedule& schedule) {
    return lab::train({.model = lab::gpt(),
                       .strategy = StrategyKind::zero3,
                       .ranks = 2,
                       .updates = 5,
                       .options = [&](EngineOptions& o) { o.ds_config->schedule = schedule; }})
        .updates;
  };
  const LrSchedule schedule =
      OneCycle{.min_lr = 1e-3, .max_lr = 3e-3, .first_step_size = 2, .cycle_momentum = false};
  const auto updates = train_by(schedule);
  for (const UpdateReport& r : updates)
    EXPECT_EQ(r.lr, learning_rate(schedule, static_cast<std::int64_t>(r.step), {}));
  EXPECT_EQ(updates[2].lr, 3e-3);
  EXPECT_NE(train_by(ConstantLr{}).back().loss, updates.back().loss) << "the optimizer uses the rate";
}

/// The first update makes weights so large that no gradient is finite from then on.
TEST(TrainLmSchedule, SkippedUpdatesDoNotAdvanceIt) {
  const lab::Run run{.model = lab::gpt(),
                     .strategy = StrategyKind::zero2,
                     .ranks = 2,
                     .updates = 4,
                     .options = [](EngineOptions& o) {
                       o.ds_config->strategy.precision = {DType::f16, DType::f16};
                       // Gradients overflow, the loss does not.
                       o.ds_config->precision.loss_scale.fixed = 1e30;
                       o.ds_config->precision.skip_overflow = true;
                       o.ds_config->schedule = LrRangeTest{.min_lr = 0.25, .step_size = 1};
                     }};
  for (const UpdateReport& update : lab::train(run).updates) {
    EXPECT_TRUE(update.skipped);
    EXPECT_EQ(update.lr, 0.25);
  }
}

/// Inputs as far as engine_options() reads them.
Inputs inputs_of(const char* config) {
  Inputs in;
  in.ds = parse_ds_config(config, "ds.json");
  in.sizes = required_sizes(in.ds);
  return in;
}

TEST(TrainLmSchedule, WeightDecayAppliesToTheGroupOfTheFlag) {
  const OptimizerConfig config{.type = OptimizerConfig::Type::adamw, .weight_decay = 0.5};
  EXPECT_EQ(make_optimizer(config, Decay::all)->groups(), 1);
  const auto two = make_optimizer(config, Decay::matrices);
  Parameter matrix, vector;
  matrix.shape = {2, 3};
  vector.shape = {3};
  EXPECT_EQ(two->groups(), 2);
  EXPECT_NE(two->group_of(matrix), two->group_of(vector));
}

StrategyOptions strategy_options_of(const Options& o, const Inputs& in) {
  return strategy_options(in.ds, in.strategy, engine_options(o, in).configure_strategy);
}

TEST(TrainLmSchedule, TheFlagsReachTheEngine) {
  Options o;
  const Inputs in =
      inputs_of(R"({"train_batch_size": 4, "gradient_clipping": 0.25, "optimizer": {"type": "SGD"},
    "scheduler": {"type": "LRRangeTest"}, "zero_optimization": {"reduce_bucket_size": 1000, "overlap_comm": false}})");
  o.threads = 3;
  o.seed = 5;
  const EngineOptions e = engine_options(o, in);
  EXPECT_EQ(e.ds_config->gradient_clipping, 0.25);
  EXPECT_EQ(e.threads, 3);
  EXPECT_EQ(e.seed, 5u);
  EXPECT_EQ(e.decay, Decay::matrices);
  EXPECT_EQ(strategy_options_of(o, in).reduce_bucket_size, 1000u);
  EXPECT_FALSE(strategy_options_of(o, in).overlap_comm);
  o.bucket_mb = 2;
  EXPECT_EQ(strategy_options_of(o, in).reduce_bucket_size, std::size_t{1} << 19);
  const Inputs plain = inputs_of(R"({"train_batch_size": 4, "optimizer": {"type": "SGD"}})");
  EXPECT_TRUE(strategy_options_of(Options(), plain).overlap_comm);
  EXPECT_EQ(strategy_options_of(Options(), plain).reduce_bucket_size, StrategyOptions().reduce_bucket_size);
  o.overlap = false;
  EXPECT_FALSE(strategy_options_of(o, plain).overlap_comm);
}

TEST(TrainLmSchedule, OffloadReachesTheStrategiesThatHaveIt) {
  Inputs in = inputs_of(R"({"train_batch_size": 4, "optimizer": {"type": "SGD"},
    "zero_optimization": {"stage": 3, "sub_group_size": 5000,
    "offload_optimizer": {"device": "cpu", "pin_memory": false}, "offload_param": {"device": "cpu"}}})");
  const auto options = [&](StrategyKind kind) {
    in.strategy = kind;
    return strategy_options_of(Options(), in);
  };
  const OffloadOptions pinned{.device = OffloadDevice::cpu},
      pageable{.device = OffloadDevice::cpu, .pin_memory = false};
  EXPECT_EQ(options(StrategyKind::zero3).sub_group_size, 5000u);
  EXPECT_EQ(options(StrategyKind::zero3).offload_optimizer, pageable);
  EXPECT_EQ(options(StrategyKind::zero3).offload_param, pinned);
  EXPECT_EQ(options(StrategyKind::zero2).offload_optimizer, pageable);
  EXPECT_EQ(options(StrategyKind::zero2).offload_param.device, OffloadDevice::none);
  EXPECT_EQ(options(StrategyKind::ddp).offload_optimizer.device, OffloadDevice::none);
}

TEST(TrainLmSchedule, EveryTypeIsMade) {
  using Type = OptimizerConfig::Type;
  const std::pair<Type, const char*> types[] = {
      {Type::adam, "adam"}, {Type::adamw, "adamw"}, {Type::sgd, "sgd"},   {Type::adagrad, "adagrad"},
      {Type::lion, "lion"}, {Type::lamb, "lamb"},   {Type::muon, "muon"}, {Type::rmsprop, "rmsprop"}};
  for (const auto& [type, name] : types)
    EXPECT_STREQ(make_optimizer({.type = type}, Decay::all)->name(), name);
}

TEST(TrainLmSchedule, EveryOptionReachesTheOptimizer) {
  using Type = OptimizerConfig::Type;
  const auto describe = [](const OptimizerConfig& o) { return make_optimizer(o, Decay::all)->describe(); };
  for (const Type type : {Type::adam, Type::adamw, Type::sgd, Type::adagrad, Type::rmsprop})
    EXPECT_EQ(describe({.type = type, .maximize = true}), describe({.type = type}) + ", maximize");
  for (const Type type : {Type::adam, Type::adamw})
    EXPECT_EQ(describe({.type = type, .amsgrad = true}), describe({.type = type}) + ", amsgrad");
  EXPECT_EQ(describe({.type = Type::sgd, .lr = 0.5, .momentum = 0.75, .dampening = 0.25}),
            make_sgd({.learning_rate = 0.5, .momentum = 0.75, .dampening = 0.25})->describe());
  EXPECT_EQ(
      describe(
          {.type = Type::rmsprop, .lr = 0.5, .eps = 0.25, .momentum = 0.75, .alpha = 0.5, .centered = true}),
      make_rmsprop({.learning_rate = 0.5, .alpha = 0.5, .epsilon = 0.25, .momentum = 0.75, .centered = true})
          ->describe());
}

}  // namespace
}  // namespace rz::lm
