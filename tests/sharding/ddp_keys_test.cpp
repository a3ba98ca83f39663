/// Keys of DistributedDataParallel, from a configuration to what they do.
#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <string>
#include <vector>

#include "sharding/engine/engine.h"
#include "sharding/engine/engine_options.h"
#include "sharding/strategy/strategy.h"
#include "tests/lab/training.h"
#include "tests/support/error_of.h"

namespace rz {
namespace {

constexpr std::size_t width = 64, rows = 4;

/// A running mean beside two layers, of which one may be left out.
struct Net : Module {
  nn::Linear fc1{*this, "fc1", width, width}, fc2{*this, "fc2", width, width};
  ModuleBuffer mean;
  bool uses_both = true;
  Net() { register_buffer(mean, "mean", {2}); }
  Var operator()(Tape& t, const Tensor& x) { return uses_both ? fc2(t, fc1(t, x)) : fc1(t, x); }
};

std::string config(int stage, const std::string& ringzero, const std::string& more = "") {
  return concat(R"({"train_micro_batch_size_per_gpu": 4, "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
                    "zero_optimization": {"stage": )",
                stage, R"(}, "ringzero": {)", ringzero, "}", more, "}");
}

EngineOptions options(const std::string& config) { return {.config = config, .seed = 7, .log = nullptr}; }

Tensor inputs(int rank, int batch) {
  Tensor x = Tensor::empty({rows, width});
  for (std::size_t i = 0; i < x.count(); ++i)
    x.data<float>()[i] =
        static_cast<float>((i * 5 + static_cast<std::size_t>(3 * rank + 11 * batch)) % 16) / 16;
  return x;
}

/// Classes, of which `terms` count.
Tensor targets(int rank, std::size_t terms) {
  Tensor y = Tensor::empty({rows}, DType::i32);
  for (std::size_t i = 0; i < rows; ++i)
    y.data<std::int32_t>()[i] =
        i < terms ? static_cast<std::int32_t>((i + static_cast<std::size_t>(rank)) % width) : -100;
  return y;
}

void train(Engine& engine, Net& net, int rank, int batch, std::size_t terms = rows) {
  Tape& t = engine.tape();
  engine.backward(nn::cross_entropy(t, net(t, inputs(rank, batch)), targets(rank, terms)));
}

std::vector<float> values_of(Engine& engine, Module& module) { return lab::values_of(engine, module); }

// ---- hooks

/// Bytes of the reductions of one update, after `before` others.
std::uint64_t bytes_of_update(World& world, const std::string& ringzero, int before) {
  Net net;
  auto engine = initialize(world, net, options(config(0, ringzero)));
  std::uint64_t start = 0;
  for (int u = 0; u <= before; ++u) {
    start = engine.strategy().traffic().total().all_reduce.bytes;
    train(engine, net, world.rank(), u);
    engine.step();
  }
  return engine.strategy().traffic().total().all_reduce.bytes - start;
}

TEST(DdpKeys, AHookDecidesWhatIsSent) {
  lab::world(2, [](World& world) {
    const std::uint64_t whole = bytes_of_update(world, R"("comm_hook": "no")", 0);
    EXPECT_GE(whole, 4 * 2 * width * width);
    for (const char* half : {"fp16", "bf16"})
      EXPECT_EQ(bytes_of_update(world, concat(R"("comm_hook": ")", half, "\""), 0), whole / 2) << half;
    const auto low_rank = [&](const char* hook, int rank, int before) {
      return bytes_of_update(
          world,
          concat(R"("comm_hook": ")", hook,
                 R"(", "comm_state_option": {"start_powerSGD_iter": 3, "matrix_approximation_rank": )", rank,
                 "}"),
          before);
    };
    for (const char* hook : {"power_sgd", "batched_power_sgd"}) {
      EXPECT_EQ(low_rank(hook, 1, 2), whole) << hook << ": the third pass is whole";
      const std::uint64_t one = low_rank(hook, 1, 3), four = low_rank(hook, 4, 3);
      EXPECT_LT(one, whole / 8) << hook;
      EXPECT_GT(four, 2 * one) << hook;
    }
  });
}

// ---- rules of the graph

