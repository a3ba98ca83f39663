/// Gradients are means over all terms of the loss, however they are spread over micro-batches and ranks; and
/// several losses of a micro-batch add up with its weight.
#include <gtest/gtest.h>

#include <cmath>
#include <numeric>
#include <vector>

#include "autograd_lite/losses.h"
#include "autograd_lite/nn/init.h"
#include "autograd_lite/nn/layers.h"
#include "sharding/engine/engine.h"
#include "sharding/engine/reports/step_monitor.h"
#include "sharding/optim/optimizers.h"
#include "sharding/strategy/strategy.h"
#include "tests/lab/training.h"
#include "tests/support/error_of.h"

namespace rz {
namespace {

constexpr std::size_t rows = 64, in = 5, out = 7;
using lab::values_of;

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

/// A loss of `count` samples from a number on: cross entropy, one term per sample; the sum of squared logits,
/// a term a logit; their mean, a scalar.
struct Part {
  enum Kind { labels, squares, scalar } kind;
  std::size_t count;
  std::size_t first = 0;
};
/// The gradient of the mean over its terms, in double, by weight [out, in].
std::vector<double> mean_gradient(const Part& part) {
  std::vector<double> g(in * out);
  for (std::size_t k = part.first; k < part.first + part.count; ++k) {
    double logit[out] = {}, total = 0;
    for (std::size_t o = 0; o < out; ++o) {
      for (std::size_t i = 0; i < in; ++i)
        logit[o] += initial(o * in + i) * static_cast<double>(static_cast<float>(sample(k, i)));
      total += std::exp(logit[o]);
    }
    for (std::size_t o = 0; o < out; ++o) {
      const double d = part.kind == Part::labels
                           ? std::exp(logit[o]) / total - (static_cast<std::size_t>(label(k)) == o)
                           : 2 * logit[o] / static_cast<double>(out);
      for (std::size_t i = 0; i < in; ++i)
        g[o * in + i] +=
            d * static_cast<double>(static_cast<float>(sample(k, i))) / static_cast<double>(part.count);
    }
  }
  return g;
}

/// Of the labels of samples [0, count).
std::vector<double> mean_gradient(std::size_t count) { return mean_gradient(Part{Part::labels, count}); }

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
enum class How { clip_and_step, clip_then_step, step };

struct Setting {
  double expected = 1, loss_scale = 1, max_norm = 0;
  How update = How::clip_and_step;
  bool synchronise_always = false;
  /// Of samples [first, first + count).
  std::function<nn::Loss(Tape&, Net&, std::size_t first, std::size_t count)> loss =
      [](Tape& tape, Net& net, std::size_t first, std::size_t count) {
        const Batch batch(first, count);
        return nn::cross_entropy(tape, net.layer(tape, batch.x), batch.targets);
      };
};

struct Result {
  double norm = 0;
  std::vector<float> values;
  bool operator==(const Result&) const = default;
};

void step(Strategy& strategy, const Setting& run, double& norm) {
  const auto sgd = make_sgd({.learning_rate = 1});
  if (run.update == How::clip_and_step) {
    strategy.clip_and_step(*sgd, {.max_norm = run.max_norm});
    norm = strategy.outcome(*sgd).norm;
    return;
  }
  if (run.update == How::clip_then_step) norm = strategy.clip_gradients(run.max_norm);
  strategy.step(*sgd);
  if (run.update == How::step) norm = strategy.gradient_norm();
}

Result train(StrategyKind kind, const Terms& terms, const Setting& run, Communicator& comm) {
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
    strategy->backward(tape, run.loss(tape, net, first, own[m]),
                       run.synchronise_always || m + 1 == own.size());
    tape.reset();
    if (run.synchronise_always || m + 1 == own.size()) strategy->finish_gradients();
  }
  Result result;
  step(*strategy, run, result.norm);
  result.values = values_of(*strategy, net);
  return result;
}

void expect_mean_over_terms(const Terms& terms, const Setting& run) {
  std::size_t count = 0;
  for (const auto& rank : terms) count = std::accumulate(rank.begin(), rank.end(), count);
  const std::vector<double> g = mean_gradient(count);
  const double norm = norm_of(g);
  const double clip = run.max_norm > 0 ? std::min(1.0, run.max_norm / (norm + 1e-6)) : 1;
  const int ranks = static_cast<int>(terms.size());
  lab::group(ranks, [&](Communicator& comm) {
    const Result ddp = train(StrategyKind::ddp, terms, run, comm);
    EXPECT_NEAR(ddp.norm, norm, 2e-6 * norm);
    for (std::size_t i = 0; i < g.size(); ++i)
      EXPECT_NEAR(ddp.values[i], initial(i) - clip * g[i], 1e-6) << i;
    for (const StrategyKind kind : lab::strategies)
      EXPECT_TRUE(train(kind, terms, run, comm) == ddp) << name(kind) << " on rank " << comm.rank();
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
    for (const How update : {How::clip_and_step, How::clip_then_step})
      for (const double factor : {0.5, 2.0})
        expect_mean_over_terms(terms, {.expected = 128, .max_norm = factor * norm, .update = update});
}

TEST(LossTerms, EveryWayToUpdateAppliesIt) {
  expect_mean_over_terms(spread, {.expected = 3, .loss_scale = 1024, .update = How::step});
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
  for (const StrategyKind kind : lab::strategies) {
    const Result result = train(kind, {{0}}, {.expected = 64, .max_norm = 1}, comm);
    EXPECT_EQ(result.norm, 0);
    for (std::size_t i = 0; i < in * out; ++i) EXPECT_EQ(result.values[i], static_cast<float>(initial(i)));
  }
}

// ---- sums of losses

constexpr double alpha = 0.3, beta = 1.6;

float teacher(std::size_t k, std::size_t o) {
  return static_cast<float>(3 * random_uniform(5, "y", k * out + o));
}
/// Every third sample has no label.
bool labelled(std::size_t k) { return k % 3 != 1; }

/// Which losses are summed: those of rows and of elements, or two of the same targets, of which some are
/// ignored.
enum class Pair { rows_and_elements, same_targets };

nn::Loss loss_of(Pair pair, Tape& tape, Net& net, std::size_t first, std::size_t count) {
  const Tensor x = Tensor::empty({count, in}), y = Tensor::empty({count, out}),
               targets = Tensor::empty({count}, DType::i32);
  for (std::size_t r = 0; r < count; ++r) {
    for (std::size_t i = 0; i < in; ++i)
      x.data<float>()[r * in + i] = static_cast<float>(sample(first + r, i));
    for (std::size_t o = 0; o < out; ++o) y.data<float>()[r * out + o] = teacher(first + r, o);
    targets.data<std::int32_t>()[r] = labelled(first + r) ? label(first + r) : -100;
  }
  const Var logits = net.layer(tape, x);
  const ops::LabelLoss smooth{.label_smoothing = 0.5f};
  if (pair == Pair::same_targets)
    return alpha * nn::cross_entropy(tape, logits, targets) +
           beta * nn::cross_entropy(tape, logits, targets, smooth);
  const ops::SoftLoss soft{.targets = ops::SoftLoss::logits};
  return alpha * nn::kl_div(tape, logits, y, soft) + beta * nn::squared_error(tape, logits, y);
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
std::vector<double> gradient_of(Pair pair, std::size_t count) {
  std::vector<double> g(in * out);
  double terms = 0;
  for (std::size_t k = 0; k < count; ++k) {
    terms += pair == Pair::rows_and_elements || labelled(k);
    double logits[out] = {};
    for (std::size_t o = 0; o < out; ++o)
      for (std::size_t i = 0; i < in; ++i)
        logits[o] += initial(o * in + i) * static_cast<double>(static_cast<float>(sample(k, i)));
    const std::vector<double> d = logit_gradient(pair, k, logits);
    for (std::size_t o = 0; o < out; ++o)
      for (std::size_t i = 0; i < in; ++i)
        g[o * in + i] += d[o] * static_cast<double>(static_cast<float>(sample(k, i)));
  }
  for (double& e : g) e /= terms;
  return g;
}

TEST(LossSums, UnevenRanksHaveTheGradientOfOne) {
  for (const Pair pair : {Pair::rows_and_elements, Pair::same_targets})
    for (const Terms& samples :
         {Terms{{21}}, {{1}, {20}}, {{5, 2, 3}, {1, 9, 7}}, {{2, 9}, {17, 1}, {4, 2}}}) {
      const Setting run{.expected = 10, .loss = [&](Tape& t, Net& net, std::size_t first, std::size_t count) {
                          return loss_of(pair, t, net, first, count);
                        }};
      std::size_t count = 0;
      for (const auto& rank : samples) count = std::accumulate(rank.begin(), rank.end(), count);
      const std::vector<double> g = gradient_of(pair, count);
      lab::group(static_cast<int>(samples.size()), [&](Communicator& comm) {
        const Result ddp = train(StrategyKind::ddp, samples, run, comm);
        for (std::size_t i = 0; i < g.size(); ++i)
          EXPECT_NEAR(static_cast<double>(ddp.values[i]), initial(i) - g[i], 1e-6) << i;
        for (const StrategyKind kind : lab::strategies)
          EXPECT_TRUE(train(kind, samples, run, comm) == ddp) << name(kind) << " on rank " << comm.rank();
      });
    }
}

// ---- several losses of a micro-batch

/// By rank, micro-batch and pass.
using Update = std::vector<std::vector<std::vector<Part>>>;

/// A micro-batch has the weight of its first loss with terms, or 1; each loss enters as its mean times that;
/// the update divides by all weights.
std::vector<double> by_the_rule(const Update& update) {
  std::vector<double> g(in * out);
  double weights = 0;
  for (const auto& rank : update)
    for (const auto& micro_batch : rank) {
      double weight = 1;
      for (auto part = micro_batch.rbegin(); part != micro_batch.rend(); ++part)
        if (part->kind != Part::scalar)
          weight = static_cast<double>(part->count * (part->kind == Part::squares ? out : 1));
      weights += weight;
      for (const Part& part : micro_batch) {
        const std::vector<double> mean = mean_gradient(part);
        for (std::size_t i = 0; i < g.size(); ++i) g[i] += weight * mean[i];
      }
    }
  for (double& e : g) e /= weights;
  return g;
}

template <class F>
void with_loss(Tape& tape, Net& net, const Part& part, const F& use) {
  const Batch batch(part.first, part.count);
  if (part.kind == Part::labels) return use(nn::cross_entropy(tape, net.layer(tape, batch.x), batch.targets));
  const Tensor x = batch.x.view((rows - part.count) * in, {part.count, in}),
               zero = Tensor::zeros({part.count, out});
  if (part.kind == Part::squares) return use(nn::squared_error(tape, net.layer(tape, x), zero));
  use(nn::mse(tape, net.layer(tape, x), zero));
}

/// After an update of another number of terms, which must not matter.
Result train_parts(World& world, int stage, const Update& update) {
  const auto& own = update[static_cast<std::size_t>(world.rank())];
  Net net;
  Engine engine =
      initialize(world, net,
                 {.config = concat(R"({"train_micro_batch_size_per_gpu": 1, "gradient_clipping": 0,
                        "optimizer": {"type": "SGD", "params": {"lr": 1}}, "zero_optimization": {"stage": )",
                                   stage, R"(, "stage3_param_persistence_threshold": 0},
                        "gradient_accumulation_steps": )",
                                   own.size(), "}"),
                  .log = nullptr});
  const auto run = [&](const std::vector<std::vector<Part>>& micro_batches) {
    for (const auto& micro_batch : micro_batches) {
      for (const Part& part : micro_batch)
        with_loss(engine.tape(), net, part, [&](const auto& loss) { engine.backward(loss); });
      engine.step();
    }
  };
  engine.optimizer().set_learning_rate(0);
  run(std::vector<std::vector<Part>>(own.size(), {{Part::labels, 37}}));
  engine.optimizer().set_learning_rate(1);
  run(own);
  return {engine.report().grad_norm, values_of(engine, net)};
}

TEST(LossesOfAMicroBatch, AddUpWithTheWeightOfTheFirstWithTerms) {
  constexpr Part a{Part::labels, 5}, other{Part::labels, 5, 30}, few{Part::labels, 1, 7},
      squares{Part::squares, 4, 3}, scalar{Part::scalar, 6, 11}, penalty{Part::scalar, 2},
      none{Part::labels, 0};
  const Update table[] = {
      {{{a}}},
      {{{a, other}}},
      {{{a, a}}},
      {{{a, squares}}},
      {{{squares, a}}},
      {{{squares, squares, few}}},
      {{{a, scalar}}},
      {{{few, scalar, penalty}}},
      {{{scalar}}},
      {{{scalar, penalty}}},
      {{{a, scalar, squares}}},
      {{{a, scalar}, {scalar}, {squares, few}}},
      {{{scalar}}, {{penalty}}},
      {{{a, squares}}, {{few, squares}}},
      {{{none, scalar}}, {{a, scalar}}},
      {{{none, squares}}, {{few, scalar}}},
      {{{scalar}}, {{a}}},
      {{{a, scalar}, {few, few}}, {{scalar, penalty}, {squares, a}}, {{none, few}, {other, scalar}}}};
  for (const Update& update : table) {
    const std::vector<double> g = by_the_rule(update);
    const int ranks = static_cast<int>(update.size());
    lab::world(ranks, [&](World& world) {
      SCOPED_TRACE(concat("case ", &update - table, " on rank ", world.rank()));
      const Result ddp = train_parts(world, 0, update);
      EXPECT_NEAR(ddp.norm, norm_of(g), 3e-6 * norm_of(g));
      for (std::size_t i = 0; i < g.size(); ++i)
        EXPECT_NEAR(static_cast<double>(ddp.values[i]), initial(i) - g[i], 1e-6) << i;
      for (const int stage : {1, 2, 3})
        EXPECT_TRUE(train_parts(world, stage, update) == ddp) << "stage " << stage;
    });
  }
}

/// The scale, and what the terms are expected to be, are in the factors of all losses.
TEST(LossesOfAMicroBatch, ContainTheLossScale) {
  auto comm = Communicator::connect(0, 1, memory_store());
  const std::vector<Part> parts{{Part::labels, 5}, {Part::squares, 4}, {Part::scalar, 6}};
  Net net;
  const auto strategy = make_strategy(StrategyKind::zero1, net, comm);
  Tape tape;
  strategy->attach(tape);
  strategy->settings().set_expected_terms(3);
  strategy->settings().set_loss_scale(1024);
  for (std::size_t p = 0; p < parts.size(); ++p) {
    with_loss(tape, net, parts[p], [&](const auto& loss) { strategy->backward(tape, loss, p == 2, p > 0); });
    tape.reset();
  }
  strategy->finish_gradients();
  const double norm = norm_of(by_the_rule({{parts}}));
  EXPECT_NEAR(strategy->gradient_norm(), norm, 2e-6 * norm);
}

TEST(LossesOfAMicroBatch, AScalarBeforeALossWithTermsIsRefused) {
  lab::world(2, [&](World& world) {
    for (const int stage : {0, 1, 2, 3}) {
      const Part scalar{Part::scalar, 3}, labels{Part::labels, 4};
      const Error e = test::error_of([&] {
        train_parts(world, stage, {{{scalar, labels}}, {{scalar, labels}}});
      });
      EXPECT_EQ(e.code(), Errc::invalid_argument);
      EXPECT_NE(std::string(e.what()).find("a + b"), std::string::npos) << e.what();
    }
  });
}

/// Whose losses have no weights.
TEST(LossesOfAMicroBatch, AreNotMixedWithPassesOfTheTapeAlone) {
  auto comm = Communicator::connect(0, 1, memory_store());
  Net net;
  const auto strategy = make_strategy(StrategyKind::ddp, net, comm);
  Tape tape;
  strategy->attach(tape);
  const auto by_strategy = [&] {
    with_loss(tape, net, {Part::labels, 4}, [&](const auto& loss) { strategy->backward(tape, loss, false); });
    tape.reset();
  };
  by_strategy();
  EXPECT_EQ(test::error_of([&] { strategy->begin_backward(); }).code(), Errc::invalid_argument);
  strategy->zero_grad();
  strategy->begin_backward(false);
  EXPECT_EQ(test::error_of(by_strategy).code(), Errc::invalid_argument);
}

/// A sum of a loss with terms and a scalar, in both orders, has the bits of the two propagated in turn.
TEST(LossesOfAMicroBatch, AddAScalarToALossWithTerms) {
  constexpr Part losses[] = {{Part::labels, 5}, {Part::squares, 4, 3}, {Part::labels, 0}};
  for (const int stage : {0, 1, 2, 3})
    lab::world(2, [&](World& world) {
      enum Order { in_turn, loss_first, scalar_first };
      const auto run = [&](Order order) {
        Net net;
        Engine engine =
            initialize(world, net,
                       {.config = concat(R"({"train_micro_batch_size_per_gpu": 1, "gradient_clipping": 0,
                "gradient_accumulation_steps": 3, "optimizer": {"type": "SGD", "params": {"lr": 1}},
                "zero_optimization": {"stage": )",
                                         stage, "}}"),
                        .log = nullptr});
        Tape& t = engine.tape();
        std::vector<double> reported;
        for (const Part& part : losses) {
          const auto scalar = [&] {
            const Var weight = t.parameter(net.layer.weight);
            return nn::mse(t, weight, Tensor::zeros(net.layer.weight.shape));
          };
          with_loss(t, net, part, [&](const auto& loss) {
            if constexpr (std::is_same_v<std::decay_t<decltype(loss)>, nn::Loss>) {
              if (order == in_turn) {
                engine.backward(loss);
                engine.backward(scalar());
              } else {
                const Var b = scalar();
                const nn::Loss sum = order == loss_first ? loss + b : b + loss;
                const Mean a = engine.item(loss), all = engine.item(sum);
                EXPECT_EQ(all.count, a.count);
                EXPECT_NEAR(all.sum, a.sum + a.count * engine.item(b).sum, 1e-12 * (1 + all.sum));
                engine.backward(sum);
              }
            }
          });
          engine.step();
        }
        return values_of(engine, net);
      };
      const std::vector<float> expected = run(in_turn), first = run(loss_first);
      EXPECT_EQ(run(scalar_first), first);
      for (std::size_t i = 0; i < expected.size(); ++i) EXPECT_NEAR(first[i], expected[i], 2e-7) << i;
    });
}

TEST(LossesOfAMicroBatch, AddNoTensorToALoss) {
  Tape tape;
  Net net;
  const Batch batch(0, 4);
  const Var logits = net.layer(tape, batch.x);
  const Error e = test::error_of([&] { nn::cross_entropy(tape, logits, batch.targets) + logits; });
  EXPECT_EQ(e.code(), Errc::invalid_argument);
  EXPECT_NE(std::string(e.what()).find("expected a scalar"), std::string::npos) << e.what();
}

/// As functions that record a loss return it.
TEST(LossesOfAMicroBatch, AScalarIsALossWithoutTerms) {
  Tape tape;
  Net net;
  const Batch batch(0, 4);
  const Var logits = net.layer(tape, batch.x), mean = nn::mean(tape, logits);
  const double value = *tape.value(mean).data<float>();
  const auto expect = [&](const nn::Loss& loss, double sum, std::size_t count, bool has_terms) {
    const ops::LossSum read = loss.read({});
    EXPECT_NEAR(read.sum, sum, 1e-5 * std::abs(sum));
    EXPECT_EQ(read.count, count);
    EXPECT_EQ(loss.has_terms(), has_terms);
  };
  const nn::Loss scalar = mean, labels = nn::cross_entropy(tape, logits, batch.targets);
  const double sum = labels.read({}).sum;
  expect(scalar, value, 1, false);
  expect(3 * scalar, 3 * value, 1, false);
  expect(scalar + mean, 2 * value, 1, false);
  expect(labels + scalar * 0.5, sum + 2 * value, 4, true);
  expect(mean + labels, sum + 4 * value, 4, true);
  expect(0.0 * labels + mean, 4 * value, 4, true);  // the terms of another loss
  EXPECT_EQ(test::error_of([&] { nn::Loss(logits).read({}); }).code(), Errc::invalid_argument);
  EXPECT_EQ(test::error_of([&] { nn::Loss().read({}); }).code(), Errc::invalid_argument);
}

// ---- of engines

using lab::batch;
using lab::Mlp;

/// Momentum and weight decay would move the parameters.
TEST(TermsOfAnEngine, AnUpdateWithoutTermsIsSkipped) {
  const std::unique_ptr<std::FILE, int (*)(std::FILE*)> log(std::tmpfile(), std::fclose);
  lab::world(2, [&](World& world) {
    for (const int stage : {0, 1, 2, 3})
      for (const char* precision : {"", R"(, "fp16": {"enabled": true, "initial_scale_power": 8})"}) {
        Mlp net;
        auto o =
            lab::options(concat(R"({"train_micro_batch_size_per_gpu": 4, "zero_optimization": {"stage": )",
                                stage, R"(}, "optimizer": {"type": "SGD", "params": {"lr": 0.5,
                        "momentum": 0.9, "weight_decay": 0.1}}, "ringzero": {"max_skipped_updates": 3})",
                                precision, "}"));
        const bool logs = stage == 0 && *precision == 0;
        if (logs) o.log = log.get();
        auto engine = initialize(world, net, std::move(o));
        const auto update = [&](bool terms) {
          const rz::Batch b = batch(0);
          if (!terms || world.rank() == 1) std::fill_n(b["y"].data<std::int32_t>(), 4, -100);
          engine.backward(net(engine.tape(), b));
          engine.step();
        };
        update(true);
        EXPECT_FALSE(engine.report().skipped);
        const std::vector<float> before = values_of(engine, net);
        const double scale = engine.report().loss_scale;
        for (int i = 1; i < 3; ++i) {
          update(false);
          EXPECT_TRUE(engine.report().skipped);
          EXPECT_TRUE(engine.report().without_terms);
          EXPECT_EQ(engine.report().skipped_steps, i);
          EXPECT_EQ(engine.report().grad_norm, 0);
        }
        const Error e = test::error_of([&] { update(false); });
        EXPECT_EQ(e.code(), Errc::diverged);
        EXPECT_NE(std::string(e.what()).find("no update was made in 3 updates in a row"), std::string::npos)
            << e.what();
        EXPECT_EQ(values_of(engine, net), before);
        EXPECT_EQ(engine.optimizer().updates(), 1);
        update(true);
        EXPECT_FALSE(engine.report().without_terms);
        EXPECT_EQ(engine.report().loss_scale, scale);
        EXPECT_NE(values_of(engine, net), before);
      }
  });
  std::rewind(log.get());
  std::string printed(100'000, '\0');
  printed.resize(std::fread(printed.data(), 1, printed.size(), log.get()));
  const std::size_t line = printed.find("warning: step 2: no rank has counted a term");
  EXPECT_NE(line, std::string::npos) << printed;
  EXPECT_EQ(printed.find("no rank has counted", line + 40), std::string::npos) << printed;
}

TEST(TermsOfAnEngine, AScalarLossIsReportedAsOneTermOfEachPass) {
  lab::world(2, [](World& world) {
    Mlp net;
    net.eval();
    auto engine = initialize(world, net, lab::options(R"({"train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": 2, "optimizer": {"type": "SGD"}})"));
    std::vector<Mean> losses;
    for (int m = 0; m < 2; ++m) {
      const rz::Batch b = batch(static_cast<std::uint64_t>(2 * m + world.rank()));
      Tape& t = engine.tape();
      const Var loss = nn::mse(t, net(t, b["x"]), Tensor::zeros({4, 5}));
      losses.push_back(engine.item(loss));
      engine.backward(loss);
      engine.step();
    }
    EXPECT_EQ(engine.loss(), engine.mean(losses));
    const Tensor counts = Tensor::zeros({2}, DType::f64);
    counts.data<double>()[0] = 3, counts.data<double>()[1] = 4;
    EXPECT_EQ(engine.item(counts).value(), 0.75);
    EXPECT_STREQ(test::error_of([&] { engine.item(Tensor::zeros({2})); }).what(),
                 "item() of a tensor of f32 and shape [2], expected f64 [2], a sum and its number of terms");
    EXPECT_EQ(step_line({}, std::nullopt), "step 1: loss without terms, lr 0, grad_norm 0, 0.0 ms");
    EXPECT_EQ(step_line({}, Mean{-NAN, 2}.value()), "step 1: loss nan, lr 0, grad_norm 0, 0.0 ms");
  });
}

}  // namespace
}  // namespace rz
