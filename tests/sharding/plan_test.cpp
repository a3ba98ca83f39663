/// Plans against runs: a rank's bytes by category, and the bytes that it sends in an update.
#include <gtest/gtest.h>

#include <map>

#include "autograd_lite/models/gpt2.h"
#include "comm/device/meta.h"
#include "sharding/engine/engine.h"
#include "sharding/plan/training_plan.h"
#include "tests/support/error_of.h"
#include "tests/support/ranks.h"
#include "tests/support/toy_training.h"

namespace rz {
namespace {

using test::kinds;
using test::run_ranks;

constexpr Gpt2Config small{.n_layer = 3, .n_head = 2, .n_embd = 32, .n_positions = 16, .vocab_size = 96};
constexpr std::size_t micro = 2;

struct Tokens {
  Tensor inputs, targets;
};
Tokens zeros(const Allocator& memory) {
  const Shape shape{micro, small.n_positions};
  return {Tensor::zeros(shape, DType::i32, memory), Tensor::zeros(shape, DType::i32, memory)};
}
/// The same batch again and again.
struct Batches {
  Tokens tokens = zeros(allocate_host);
  Tokens& next() { return tokens; }
};

/// A case: keys of a configuration, and what is changed in the model.
struct Case {
  std::string keys;
  std::function<void(Module&)> change = [](Module&) {};
};

std::string config(StrategyKind kind, const std::string& keys) {
  std::string zero = concat(R"("stage": )", static_cast<int>(kind));
  std::string rest = keys;
  if (const auto at = keys.find('|'); at != std::string::npos) {
    zero += ", " + keys.substr(0, at);
    rest = keys.substr(at + 1);
  }
  const std::string optimizer = rest.find("\"optimizer\"") != std::string::npos
                                    ? ""
                                    : R"("optimizer": {"type": "AdamW", "params": {"lr": 0.01}}, )";
  return concat(R"({"train_micro_batch_size_per_gpu": )", micro, ", ", optimizer, R"("zero_optimization": {)",
                zero, "}", rest.empty() ? "" : ", ", rest, "}");
}

CallCount operator-(const CallCount& a, const CallCount& b) { return {a.calls - b.calls, a.bytes - b.bytes}; }
Traffic operator-(const Traffic& a, const Traffic& b) {
  return {a.all_reduce - b.all_reduce, a.reduce_scatter - b.reduce_scatter, a.all_gather - b.all_gather};
}

/// What an engine holds after some updates, and sends in the last one.
TrainingPlan measured(World& world, const std::string& json, const Case& c) {
  Gpt2 model(small);
  c.change(model);
  Engine engine = initialize(world, model, {.config = json, .threads = 1, .log = nullptr});
  Batches batches;
  Traffic before;
  for (int i = 0; i < 4; ++i) {
    before = engine.strategy().traffic();
    engine.train_batch(
        batches, [&](Tape& tape, const Tokens& t) { return model.forward(tape, t.inputs, t.targets).loss; });
  }
  return {engine.strategy().kind(),
          {world.rank(), world.size()},
          engine.memory(),
          engine.strategy().traffic() - before};
}

TrainingPlan planned(const std::string& json, const Case& c, RankOf rank) {
  Gpt2 model(small);
  c.change(model);
  return plan_training(
      model, {.config = json},
      [&](Tape& tape) {
        const Tokens t = zeros(allocator_on(meta_device));
        return model.forward(tape, t.inputs, t.targets).loss;
      },
      rank);
}

void expect_as_planned(const TrainingPlan& run, const TrainingPlan& plan, const std::string& what) {
  EXPECT_EQ(run.update, plan.update) << what;
  const auto held = parts(run.memory), expected = parts(plan.memory);
  for (std::size_t i = 0; i < held.size(); ++i)
    EXPECT_EQ(held[i].bytes, expected[i].bytes) << what << ": " << held[i].name;
  EXPECT_EQ(run.memory.activations_in_use, plan.memory.activations_in_use) << what;
  EXPECT_EQ(run.memory.model.transient_peak, plan.memory.model.transient_peak) << what;
}

class Plan : public testing::TestWithParam<int> {
 protected:
  void expect(const Case& c, std::span<const StrategyKind> strategies = kinds) {
    for (const StrategyKind kind : strategies) {
      const std::string json = config(kind, c.keys);
      run_ranks(GetParam(), [&](int rank, std::shared_ptr<Store> store) {
        World world(Communicator::connect(rank, GetParam(), std::move(store)));
        expect_as_planned(measured(world, json, c), planned(json, c, {rank, GetParam()}),
                          concat(name(kind), ", rank ", rank, " of ", GetParam(), ", ", json));
      });
    }
  }
};
INSTANTIATE_TEST_SUITE_P(Ranks, Plan, testing::Values(1, 2, 3, 4));

TEST_P(Plan, IsWhatARunHoldsAndSends) { expect({"\"overlap_comm\": false|"}); }

TEST_P(Plan, CountsAccumulation) { expect({R"("overlap_comm": false|"gradient_accumulation_steps": 3)"}); }

TEST_P(Plan, CountsSixteenBits) {
  expect({R"("overlap_comm": false|"bf16": {"enabled": true})"});
  expect({R"("overlap_comm": false|"fp16": {"enabled": true, "initial_scale_power": 4})"});
  expect({R"("overlap_comm": false|"bf16": {"enabled": true}, "data_types": {"grad_accum_dtype": "fp32"})"});
}

}  // namespace
}  // namespace rz
