/// Gradients are means over all terms of the loss, however they are spread over micro-batches and ranks.
#include <gtest/gtest.h>

#include <cmath>
#include <numeric>
#include <vector>

#include "autograd_lite/nn/init.h"
#include "autograd_lite/nn/layers.h"
#include "sharding/optim/optimizers.h"
#include "sharding/strategies/strategy.h"
#include "tests/support/error_of.h"
#include "tests/support/ranks.h"

namespace rz {
namespace {

constexpr std::size_t rows = 64, in = 5, out = 7;
constexpr StrategyKind kinds[] = {StrategyKind::ddp, StrategyKind::zero1, StrategyKind::zero2,
                                  StrategyKind::zero3};

double sample(std::size_t k, std::size_t i) { return 2 * random_uniform(3, "x", k * in + i) - 1; }
std::int32_t label(std::size_t k) { return static_cast<std::int32_t>(k * 5 % out); }
double initial(std::size_t i) { return static_cast<float>(random_uniform(4, "w", i) - 0.5); }

struct Net : Module {
  Net() {
    layer.weight.value = Tensor::empty(layer.weight.shape);
    for (std::size_t i = 0; i < in * out; ++i)
      layer.weight.value.data<float>()[i] = static_cast<float>(initial(i));
  }
  nn::Linear layer{*this, "layer", in, out, nn::WeightLayout::out_in, false};
};

/// The gradient of the mean over `count` samples, in double, by weight [out, in].
std::vector<double> mean_gradient(std::size_t count) {
  std::vector<double> g(in * out);
  for (std::size_t k = 0; k < count; ++k) {
    double p[out], total = 0;
    for (std::size_t o = 0; o < out; ++o) {
      double logit = 0;
      for (std::size_t i = 0; i < in; ++i) logit += initial(o * in + i) * static_cast<float>(sample(k, i));
      total += p[o] = std::exp(logit);
    }
    for (std::size_t o = 0; o < out; ++o)
      for (std::size_t i = 0; i < in; ++i)
        g[o * in + i] += (p[o] / total - (static_cast<std::size_t>(label(k)) == o)) *
                         static_cast<float>(sample(k, i)) / static_cast<double>(count);
  }
  return g;
}

double norm_of(const std::vector<double>& g) {
  return std::sqrt(std::inner_product(g.begin(), g.end(), g.begin(), 0.0));
}

/// Samples [first, first + count) in a batch of `rows`; the other rows are ignored.
struct Batch {
  Batch(std::size_t first, std::size_t count) {
    for (std::size_t r = 0; r < rows; ++r) {
      const bool counts = r >= rows - count;
      const std::size_t k = counts ? first + r - (rows - count) : r + 1000;
      for (std::size_t i = 0; i < in; ++i) x.data<float>()[r * in + i] = static_cast<float>(sample(k, i));
      targets.data<std::int32_t>()[r] = counts ? label(k) : -100;
    }
  }
  Tensor x = Tensor::empty({rows, in}), targets = Tensor::empty({rows}, DType::i32);
};

/// Terms of each micro-batch, by rank.
using Terms = std::vector<std::vector<std::size_t>>;
enum class Update { clip_and_step, clip_then_step, step };

struct Run {
  double expected = 1, loss_scale = 1, max_norm = 0;
  Update update = Update::clip_and_step;
  bool synchronise_always = false;
};

struct Result {
  double norm = 0;
  std::vector<float> values;
  bool operator==(const Result&) const = default;
};

void step(Strategy& strategy, const Run& run, double& norm) {
  const auto sgd = make_sgd({.learning_rate = 1});
  if (run.update == Update::clip_and_step) {
    strategy.clip_and_step(*sgd, {.max_norm = run.max_norm});
    norm = strategy.outcome(*sgd).norm;
    return;
  }
  if (run.update == Update::clip_then_step) norm = strategy.clip_gradients(run.max_norm);
  strategy.step(*sgd);
  if (run.update == Update::step) norm = strategy.gradient_norm();
}

Result train(StrategyKind kind, const Terms& terms, const Run& run, Communicator& comm) {
  Net net;
  const auto strategy = make_strategy(kind, net, comm);
  Tape tape;
  strategy->attach(tape);
  strategy->settings().set_expected_terms(run.expected);
  strategy->settings().set_loss_scale(run.loss_scale);
  std::size_t first = 0;
  for (int r = 0; r < comm.rank(); ++r)
    first = std::accumulate(terms[static_cast<std::size_t>(r)].begin(),
                            terms[static_cast<std::size_t>(r)].end(), first);
  const auto& own = terms[static_cast<std::size_t>(comm.rank())];
  strategy->zero_grad();
  for (std::size_t m = 0; m < own.size(); first += own[m++]) {
    const Batch batch(first, own[m]);
    const nn::Loss loss = nn::cross_entropy(tape, net.layer(tape, batch.x), batch.targets);
    strategy->backward(tape, loss, run.synchronise_always || m + 1 == own.size());
    tape.reset();
    if (run.synchronise_always || m + 1 == own.size()) strategy->finish_gradients();
  }
  Result result;
  step(*strategy, run, result.norm);
  const Tensor value = strategy->values().whole(net.layer.weight);
  result.values.assign(value.data<float>(), value.data<float>() + value.count());
  return result;
}

void expect_mean_over_terms(const Terms& terms, const Run& run) {
  std::size_t count = 0;
  for (const auto& rank : terms) count = std::accumulate(rank.begin(), rank.end(), count);
  const std::vector<double> g = mean_gradient(count);
  const double norm = norm_of(g);
  const double clip = run.max_norm > 0 ? std::min(1.0, run.max_norm / (norm + 1e-6)) : 1;
  const int ranks = static_cast<int>(terms.size());
  test::run_ranks(ranks, [&](int rank, std::shared_ptr<Store> store) {
    auto comm = Communicator::connect(rank, ranks, std::move(store));
    const Result ddp = train(StrategyKind::ddp, terms, run, comm);
    EXPECT_NEAR(ddp.norm, norm, 2e-6 * norm);
    for (std::size_t i = 0; i < g.size(); ++i)
      EXPECT_NEAR(ddp.values[i], initial(i) - clip * g[i], 1e-6) << i;
    for (const StrategyKind kind : kinds)
      EXPECT_TRUE(train(kind, terms, run, comm) == ddp) << name(kind) << " on rank " << rank;
  });
}

const Terms one_rank{{64}}, uneven{{1}, {63}}, spread{{5, 0, 20}, {1, 31, 7}}, three{{0, 9}, {50, 1}, {2, 2}};

TEST(LossTerms, UnevenRanksHaveTheGradientOfOne) {
  for (const Terms& terms : {one_rank, uneven, spread, three})
    for (const double expected : {1.0, 64.0, 100.0}) expect_mean_over_terms(terms, {.expected = expected});
}

TEST(LossTerms, ClippingFollowsTheNormalisation) {
  const double norm = norm_of(mean_gradient(64));
  for (const Terms& terms : {one_rank, uneven, spread, three})
    for (const Update update : {Update::clip_and_step, Update::clip_then_step})
      for (const double factor : {0.5, 2.0})
        expect_mean_over_terms(terms, {.expected = 128, .max_norm = factor * norm, .update = update});
}

TEST(LossTerms, EveryWayToUpdateAppliesIt) {
  expect_mean_over_terms(spread, {.expected = 3, .loss_scale = 1024, .update = Update::step});
  expect_mean_over_terms(uneven, {.expected = 64, .loss_scale = 1024, .max_norm = 0.01});
}

TEST(LossTerms, SeveralSynchronisingPassesCountAll) {
  expect_mean_over_terms(spread, {.expected = 50, .synchronise_always = true});
  expect_mean_over_terms(three, {.expected = 64, .max_norm = 0.05, .synchronise_always = true});
}

TEST(LossTerms, AnUpdateStartsToCountAnew) {
  auto comm = Communicator::connect(0, 1, memory_store());
  Net net;
  const auto strategy = make_strategy(StrategyKind::zero1, net, comm);
  Tape tape;
  strategy->attach(tape);
  const auto pass = [&](std::size_t count) {
    const Batch batch(0, count);
    strategy->backward(tape, nn::cross_entropy(tape, net.layer(tape, batch.x), batch.targets));
    tape.reset();
  };
  pass(20);
  strategy->cancel_update();
  for (const std::size_t count : {64, 8}) {
    pass(count);
    strategy->finish_gradients();
    const double norm = norm_of(mean_gradient(count));
    EXPECT_NEAR(strategy->gradient_norm(), norm, 2e-6 * norm);
    EXPECT_NEAR(strategy->gradient_norm(), norm, 2e-6 * norm);  // reading changes nothing
    strategy->zero_grad();
  }
  EXPECT_EQ(test::error_of([&] { strategy->settings().set_expected_terms(0); }).code(),
            Errc::invalid_argument);
}

TEST(LossTerms, ALossWithoutTermsMovesNothing) {
  auto comm = Communicator::connect(0, 1, memory_store());
  for (const StrategyKind kind : kinds) {
    const Result result = train(kind, {{0}}, {.expected = 64, .max_norm = 1}, comm);
    EXPECT_EQ(result.norm, 0);
    for (std::size_t i = 0; i < in * out; ++i) EXPECT_EQ(result.values[i], static_cast<float>(initial(i)));
  }
}

}  // namespace
}  // namespace rz
