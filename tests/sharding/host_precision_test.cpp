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
#include "tests/lab/training.h"

namespace rz::test {
namespace {

constexpr Precision precisions[] = {{DType::bf16, DType::bf16},
                                    {DType::bf16, DType::f32},
                                    {DType::f16, DType::f16},
                                    {DType::f16, DType::f32}};

std::string text_of(const Precision& p) {
  return concat(name(p.parameters), " with gradients in ", name(p.gradients));
}

lab::Trace train_in(const Precision& precision, StrategyKind kind, int ranks, std::int64_t updates) {
  return lab::train({.model = lab::gpt(),
                     .strategy = kind,
                     .ranks = ranks,
                     .updates = updates,
                     .options = [=](EngineOptions& o) {
                       o.ds_config->strategy.precision = precision;
                       o.ds_config->precision.skip_overflow = precision.parameters == DType::f16;
                       o.ds_config->precision.loss_scale.fixed = 1024;
                     }});
}

TEST(HostPrecision, EveryStrategyHasTheSameBits) {
  for (const Precision& precision : precisions)
    for (const int ranks : {1, 2, 4}) {
      SCOPED_TRACE(concat(text_of(precision), ", ", ranks, " ranks"));
      const lab::Trace first = train_in(precision, StrategyKind::ddp, ranks, 4);
      for (const auto& update : first.updates) EXPECT_FALSE(update.skipped);
      for (const StrategyKind kind : {StrategyKind::zero1, StrategyKind::zero2, StrategyKind::zero3})
        EXPECT_EQ(train_in(precision, kind, ranks, 4), first) << name(kind);
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
  const double full = train_in({}, StrategyKind::ddp, 1, 1).updates[0].loss;
  for (const Precision& precision : precisions) {
    const double u = precision.parameters == DType::bf16 ? 0x1p-8 : 0x1p-11;
    const double bound = 2 * (16 * layers + 6) * u * channels * largest_weight;
    for (const int ranks : {1, 2, 4}) {
      const double loss = train_in(precision, StrategyKind::zero2, ranks, 1).updates[0].loss;
      EXPECT_NEAR(loss, full, bound) << text_of(precision);
      EXPECT_NE(loss, full) << text_of(precision);
    }
  }
}

/// Gradients of 16 bits and of f32 both lead where f32 leads, while the model learns.
TEST(HostPrecision, TrainingFollowsF32) {
  const auto learned = [](const Precision& precision) {
    const auto updates = train_in(precision, StrategyKind::zero1, 2, 30).updates;
    return updates.front().loss - updates.back().loss;
  };
  const double full = learned({});
  EXPECT_GT(full, 0.2);
  for (const Precision& p : precisions) EXPECT_NEAR(learned(p), full, 0.1 * full) << text_of(p);
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
  std::vector<float> values() { return lab::values_of(*strategy, model); }

  Communicator& comm;
  Tape tape;
  Gpt2 model;
  std::unique_ptr<Strategy> strategy;
  std::unique_ptr<Optimizer> optimizer;
  LossScaler scaler{LossScaleOptions{.initial_power = 8, .hysteresis = 1}};
};

TEST(HostPrecision, AnOverflowOnOneRankSkipsTheUpdateOfAll) {
  constexpr int ranks = 3;
  for (const StrategyKind kind : lab::strategies)
    for (const Precision& precision : {Precision{DType::f16, DType::f16}, Precision{DType::f16, DType::f32}})
      for (const float fault : {std::numeric_limits<float>::infinity(), std::nanf("")})
        lab::group(ranks, [&](Communicator& comm) {
          ScaledRank r(kind, precision, comm);
          EXPECT_FALSE(r.update(1).skipped);
          const std::vector<float> before = r.values();
          EXPECT_TRUE(r.update(comm.rank() == 1 ? fault : 1).skipped)
              << name(kind) << ", rank " << comm.rank();
          EXPECT_EQ(r.values(), before) << name(kind) << ", rank " << comm.rank();
          EXPECT_EQ(r.scaler.scale(), 128);
          EXPECT_EQ(r.scaler.skipped(), 1);
          EXPECT_FALSE(r.update(1).skipped);
          EXPECT_NE(r.values(), before);
          EXPECT_EQ(r.optimizer->updates(), 2);
          comm.barrier().wait();
        });
}

TEST(HostPrecision, WorkingValuesAreTheRoundedMasters) {
  for (const StrategyKind kind : lab::strategies)
    for (const DType t : {DType::bf16, DType::f16})
      lab::group(2, [&](Communicator& comm) {
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
  lab::group(1, [](Communicator& comm) {
    Gpt2 model({.n_layer = 1, .n_head = 2, .n_embd = 16, .n_positions = tokens, .vocab_size = 32});
    for (const Precision& p : {Precision{DType::bf16, DType::f16}, Precision{DType::f64, DType::f32},
                               Precision{DType::f32, DType::bf16}})
      EXPECT_THROW(make_strategy(StrategyKind::ddp, model, comm, {.precision = p}), Error);
  });
}

}  // namespace
}  // namespace rz::test
