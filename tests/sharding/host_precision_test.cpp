/// Training in bf16 and f16 on the host: the bits of every strategy, the distance from f32, overflow on one
/// rank, and the rules of the loss scaler in training.
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <map>
#include <numeric>

#include "autograd_lite/models/gpt2.h"
#include "autograd_lite/nn/init.h"
#include "comm/core/math.h"
#include "sharding/optim/loss_scaler.h"
#include "sharding/optim/optimizers.h"
#include "sharding/strategy/strategy.h"
#include "tensor/ops.h"
#include "tests/support/ranks.h"
#include "tests/support/train_tiny.h"

namespace rz::test {
namespace {

constexpr Precision precisions[] = {{DType::bf16, DType::bf16},
                                    {DType::bf16, DType::f32},
                                    {DType::f16, DType::f16},
                                    {DType::f16, DType::f32}};

std::string text_of(const Precision& p) {
  return concat(name(p.parameters), " with gradients in ", name(p.gradients));
}

Reports train_in(const Precision& precision, StrategyKind kind, int ranks, std::int64_t updates) {
  const Folder folder;
  TinyRun run = smallest_run(kind, ranks, folder);
  run.options.strategy_options.precision = precision;
  run.options.ds.precision.skip_overflow = precision.parameters == DType::f16;
  run.options.ds.precision.loss_scale.fixed = 1024;
  return train(run, updates);
}

TEST(HostPrecision, EveryStrategyHasTheSameBits) {
  for (const Precision& precision : precisions)
    for (const int ranks : {1, 2, 4}) {
      SCOPED_TRACE(concat(text_of(precision), ", ", ranks, " ranks"));
      const Reports first = train_in(precision, StrategyKind::ddp, ranks, 4);
      for (const auto& report : first) EXPECT_FALSE(report.skipped);
      for (const StrategyKind kind : {StrategyKind::zero1, StrategyKind::zero2, StrategyKind::zero3})
        expect_same_bits(first, train_in(precision, kind, ranks, 4), name(kind));
    }
}

/// The loss of the first update, whose masters are those of f32. Each stored value is off by a factor of at
/// most 1 + u, with u = 2^-8 (bf16) or 2^-11 (f16). On the way to a logit a value is stored once in each of
/// the parameter, embedding, and for each of n_layer blocks: two norms, qkv, attention, its projection, two
/// sums of the residual, the wide layer, its gelu and its projection (10); then the last norm and the logit.
/// Each parameter on that way (embedding, and in a block two norms, four weights; last norm, head) is rounded
/// too: 6 per block, and 3. The relative error of a logit's terms is thus at most (16 n_layer + 6) u to first
/// order, where norms, softmax and gelu are taken to pass a relative error on with a factor of at most 1. A
/// change of all logits by at most e changes the loss by at most 2 e. Terms of a logit: the normalized row
/// has RMS 1, so that Σ|h w| ≤ sqrt(n_embd) ‖w‖ ≤ n_embd max|w|. The head is the embedding, with |w| below
/// 0.035 in this case.
TEST(HostPrecision, TheFirstLossIsThatOfF32WithinRounding) {
  constexpr double layers = 4, channels = 16, largest_weight = 0.035;
  const double full = train_in({}, StrategyKind::ddp, 1, 1)[0].loss;
  for (const Precision& precision : precisions) {
    const double u = precision.parameters == DType::bf16 ? 0x1p-8 : 0x1p-11;
    const double bound = 2 * (16 * layers + 6) * u * channels * largest_weight;
    for (const int ranks : {1, 2, 4}) {
      const double loss = train_in(precision, StrategyKind::zero2, ranks, 1)[0].loss;
      EXPECT_NEAR(loss, full, bound) << text_of(precision);
      EXPECT_NE(loss, full) << text_of(precision);
    }
  }
}

/// Gradients of 16 bits and of f32 both lead where f32 leads, while the model learns.
TEST(HostPrecision, TrainingFollowsF32) {
  constexpr int updates = 30;
  const Reports full = train_in({}, StrategyKind::zero1, 2, updates);
  const double learned = full.front().loss - full.back().loss;
  EXPECT_GT(learned, 0.2);
  for (const Precision& precision : precisions) {
    const Reports reports = train_in(precision, StrategyKind::zero1, 2, updates);
    const double own = reports.front().loss - reports.back().loss;
    EXPECT_NEAR(own, learned, 0.1 * learned) << text_of(precision);
  }
}

constexpr std::size_t tokens = 8;

Tensor sample(int rank, int first) {
  const Tensor t = Tensor::empty({1, tokens}, DType::i32);
  for (std::size_t i = 0; i < tokens; ++i)
    t.data<std::int32_t>()[i] =
        static_cast<std::int32_t>((i * 5 + static_cast<std::size_t>(rank * 3 + first)) % 32);
  return t;
}

/// A rank of a group that trains with a loss scaler.
struct ScaledRank {
  ScaledRank(StrategyKind kind, const Precision& precision, Communicator& communicator)
      : comm(communicator),
        model({.n_layer = 1, .n_head = 2, .n_embd = 16, .n_positions = tokens, .vocab_size = 32}),
        strategy(make_strategy(kind, model, comm, {.precision = precision})),
        optimizer(make_adamw({.learning_rate = 1e-2})) {
    strategy->attach(tape);
    strategy->values().fill([](const Parameter& p, Range r, float* out) {
      init_slice(p, {out, r.count()}, r.begin, 3);
    });
  }

