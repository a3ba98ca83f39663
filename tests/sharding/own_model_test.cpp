/// A model of a user's own, registered: every strategy finds its parameters and scopes.
#include <gtest/gtest.h>

#include <vector>

#include "autograd_lite/nn/containers.h"
#include "autograd_lite/nn/init.h"
#include "autograd_lite/nn/layers.h"
#include "sharding/optim/optimizers.h"
#include "sharding/strategy/strategy.h"
#include "tests/support/ranks.h"

namespace rz {
namespace {

constexpr std::size_t words = 11, channels = 8;

struct Net : Module {
  Net() {
    layers.append<nn::Linear>(channels, 2 * channels).append<nn::Gelu>();
    layers.append<nn::Linear>(2 * channels, channels);
  }
  /// The head reads the table outside of the layer that owns it.
  nn::Loss operator()(Tape& t, const Tensor& tokens, const Tensor& targets) {
    const Var x = drop(t, table(t, tokens));
    const Var y = norm.add_and_norm(t, x, layers(t, x)).norm;
    return nn::cross_entropy(
        t,
        table.in_scope(
            t, [&] { return nn::linear(t, y, t.parameter(table.weight), Var(), nn::WeightLayout::out_in); }),
        targets);
  }
  nn::Embedding table{*this, "table", words, channels, 0.5f};
  nn::Dropout drop{*this, "drop", 0.1};
  nn::Sequential layers{*this, "layers"};
  nn::LayerNorm norm{*this, "norm", channels};
};

struct Trained {
  std::vector<double> losses;
  std::vector<float> values;
  bool operator==(const Trained&) const = default;
};

Trained train(StrategyKind kind, Communicator& comm) {
  Net net;
  const auto strategy = make_strategy(kind, net, comm);
  strategy->values().fill([](const Parameter& p, Range elements, float* out) {
    init_slice(p, {out, elements.count()}, elements.begin, 1);
  });
  Tape tape;
  strategy->attach(tape);
  strategy->settings().set_expected_terms(24.0 * comm.size());
  const auto adamw = make_adamw({.learning_rate = 0.02});
  Tensor tokens = Tensor::empty({24}, DType::i32), targets = Tensor::empty({24}, DType::i32);
  for (std::size_t i = 0; i < 24; ++i) {
    tokens.data<std::int32_t>()[i] =
        static_cast<std::int32_t>((i + static_cast<std::size_t>(comm.rank())) % words);
    targets.data<std::int32_t>()[i] =
        (tokens.data<std::int32_t>()[i] * 3 + 1) % static_cast<std::int32_t>(words);
  }
  Trained out;
  for (std::uint64_t update = 0; update < 30; ++update) {
    strategy->zero_grad();
    tape.seed(update * 8 + static_cast<std::uint64_t>(comm.rank()));
    const nn::Loss loss = net(tape, tokens, targets);
    strategy->backward(tape, loss);
    out.losses.push_back(loss.read({}).sum);
    tape.reset();
    strategy->finish_gradients();
    strategy->clip_and_step(*adamw, {.max_norm = 1});
  }
  for (const Parameter* p : net.parameters()) {
    const Tensor value = strategy->values().whole(*p);
    out.values.insert(out.values.end(), value.data<float>(), value.data<float>() + value.count());
  }
  return out;
}

TEST(OwnModel, TrainsWithTheSameBitsInEveryStrategy) {
  test::run_ranks(2, [](int rank, std::shared_ptr<Store> store) {
    auto comm = Communicator::connect(rank, 2, std::move(store));
    const Trained expected = train(StrategyKind::ddp, comm);
    EXPECT_LT(expected.losses.back(), expected.losses.front() / 2);
    for (const StrategyKind kind : {StrategyKind::zero1, StrategyKind::zero2, StrategyKind::zero3})
      EXPECT_TRUE(train(kind, comm) == expected) << name(kind) << " on rank " << rank;
  });
}

}  // namespace
}  // namespace rz