TEST(DdpKeys, UnusedParametersAreNamedIfTheyAreNotLookedFor) {
  for (int stage = 0; stage < 4; ++stage)
    lab::world(2, [&](World& world) {
      Net net;
      auto engine = initialize(world, net, options(config(stage, R"("find_unused_parameters": false)")));
      net.uses_both = world.rank() == 0;
      train(engine, net, world.rank(), 0);
      const Error e = test::error_of([&] { engine.step(); });
      EXPECT_NE(std::string(e.what()).find("fc2.weight"), std::string::npos) << e.what();
    });
}

TEST(DdpKeys, AStaticGraphIsThatOfTheFirstUpdate) {
  for (const bool is_static : {false, true})
    lab::world(2, [&](World& world) {
      Net net;
      auto engine = initialize(
          world, net, options(config(0, concat(R"("static_graph": )", is_static ? "true" : "false"))));
      train(engine, net, world.rank(), 0);
      engine.step();
      net.uses_both = false;
      train(engine, net, world.rank(), 1);
      if (is_static)
        EXPECT_NE(std::string(test::error_of([&] { engine.step(); }).what()).find("fc2"), std::string::npos);
      else
        engine.step();
    });
}

TEST(DdpKeys, BuffersAreBroadcastUnlessTheKeySaysNo) {
  for (const bool broadcasts : {true, false})
    lab::world(2, [&](World& world) {
      Net net;
      auto engine = initialize(
          world, net, options(config(1, concat(R"("broadcast_buffers": )", broadcasts ? "true" : "false"))));
      net.mean.value.data<float>()[1] = static_cast<float>(1 + world.rank());
      train(engine, net, world.rank(), 0);
      engine.step();
      EXPECT_EQ(net.mean.value.data<float>()[1], broadcasts ? 1 : static_cast<float>(1 + world.rank()));
    });
}

// ---- join

/// Rank r has r + 1 batches. A rank without data runs a batch without terms if `stands_in`, else it joins.
std::vector<float> train_uneven(World& world, int stage, bool stands_in) {
  Net net;
  auto engine = initialize(world, net, options(config(stage, stands_in ? "" : R"("join": {})")));
  const int own = world.rank() + 1, all = world.size();
  if (stands_in) {
    for (int b = 0; b < all; ++b) train(engine, net, world.rank(), b, b < own ? rows : 0), engine.step();
    return values_of(engine, net);
  }
  Engine::Join join(engine);
  int b = 0, passes = 0;
  for (; join.next(b < own); ++passes, engine.step()) {
    if (join.active())
      train(engine, net, world.rank(), b++);
    else
      join.backward_without_data();
  }
  EXPECT_EQ(passes, all);
  EXPECT_EQ(b, own);
  EXPECT_EQ(engine.global_steps(), all);
  return values_of(engine, net);
}

TEST(DdpKeys, JoinedRanksTrainAsWithBatchesWithoutTerms) {
  for (const int ranks : {1, 3})
    lab::world(ranks, [](World& world) {
      const std::vector<float> expected = train_uneven(world, 0, true);
      for (int stage = 0; stage < 3; ++stage) EXPECT_EQ(train_uneven(world, stage, false), expected) << stage;
      EXPECT_EQ(train_uneven(world, 3, true), expected) << "what zero3 does instead";
    });
}

