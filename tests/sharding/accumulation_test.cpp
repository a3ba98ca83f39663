/// Updates of several backward passes have the same bits in every strategy, wherever passes synchronise.
#include <gtest/gtest.h>

#include <vector>

#include "sharding/optim/optimizers.h"
#include "sharding/strategy/strategy.h"
#include "tests/lab/training.h"
#include "tests/support/toy_model.h"

namespace rz {
namespace {

using test::ToyModel;

/// Numbers where every rounding shows.
float noise(std::size_t p, std::size_t i, std::size_t seed) {
  const std::size_t k = (p * 131 + i * 17 + seed * 7919 + 3) * 2654435761u % 1000003u;
  return static_cast<float>(k) / 700001.0f - 0.7f;
}

/// Whether each pass of an update synchronises.
using Passes = std::vector<bool>;

struct Trained {
  std::vector<double> norms;
  std::vector<float> values;
  bool operator==(const Trained&) const = default;
};

Trained train(StrategyKind kind, const std::vector<Passes>& updates, const StrategyOptions& options,
              Communicator& comm) {
  ToyModel model([](std::size_t p, std::size_t i) { return noise(p, i, 99); });
  const auto strategy = make_strategy(kind, model, comm, options);
  Tape tape;
  strategy->attach(tape);
  const auto adamw = make_adamw({.learning_rate = 0.05});
  Trained out;
  std::size_t seed = 0;
  for (const Passes& passes : updates) {
    strategy->zero_grad();
    for (const bool synchronise : passes) {
      const auto rank = static_cast<std::size_t>(comm.rank());
      const Var loss = model.loss(
          tape, [&](std::size_t p, std::size_t i) { return noise(p, i, seed + rank); }, seed % 16 != 8);
      seed += 8;
      strategy->begin_backward(synchronise);
      tape.backward(loss, 0.3f);
      tape.reset();
      if (synchronise) strategy->finish_gradients();
    }
    out.norms.push_back(strategy->gradient_norm());
    strategy->step(*adamw);
  }
  out.values = lab::values_of(*strategy, model);
  return out;
}

class Accumulation : public testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Ranks, Accumulation, testing::Values(1, 2, 3, 4));

TEST_P(Accumulation, HasTheSameBitsWhereverPassesSynchronise) {
  const std::vector<std::vector<Passes>> patterns{{{true}, {true, true}, {true, true, true}},
                                                  {{false, true, true}, {true, false, true}},
                                                  {{true, true}, {true}, {false, true}}};
  lab::group(GetParam(), [&](Communicator& comm) {
    for (const auto& updates : patterns) {
      const Trained expected = train(StrategyKind::ddp, updates, {}, comm);
      for (const StrategyKind kind :
           {StrategyKind::ddp, StrategyKind::zero1, StrategyKind::zero2, StrategyKind::zero3})
        for (const bool overlap : {true, false})
          EXPECT_TRUE(train(kind, updates,
                            {.reduce_bucket_size = 225, .first_bucket_size = 75, .overlap_comm = overlap},
                            comm) == expected)
              << name(kind) << " on rank " << comm.rank();
    }
  });
}

}  // namespace
}  // namespace rz
