#pragma once
/// What the tests of strategies share: the list of all strategies, and exact data for ToyModel.

#include <algorithm>
#include <memory>
#include <vector>

#include "sharding/optim/optimizers.h"
#include "sharding/strategy/strategy.h"
#include "tests/support/toy_model.h"

namespace rz::test {

inline constexpr StrategyKind kinds[] = {StrategyKind::ddp, StrategyKind::zero1, StrategyKind::zero2,
                                         StrategyKind::zero3};

/// Small dyadic numbers, never 0.
inline float initial_value(std::size_t parameter, std::size_t i) {
  return static_cast<float>(static_cast<int>((parameter * 5 + i) % 8) - 4 + (i % 8 < 4 ? 0.5 : 1)) / 4;
}
/// The datum of a sample; summed over 1, 2, 3 or 4 ranks it can be divided by their number exactly.
inline float datum(std::size_t parameter, std::size_t i, int sample, int step) {
  return static_cast<float>((parameter + i + static_cast<std::size_t>(sample * 3 + step)) % 3) * 12;
}

inline std::vector<float> values_of(Strategy& strategy, const Parameter& p) {
  const Tensor value = strategy.values().whole(p);
  return {value.data<float>(), value.data<float>() + value.count()};
}

/// A rank's strategy with its model and optimizer, and updates of them.
struct Replica {
  Replica(StrategyKind kind, const Mesh& mesh) : strategy(make_strategy(kind, model, mesh)) {
    strategy->attach(tape);
  }
  void fill(const char* parameter, float other) {
    strategy->values().fill([&](const Parameter& p, Range r, float* out) {
      std::fill_n(out, r.count(), p.name == parameter ? other : 1.0f);
    });
  }
  void update() {
    strategy->zero_grad();
    strategy->begin_backward();
    tape.backward(model.loss(tape, [](std::size_t, std::size_t) { return 1.0f; }));
    tape.reset();
    strategy->finish_gradients();
    strategy->step(*optimizer);
  }
  ToyModel model{initial_value};
  Tape tape;
  std::unique_ptr<Strategy> strategy;
  std::unique_ptr<Optimizer> optimizer = make_sgd({});
};

}  // namespace rz::test
