/// Training with autocast: the bits of every strategy, of recomputed blocks, and the distance from f32.
#include <gtest/gtest.h>

#include "autograd_lite/nn/init.h"
#include "autograd_lite/nn/layers.h"
#include "sharding/optim/optimizers.h"
#include "sharding/strategy/strategy.h"
#include "tests/lab/training.h"
#include "tests/support/reference.h"

namespace rz::test {
namespace {

lab::Run run_in(std::optional<DType> autocast, StrategyKind kind, int ranks, std::int64_t updates) {
  return {.model = lab::gpt(),
          .strategy = kind,
          .ranks = ranks,
          .updates = updates,
          .options = [=](EngineOptions& o) {
            PrecisionConfig& precision = o.ds_config->precision;
            precision.autocast = autocast;
            precision.skip_overflow = autocast == DType::f16;
            precision.loss_scale.fixed = 1024;
          }};
}
lab::Trace train_in(std::optional<DType> autocast, StrategyKind kind, int ranks, std::int64_t updates) {
  return lab::train(run_in(autocast, kind, ranks, updates));
}

TEST(AutocastTraining, EveryStrategyHasTheSameBits) {
  for (const DType low : {DType::bf16, DType::f16})
    for (const int ranks : {1, 2, 4}) {
      SCOPED_TRACE(concat(name(low), ", ", ranks, " ranks"));
      const lab::Trace first = train_in(low, StrategyKind::ddp, ranks, 4);
      for (const auto& update : first.updates) EXPECT_FALSE(update.skipped);
      for (const StrategyKind kind : {StrategyKind::zero1, StrategyKind::zero2, StrategyKind::zero3})
        EXPECT_EQ(train_in(low, kind, ranks, 4), first) << name(kind);
    }
}

TEST(AutocastTraining, RecomputedBlocksHaveTheSameBits) {
  for (const StrategyKind kind : {StrategyKind::ddp, StrategyKind::zero3}) {
    lab::Run run = run_in(DType::bf16, kind, 2, 4);
    const lab::Trace kept = lab::train(run);
    run.keys = R"("activation_checkpointing": {"partition_activations": true})";
    EXPECT_EQ(lab::train(run), kept) << name(kind);
  }
}

/// Only the products round: the first loss is nearer to that of f32 than the bound that host_precision_test
/// derives for a model whose values are all rounded, 2 (16 n_layer + 6) u n_embd max|w|.
TEST(AutocastTraining, TheFirstLossIsThatOfF32WithinRounding) {
  constexpr double layers = 4, channels = 16, largest_weight = 0.035;
  const double full = train_in(std::nullopt, StrategyKind::ddp, 1, 1).updates[0].loss;
  for (const DType low : {DType::bf16, DType::f16}) {
    const double u = low == DType::bf16 ? 0x1p-8 : 0x1p-11;
    const double loss = train_in(low, StrategyKind::zero2, 2, 1).updates[0].loss;
    EXPECT_NEAR(loss, full, 2 * (16 * layers + 6) * u * channels * largest_weight) << name(low);
    EXPECT_NE(loss, full) << name(low);
  }
}

TEST(AutocastTraining, FollowsF32) {
  const auto learned = [](std::optional<DType> autocast) {
    const auto updates = train_in(autocast, StrategyKind::zero1, 2, 30).updates;
    return updates.front().loss - updates.back().loss;
  };
  const double full = learned(std::nullopt);
  EXPECT_GT(full, 0.2);
  for (const DType low : {DType::bf16, DType::f16}) EXPECT_NEAR(learned(low), full, 0.1 * full) << name(low);
}

/// A layer that is used twice, in two entries of its scope, and a table that is read in f32 and multiplied in
/// 16 bits: each scope computes the gradients of its own casts, which ZeRO-3 requires.
struct Twice : Module {
  nn::Loss operator()(Tape& t, const Tensor& tokens, const Tensor& targets) {
    const Var x = table(t, tokens);
    const Var y = layer(t, nn::tanh(t, layer(t, x)));
    const auto head = [&] {
      return nn::linear(t, y, t.parameter(table.weight), Var(), nn::WeightLayout::out_in);
    };
    return nn::cross_entropy(t, table.in_scope(t, head), targets);
  }
  nn::Embedding table{*this, "table", 13, 8};
  nn::Linear layer{*this, "layer", 8, 8};
};

std::vector<float> values_after(StrategyKind kind, Communicator& comm) {
  Twice net;
  const auto strategy = make_strategy(kind, net, comm);
  strategy->values().fill([](const Parameter& p, Range elements, float* out) {
    init_slice(p, {out, elements.count()}, elements.begin, 1);
  });
  Tape tape;
  strategy->attach(tape);
  strategy->settings().set_expected_terms(6.0 * comm.size());
  const auto sgd = make_sgd({.learning_rate = 0.1});
  const Tensor tokens = tokens_of({0, 1, 12, 4, 7, comm.rank()}, {6}),
               targets = tokens_of({1, 2, 0, 5, -100, 3}, {6});
  for (int update = 0; update < 3; ++update) {
    const Tape::Autocast on(tape, DType::bf16);
    strategy->zero_grad();
    strategy->backward(tape, net(tape, tokens, targets), true);
    tape.reset();
    strategy->finish_gradients();
    strategy->step(*sgd);
  }
  return lab::values_of(*strategy, net);
}

TEST(AutocastTraining, AParameterOfSeveralUsesHasTheSameBits) {
  lab::group(2, [](Communicator& comm) {
    const std::vector<float> first = values_after(StrategyKind::ddp, comm);
    for (const StrategyKind kind : {StrategyKind::zero1, StrategyKind::zero2, StrategyKind::zero3})
      EXPECT_EQ(values_after(kind, comm), first) << name(kind);
    comm.barrier().wait();
  });
}

}  // namespace
}  // namespace rz::test
