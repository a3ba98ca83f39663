/// A weighted sum of losses: its gradient is that of the sum of the means over all micro-batches and ranks,
/// if the numbers of terms have one ratio in all of them.
#include <gtest/gtest.h>

#include <cmath>
#include <numeric>
#include <vector>

#include "autograd_lite/losses.h"
#include "autograd_lite/nn/init.h"
#include "autograd_lite/nn/layers.h"
#include "sharding/optim/optimizers.h"
#include "sharding/strategy/strategy.h"
#include "tests/lab/group.h"

namespace rz {
namespace {

constexpr std::size_t in = 5, out = 7, weights = in * out;
constexpr double alpha = 0.3, beta = 1.6;

float sample(std::size_t k, std::size_t i) {
  return static_cast<float>(2 * random_uniform(3, "x", k * in + i) - 1);
}
float teacher(std::size_t k, std::size_t o) {
  return static_cast<float>(3 * random_uniform(5, "y", k * out + o));
}
float initial(std::size_t i) { return static_cast<float>(random_uniform(4, "w", i) - 0.5); }
/// Every third sample has no label.
bool labelled(std::size_t k) { return k % 3 != 1; }
std::int32_t label(std::size_t k) { return labelled(k) ? static_cast<std::int32_t>(k * 5 % out) : -100; }

struct Net : Module {
  Net() {
    layer.weight.value = Tensor::empty(layer.weight.shape);
    for (std::size_t i = 0; i < weights; ++i) layer.weight.value.data<float>()[i] = initial(i);
  }
  nn::Linear layer{*this, "layer", in, out, nn::WeightLayout::out_in, false};
};

/// Samples [first, first + count).
struct Batch {
  Batch(std::size_t first, std::size_t count)
      : x(Tensor::empty({count, in})),
        y(Tensor::empty({count, out})),
        targets(Tensor::empty({count}, DType::i32)) {
    for (std::size_t r = 0; r < count; ++r) {
      for (std::size_t i = 0; i < in; ++i) x.data<float>()[r * in + i] = sample(first + r, i);
      for (std::size_t o = 0; o < out; ++o) y.data<float>()[r * out + o] = teacher(first + r, o);
      targets.data<std::int32_t>()[r] = label(first + r);
    }
  }
  Tensor x, y, targets;
};

/// Which losses are summed: those of rows and of elements, or two of the same targets, of which some are
/// ignored.
enum class Pair { rows_and_elements, same_targets };

nn::Loss loss_of(Pair pair, Tape& tape, Var logits, const Batch& batch) {
  const ops::LabelLoss smooth{.label_smoothing = 0.5f};
  if (pair == Pair::same_targets)
    return alpha * nn::cross_entropy(tape, logits, batch.targets) +
           beta * nn::cross_entropy(tape, logits, batch.targets, smooth);
  const ops::SoftLoss soft{.targets = ops::SoftLoss::logits};
  return alpha * nn::kl_div(tape, logits, batch.y, soft) + beta * nn::squared_error(tape, logits, batch.y);
}

struct Softmax {
  explicit Softmax(const double* x) {
    double total = 0;
    for (std::size_t o = 0; o < out; ++o) total += p[o] = std::exp(x[o]);
    for (double& e : p) e /= total;
  }
  double p[out];
};

/// d loss / d logits of sample k, times the number of samples or of labels.
std::vector<double> logit_gradient(Pair pair, std::size_t k, const double* logits) {
  std::vector<double> g(out);
  double y[out];
  for (std::size_t o = 0; o < out; ++o) y[o] = static_cast<double>(teacher(k, o));
  const Softmax p(logits), q(y);
  for (std::size_t o = 0; o < out; ++o) {
    const double hot = static_cast<std::int32_t>(o) == label(k) ? 1 : 0, even = 1.0 / out;
    if (pair == Pair::rows_and_elements)
      g[o] = alpha * (p.p[o] - q.p[o]) + beta * 2 * (logits[o] - y[o]) / out;
    else if (labelled(k))
      g[o] = alpha * (p.p[o] - hot) + beta * (p.p[o] - 0.5 * hot - 0.5 * even);
  }
  return g;
}

/// Of the sum of the means over samples [0, count), in double.
std::vector<double> gradient(Pair pair, std::size_t count) {
  std::vector<double> g(weights);
  double terms = 0;
  for (std::size_t k = 0; k < count; ++k) {
    terms += pair == Pair::rows_and_elements || labelled(k);
    double logits[out] = {};
    for (std::size_t o = 0; o < out; ++o)
      for (std::size_t i = 0; i < in; ++i)
        logits[o] += static_cast<double>(initial(o * in + i)) * static_cast<double>(sample(k, i));
    const std::vector<double> d = logit_gradient(pair, k, logits);
    for (std::size_t o = 0; o < out; ++o)
      for (std::size_t i = 0; i < in; ++i) g[o * in + i] += d[o] * static_cast<double>(sample(k, i));
  }
  for (double& e : g) e /= terms;
  return g;
}

/// Samples of each micro-batch, by rank.
using Samples = std::vector<std::vector<std::size_t>>;

std::vector<float> train(StrategyKind kind, Pair pair, const Samples& samples, Communicator& comm) {
  Net net;
  const auto strategy = make_strategy(kind, net, comm);
  Tape tape;
  strategy->attach(tape);
  strategy->settings().set_expected_terms(10);
  std::size_t first = 0;
  for (int r = 0; r < comm.rank(); ++r) {
    const auto& before = samples[static_cast<std::size_t>(r)];
    first = std::accumulate(before.begin(), before.end(), first);
  }
  const auto& own = samples[static_cast<std::size_t>(comm.rank())];
  strategy->zero_grad();
  for (std::size_t m = 0; m < own.size(); first += own[m++]) {
    const Batch batch(first, own[m]);
    strategy->backward(tape, loss_of(pair, tape, net.layer(tape, batch.x), batch), m + 1 == own.size());
    tape.reset();
  }
  strategy->finish_gradients();
  strategy->clip_and_step(*make_sgd({.learning_rate = 1}), {});
  const Tensor value = strategy->values().whole(net.layer.weight);
  return {value.data<float>(), value.data<float>() + value.count()};
}

TEST(LossSums, UnevenRanksHaveTheGradientOfOne) {
  for (const Pair pair : {Pair::rows_and_elements, Pair::same_targets})
    for (const Samples& samples :
         {Samples{{21}}, {{1}, {20}}, {{5, 2, 3}, {1, 9, 7}}, {{2, 9}, {17, 1}, {4, 2}}}) {
      std::size_t count = 0;
      for (const auto& rank : samples) count = std::accumulate(rank.begin(), rank.end(), count);
      const std::vector<double> g = gradient(pair, count);
      const int ranks = static_cast<int>(samples.size());
      lab::group(ranks, [&](Communicator& comm) {
        const std::vector<float> ddp = train(StrategyKind::ddp, pair, samples, comm);
        for (std::size_t i = 0; i < weights; ++i)
          EXPECT_NEAR(static_cast<double>(ddp[i]), static_cast<double>(initial(i)) - g[i], 1e-6) << i;
        for (const StrategyKind kind : {StrategyKind::zero1, StrategyKind::zero2, StrategyKind::zero3})
          EXPECT_TRUE(train(kind, pair, samples, comm) == ddp) << name(kind) << " on rank " << comm.rank();
      });
    }
}

}  // namespace
}  // namespace rz
