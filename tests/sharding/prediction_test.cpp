/// Predicted memory, and traffic: the formulas of the ZeRO paper where nothing is padded, and what strategies
/// hold and send.
#include "sharding/strategy/prediction.h"

#include <gtest/gtest.h>

#include <atomic>

#include "autograd_lite/element_ops.h"
#include "autograd_lite/ops.h"
#include "sharding/optim/optimizers.h"
#include "sharding/strategy/optimizer_state.h"
#include "sharding/strategy/strategy.h"
#include "tests/lab/training.h"
#include "tests/support/toy_training.h"

namespace rz {
namespace {

using test::kinds;
using test::ToyModel;

constexpr Precision f32{}, brain{DType::bf16, DType::bf16}, brain_f32{DType::bf16, DType::f32};

float one(std::size_t, std::size_t) { return 1; }

/// Four scopes of parameters that 1 to 4 ranks share out in blocks of 64.
class Even final : public Module {
 public:
  Even() {
    for (std::size_t i = 0; i < 4; ++i) {
      parameters_.push_back(std::make_unique<Parameter>());
      register_parameter(*parameters_.back(), concat("p", i), {i + 1, 768});
      scopes_.push_back(&register_scope(concat("s", i), {parameters_.back().get()}));
    }
  }
  Var loss(Tape& tape) {
    Var sum;
    for (std::size_t i = 0; i < 4; ++i) {
      Parameter& p = *parameters_[i];
      const Var term =
          tape.scope(*scopes_[i], [&] { return nn::mse(tape, tape.parameter(p), Tensor::zeros(p.shape)); });
      sum = i == 0 ? term : nn::add(tape, sum, term);
    }
    return sum;
  }
  static constexpr std::size_t elements = (1 + 2 + 3 + 4) * 768;