  /// One update; the gradients are multiplied by `fault`, e.g. infinity.
  Strategy::Outcome update(float fault) {
    strategy->settings().set_loss_scale(scaler.scale());
    strategy->zero_grad();
    const auto out = model.forward(tape, sample(comm.rank(), 0), sample(comm.rank(), 1));
    strategy->begin_backward(true);
    tape.backward(out.loss.sum, static_cast<float>(scaler.scale()) * fault / static_cast<float>(tokens));
    tape.reset();
    strategy->finish_gradients();
    strategy->clip_and_step(*optimizer, {.max_norm = 1, .skip_overflow = true});
    const Strategy::Outcome outcome = strategy->outcome(*optimizer);
    scaler.update(outcome.skipped);
    return outcome;
  }

  /// The masters of all parameters.
  std::vector<float> values() {
    std::vector<float> all;
    for (const Parameter* p : model.parameters()) {
      const Tensor whole = strategy->values().whole(*p, Stream());
      all.insert(all.end(), whole.data<float>(), whole.data<float>() + whole.count());
    }
    return all;
  }

  Communicator& comm;
  Tape tape;
  Gpt2 model;
  std::unique_ptr<Strategy> strategy;
  std::unique_ptr<Optimizer> optimizer;
  LossScaler scaler{LossScaleOptions{.initial_power = 8, .hysteresis = 1}};
};

TEST(HostPrecision, AnOverflowOnOneRankSkipsTheUpdateOfAll) {
  constexpr int ranks = 3;
  for (const StrategyKind kind : strategies)
    for (const Precision& precision : {Precision{DType::f16, DType::f16}, Precision{DType::f16, DType::f32}})
      for (const float fault : {std::numeric_limits<float>::infinity(), std::nanf("")})
        run_ranks(ranks, [&](int rank, std::shared_ptr<Store> store) {
          Communicator comm = Communicator::connect(rank, ranks, std::move(store));
          ScaledRank r(kind, precision, comm);
          EXPECT_FALSE(r.update(1).skipped);
          const std::vector<float> before = r.values();
          EXPECT_TRUE(r.update(rank == 1 ? fault : 1).skipped) << name(kind) << ", rank " << rank;
          EXPECT_EQ(r.values(), before) << name(kind) << ", rank " << rank;
          EXPECT_EQ(r.scaler.scale(), 128);
          EXPECT_EQ(r.scaler.skipped(), 1);
          EXPECT_FALSE(r.update(1).skipped);
          EXPECT_NE(r.values(), before);
          EXPECT_EQ(r.optimizer->updates(), 2);
          comm.barrier().wait();
        });
}

TEST(HostPrecision, WorkingValuesAreTheRoundedMasters) {
  for (const StrategyKind kind : strategies)
    for (const DType t : {DType::bf16, DType::f16})
      run_ranks(2, [&](int rank, std::shared_ptr<Store> store) {
        Communicator comm = Communicator::connect(rank, 2, std::move(store));
        ScaledRank r(kind, {t, t}, comm);
        for (int i = 0; i < 3; ++i) EXPECT_FALSE(r.update(1).skipped);
        if (kind == StrategyKind::zero3) return comm.barrier().wait();  // values are sharded
        for (const Parameter* p : r.model.parameters()) {
          const Tensor masters = r.strategy->values().whole(*p, Stream()),
                       rounded = Tensor::empty(p->shape, t);
          ops::copy(rounded, masters, {});
          ASSERT_EQ(p->value.dtype(), t);
          EXPECT_EQ(std::memcmp(p->value.raw(), rounded.raw(), rounded.bytes()), 0) << name(kind) << p->name;
        }
        comm.barrier().wait();
      });
}

TEST(HostPrecision, GradientsOfAnotherTypeAreRefused) {
  run_ranks(1, [&](int, std::shared_ptr<Store> store) {
    Communicator comm = Communicator::connect(0, 1, std::move(store));
    Gpt2 model({.n_layer = 1, .n_head = 2, .n_embd = 16, .n_positions = tokens, .vocab_size = 32});
    for (const Precision& p : {Precision{DType::bf16, DType::f16}, Precision{DType::f64, DType::f32},
                               Precision{DType::f32, DType::bf16}})
      EXPECT_THROW(make_strategy(StrategyKind::ddp, model, comm, {.precision = p}), Error);
  });
}

}  // namespace
}  // namespace rz::test