TEST(DdpKeys, JoinFollowsItsSection) {
  lab::world(2, [](World& world) {
    Net net, off, three;
    auto engine = initialize(world, net, options(config(0, R"("join": {"throw_on_early_termination": true,
                                                             "divide_by_initial_world_size": false})")));
    Engine::Join join(engine);
    EXPECT_TRUE(join.next(true));
    EXPECT_EQ(join.loss_factor(), 1);
    EXPECT_EQ(test::error_of([&] { join.next(world.rank() == 1); }).culprit(), 0);
    auto without = initialize(world, off, options(config(0, R"("join": {"enable": false})")));
    Engine::Join disabled(without);
    EXPECT_EQ(disabled.next(world.rank() == 1), world.rank() == 1);
    auto sharded = initialize(world, three, options(config(3, "")));
    const Error e = test::error_of([&] { Engine::Join refused(sharded); });
    EXPECT_EQ(e.code(), Errc::unsupported);
    EXPECT_NE(std::string(e.what()).find("targets are ignored (-100)"), std::string::npos) << e.what();
  });
}

TEST(DdpKeys, EveryRankHasABatchBeforeTheFirstUpdate) {
  lab::world(2, [](World& world) {
    Net net;
    auto engine = initialize(world, net, options(config(0, "")));
    Engine::Join join(engine);
    EXPECT_EQ(test::error_of([&] { join.next(world.rank() == 0); }).code(), Errc::mismatch);
  });
}

// ---- errors

void expect_refused(const std::string& text, const std::string& message) {
  const Error e = test::error_of([&] {
    const DsConfig c = parse_ds_config(text, "ds.json");
    strategy_options(c, strategy_kind(c));
  });
  EXPECT_NE(std::string(e.what()).find(message), std::string::npos) << e.what();
  EXPECT_EQ(std::string(e.what()).find('\n'), std::string::npos);
}

TEST(DdpKeys, WhatMakesNoSenseIsOneLine) {
  const std::string fp16 = R"("comm_hook": "fp16")", low_rank = R"("comm_hook": "power_sgd")";
  expect_refused(config(0, R"("comm_hook": "int8")"),
                 "ds.json: ringzero.comm_hook: unknown choice \"int8\"; choose");
  for (int stage = 1; stage < 4; ++stage)
    expect_refused(config(stage, fp16),
                   concat("ds.json: ringzero.comm_hook: fp16 needs stage 0 (ddp), found zero", stage));
  expect_refused(config(0, fp16, R"(, "communication_data_type": "bf16")"),
                 "ds.json: ringzero.comm_hook: fp16 forms the means itself; remove communication_data_type");
  expect_refused(config(0, fp16, R"(, "prescale_gradients": true)"), "remove communication_data_type");
  expect_refused(config(0, low_rank, R"(, "bf16": {"enabled": true})"),
                 "power_sgd needs gradients in f32, found bf16; set data_types.grad_accum_dtype to fp32");
  expect_refused(config(0, fp16 + R"(, "comm_state_option": {})"),
                 "ringzero.comm_state_option: is of power_sgd and batched_power_sgd, but comm_hook is fp16");
  const auto state = [&](const char* option) {
    return config(0, concat(low_rank, R"(, "comm_state_option": {)", option, "}"));
  };
  expect_refused(state(R"("matrix_approximation_rank": 0)"),
                 "ringzero.comm_state_option.matrix_approximation_rank");
  expect_refused(state(R"("start_powerSGD_iter": 1)"), "ringzero.comm_state_option.start_powerSGD_iter");
  expect_refused(state(R"("start_powersgd_iter": 5)"), "did you mean 'start_powerSGD_iter'?");
  expect_refused(state(R"("orthogonalization_epsilon": 0.5)"), "orthogonalised with 1e-8");
  expect_refused(config(0, R"("comm_wrapper": "fp16")"), "ringzero.comm_wrapper");
  expect_refused(config(3, R"("join": {})"), "ds.json: ringzero.join: needs stage 0, 1 or 2, found zero3");
  expect_refused(
      R"({"zero_optimization": {"ignore_unused_parameters": true},
                     "ringzero": {"find_unused_parameters": false}})",
      "ringzero.find_unused_parameters: is false, but zero_optimization.ignore_unused_parameters is true");
}

TEST(DdpKeys, ArgumentsFillThem) {
  const TrainingArguments arguments{.ddp_find_unused_parameters = false,
                                    .ddp_static_graph = true,
                                    .ddp_broadcast_buffers = false,
                                    .ddp_comm_hook = "bf16"};
  const DsConfig c = parse_ds_config("{}", "ds.json", arguments);
  EXPECT_FALSE(c.strategy.find_unused_parameters);
  EXPECT_TRUE(c.strategy.static_graph);
  EXPECT_FALSE(c.strategy.broadcast_buffers);
  EXPECT_EQ(c.ddp.comm_hook, DdpConfig::CommHook::bf16);
  const Error e = test::error_of([] { parse_ds_config("{}", "ds.json", {.ddp_comm_hook = "int8"}); });
  EXPECT_EQ(e.code(), Errc::config);
}

TEST(DdpKeys, AnErrorComesBeforeTraining) {
  lab::world(2, [](World& world) {
    Net net;
    EngineOptions o = options(config(0, R"("comm_hook": "fp16")"));
    o.strategy = StrategyKind::zero2;
    const Error e = test::error_of([&] { initialize(world, net, std::move(o)); });
    EXPECT_EQ(e.code(), Errc::config);
    EXPECT_NE(std::string(e.what()).find("found zero2"), std::string::npos) << e.what();
  });
}

}  // namespace
}  // namespace rz