 private:
  std::vector<std::unique_ptr<Parameter>> parameters_;
  std::vector<const Scope*> scopes_;
};

/// Without `transient`, which is not predicted.
MemoryReport held(const Strategy& strategy) {
  MemoryReport r = strategy.memory();
  r.transient = r.transient_in_use = r.transient_peak = 0;
  return r;
}

/// Of a new strategy with optimizer state.
void expect_predicted_memory(StrategyKind kind, Module& module, Communicator& comm,
                             const Optimizer& optimizer, const StrategyOptions& options) {
  const MemoryReport predicted =
      predicted_memory(kind, module, optimizer, RankOf{comm.rank(), comm.size()}, options);
  const auto strategy = make_strategy(kind, module, comm, options);
  strategy->optimizer_state().fill(optimizer, [](const std::string&, const Parameter&, Range r, float* out) {
    std::fill_n(out, r.count(), 0.0f);
  });
  EXPECT_EQ(held(*strategy), predicted) << name(kind) << ": " << describe(predicted);
}

class Prediction : public testing::TestWithParam<int> {
 protected:
  std::size_t n() const { return static_cast<std::size_t>(GetParam()); }
};
INSTANTIATE_TEST_SUITE_P(Ranks, Prediction, testing::Values(1, 2, 3, 4));

// ---- the paper's formulas

TEST_P(Prediction, HoldsWhatThePaperSaysInMixedPrecision) {
  const std::size_t psi = Even::elements;
  const std::size_t expected[] = {16 * psi, 4 * psi + 12 * psi / n(), 2 * psi + 14 * psi / n(),
                                  16 * psi / n()};
  const auto adamw = make_adamw({});
  Even model;
  for (std::size_t k = 0; k < 4; ++k)
    EXPECT_EQ(predicted_memory(kinds[k], model, *adamw, RankOf{0, GetParam()}, {.precision = brain}).total(),
              expected[k])
        << name(kinds[k]);
}

TEST_P(Prediction, HoldsWhatThePaperSaysInF32) {
  const std::size_t psi = Even::elements;
  const std::size_t expected[] = {16 * psi, 8 * psi + 8 * psi / n(), 4 * psi + 12 * psi / n(),
                                  16 * psi / n()};
  const auto adamw = make_adamw({});
  Even model;
  for (std::size_t k = 0; k < 4; ++k)
    EXPECT_EQ(predicted_memory(kinds[k], model, *adamw, RankOf{0, GetParam()}).total(), expected[k]);
}

/// 2Ψ, 2Ψ, 2Ψ, 3Ψ in elements of 4 bytes, of which a rank sends (N - 1) / N.
TEST_P(Prediction, SendsWhatThePaperSays) {
  const std::size_t volumes[] = {2, 2, 2, 3};
  lab::group(GetParam(), [&](Communicator& comm) {
    for (std::size_t k = 0; k < 4; ++k)
      for (const bool small_buckets : {false, true}) {
        StrategyOptions o{.rebuild = false, .gathers = {.prefetch_bucket_size = 0}};
        if (small_buckets) o.reduce_bucket_size = o.first_bucket_size = 768;
        Even model;
        const auto strategy = make_strategy(kinds[k], model, comm, o);
        Tape tape;
        strategy->attach(tape);
        const auto sgd = make_sgd({});
        Traffic before;
        for (int update = 0; update < 2; ++update) {
          before = strategy->traffic().total();
          strategy->zero_grad();
          const Var loss = model.loss(tape);
          strategy->begin_backward();
          tape.backward(loss);
          tape.reset();
          strategy->finish_gradients();
          strategy->step(*sgd);
        }
        Traffic sent = strategy->traffic().total() - before;
        sent.control = {};
        EXPECT_EQ(sent.sent(comm.size()), volumes[k] * 4 * Even::elements / n() * (n() - 1))
            << name(kinds[k]);
      }
  });
}

// ---- what strategies hold

TEST_P(Prediction, IsWhatIsHeldWithoutPadding) {
  lab::group(GetParam(), [](Communicator& comm) {
    const auto adamw = make_adamw({});
    for (const StrategyKind kind : kinds)
      for (const Precision precision : {f32, brain, brain_f32}) {
        Even model;
        expect_predicted_memory(kind, model, comm, *adamw, {.precision = precision});
      }
  });
}

TEST_P(Prediction, IsWhatIsHeldWithPaddingAndFrozenAndPersistentValues) {
  lab::group(GetParam(), [](Communicator& comm) {
    const auto adamw = make_adamw({});
    for (const StrategyKind kind : kinds)
      for (const Precision precision : {f32, brain, brain_f32})
        for (const std::size_t bucket : {1u, 300u, 1u << 20})
          for (const std::size_t persistent : {0u, 21u, 1000u}) {
            ToyModel model(one);
            expect_predicted_memory(kind, model, comm, *adamw,
                                    {.reduce_bucket_size = bucket,
                                     .first_bucket_size = bucket,
                                     .precision = precision,
                                     .gathers = {.param_persistence_threshold = persistent}});
          }
  });
}

/// Groups with one state and with two, which end within the shard of some rank.
TEST_P(Prediction, IsWhatIsHeldByGroupsWithDifferentStates) {
  lab::group(GetParam(), [](Communicator& comm) {
    const auto muon = make_muon({}, muon_adam_options, [](const Parameter& p) {
      return p.name == "tied" || p.name == "first.weight";
    });
    for (const StrategyKind kind : kinds) {
      ToyModel model(one);
      expect_predicted_memory(kind, model, comm, *muon, {});
    }
  });
}

/// GPT-2 in bf16, whose tied embedding stands in the first and in the last scope.
TEST(PredictionOfGpt2, IsWhatIsHeld) {
  for (const StrategyKind kind : kinds)
    for (const Precision precision : {brain, brain_f32}) {
      lab::Run run{.model = lab::gpt(), .strategy = kind, .ranks = 2, .updates = 3};
      run.options = [&](EngineOptions& o) {
        o.ds_config->strategy.precision = precision;
        o.ds_config->strategy.rebuild = false;
      };
      StrategyOptions same;
      same.reduce_bucket_size = lab::Gpt().bucket, same.first_bucket_size = lab::Gpt().bucket / 4;
      same.precision = precision, same.rebuild = false;
      std::atomic<int> compared = 0;
      run.each = [&](Engine& engine, Module&) {
        Gpt2 shapes(lab::Gpt().config);
        EXPECT_EQ(held(engine.strategy()),
                  predicted_memory(kind, shapes, *make_adamw({}), RankOf{engine.world().rank(), 2}, same));
        EXPECT_NE(engine.strategy().traffic().total(), Traffic{});
        ++compared;
      };
      lab::train(run);
      EXPECT_EQ(compared, 2 * 3);
    }
}

}  // namespace
}  // namespace rz
