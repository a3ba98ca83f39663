/// Ranks with different numbers of batches.
#include "sharding/strategy/join.h"

#include <gtest/gtest.h>

#include <cmath>
#include <vector>

#include "autograd_lite/nn/layers.h"
#include "comm/core/error.h"
#include "sharding/optim/optimizers.h"
#include "sharding/strategy/strategy.h"
#include "tests/lab/group.h"
#include "tests/support/error_of.h"

namespace rz {
namespace {

constexpr StrategyKind joinable[] = {StrategyKind::ddp, StrategyKind::zero1, StrategyKind::zero2};
constexpr std::size_t rows = 4, in = 3, out = 5;

struct Net : Module {
  Net() {
    layer.weight.value = Tensor::zeros(layer.weight.shape);
    for (std::size_t i = 0; i < in * out; ++i)
      layer.weight.value.data<float>()[i] = static_cast<float>(i % 4) / 8;
  }
  nn::Linear layer{*this, "layer", in, out, nn::WeightLayout::out_in, false};
};

/// Batch `b` of a rank: `terms` of its rows count.
struct Batch {
  Batch(int rank, int b, std::size_t terms) {
    for (std::size_t i = 0; i < rows * in; ++i)
      x.data<float>()[i] =
          static_cast<float>((i * 5 + static_cast<std::size_t>(7 * rank + 3 * b)) % 8) / 4 - 1;
    for (std::size_t r = 0; r < rows; ++r)
      targets.data<std::int32_t>()[r] =
          r < terms ? static_cast<std::int32_t>((r + static_cast<std::size_t>(rank + b)) % out) : -100;
  }
  Tensor x = Tensor::empty({rows, in}), targets = Tensor::empty({rows}, DType::i32);
};

/// Rank r has r + 1 batches, of 1 to 4 terms.
int batches_of(int rank) { return rank + 1; }
std::size_t terms_of(int rank, int b) { return 1 + static_cast<std::size_t>(rank + b) % rows; }

/// The values after SGD with rate 1 in double, where an update is the mean over the terms, or over `divisor`
/// ranks of the sums of their losses.
template <class Divisor>
std::vector<double> reference(int ranks, const Divisor& divisor) {
  std::vector<double> w(in * out);
  for (std::size_t i = 0; i < w.size(); ++i) w[i] = static_cast<double>(i % 4) / 8;
  for (int b = 0; b < batches_of(ranks - 1); ++b) {
    std::vector<double> g(w.size());
    double terms = 0;
    int active = 0;
    for (int rank = 0; rank < ranks; ++rank) {
      if (b >= batches_of(rank)) continue;
      ++active;
      const std::size_t count = terms_of(rank, b);
      terms += static_cast<double>(count);
      const Batch batch(rank, b, count);
      for (std::size_t r = 0; r < count; ++r) {
        const float* x = batch.x.data<float>() + r * in;
        double p[out], total = 0;
        for (std::size_t o = 0; o < out; ++o) {
          p[o] = 0;
          for (std::size_t i = 0; i < in; ++i) p[o] += w[o * in + i] * x[i];
          total += p[o] = std::exp(p[o]);
        }
        for (std::size_t o = 0; o < out; ++o)
          for (std::size_t i = 0; i < in; ++i)
            g[o * in + i] +=
                (p[o] / total - (static_cast<std::size_t>(batch.targets.data<std::int32_t>()[r]) == o)) *
                x[i];
      }
    }
    for (std::size_t i = 0; i < w.size(); ++i) w[i] -= g[i] / divisor(terms, active);
  }
  return w;
}

struct Trained {
  std::vector<float> values;
  std::int64_t batches = 0;
  int updates = 0;
};

/// `terms`: losses have terms; otherwise they are scalars.
Trained train(StrategyKind kind, Communicator& comm, const JoinOptions& options, bool terms) {
  Net net;
  Tape tape;
  const auto strategy = make_strategy(kind, net, comm, {.find_unused_parameters = false});
  strategy->attach(tape);
  const auto sgd = make_sgd({.learning_rate = 1});
  Join join(comm, options);
  Trained result;
  for (int b = 0; join.next(b < batches_of(comm.rank())); ++b, ++result.updates) {
    EXPECT_EQ(join.active_ranks(), comm.size() - b);
    strategy->zero_grad();
    if (join.active()) {
      const Batch batch(comm.rank(), b, terms_of(comm.rank(), b));
      const nn::Loss loss = nn::cross_entropy(tape, net.layer(tape, batch.x), batch.targets);
      if (terms) {
        strategy->backward(tape, loss);
      } else {
        strategy->begin_backward();
        tape.backward(loss.sum, join.loss_factor());
      }
      tape.reset();
    } else {
      strategy->backward_without_data();
    }
    strategy->finish_gradients();
    strategy->clip_and_step(*sgd, {});
  }
  result.batches = join.batches();
  const Tensor value = strategy->values().whole(net.layer.weight);
  result.values.assign(value.data<float>(), value.data<float>() + value.count());
  return result;
}

class Joining : public testing::TestWithParam<int> {
 protected:
  void expect(const JoinOptions& options, bool terms, const std::vector<double>& expected) {
    const int ranks = GetParam();
    for (const StrategyKind kind : joinable)
      lab::group(ranks, [&](Communicator& comm) {
        SCOPED_TRACE(concat(name(kind), " on rank ", comm.rank()));
        const Trained got = train(kind, comm, options, terms);
        EXPECT_EQ(got.updates, ranks);
        EXPECT_EQ(got.batches, comm.rank() + 1);
        for (std::size_t i = 0; i < expected.size(); ++i) EXPECT_NEAR(got.values[i], expected[i], 4e-6) << i;
      });
  }
};
INSTANTIATE_TEST_SUITE_P(Ranks, Joining, testing::Values(1, 2, 3, 4));

TEST_P(Joining, MeansAreOverTheTermsThatThereAre) {
  const auto over_terms = [](double terms, int) { return terms; };
  for (const bool initial : {true, false})
    expect({.divide_by_initial_world_size = initial}, true, reference(GetParam(), over_terms));
}

TEST_P(Joining, MeansOfLossesWithoutTermsAreOverAllRanksOrThoseWithData) {
  expect({}, false, reference(GetParam(), [&](double, int) { return GetParam(); }));
  expect({.divide_by_initial_world_size = false}, false,
         reference(GetParam(), [](double, int active) { return active; }));
}

TEST_P(Joining, UnevenInputsAreAnErrorIfTheyMustEndEarly) {
  const int ranks = GetParam();
  lab::group(ranks, [&](Communicator& comm) {
    Join even(comm, {.throw_on_early_termination = true});
    EXPECT_TRUE(even.next(true));
    EXPECT_FALSE(even.next(false));
    Join join(comm, {.throw_on_early_termination = true});
    EXPECT_TRUE(join.next(true));
    if (ranks == 1) return;
    const Error e = test::error_of([&] { join.next(comm.rank() == 0); });
    EXPECT_EQ(e.code(), Errc::mismatch);
    EXPECT_EQ(e.culprit(), 1);
    EXPECT_NE(std::string(e.what()).find(ranks == 4 ? "rank 1, 2, 3 has no batch number 1" : "rank 1"),
              std::string::npos)
        << e.what();
    comm.barrier().wait();
  });
}

/// zero3 communicates in forward. A batch without terms takes the place of a missing one.
TEST_P(Joining, InZero3ABatchWithoutTermsTakesPart) {
  const int ranks = GetParam();
  const auto expected = reference(ranks, [](double terms, int) { return terms; });
  lab::group(ranks, [&](Communicator& comm) {
    Net net;
    Tape tape;
    const auto strategy = make_strategy(StrategyKind::zero3, net, comm);
    strategy->attach(tape);
    const Error e = test::error_of([&] { strategy->backward_without_data(); });
    EXPECT_EQ(e.code(), Errc::unsupported);
    EXPECT_NE(std::string(e.what()).find("batch of which all targets are ignored"), std::string::npos);
    const auto sgd = make_sgd({.learning_rate = 1});
    Join join(comm);
    for (int b = 0; join.next(b < batches_of(comm.rank())); ++b) {
      strategy->zero_grad();
      const Batch batch(comm.rank(), b, join.active() ? terms_of(comm.rank(), b) : 0);
      const nn::Loss loss = nn::cross_entropy(tape, net.layer(tape, batch.x), batch.targets);
      strategy->backward(tape, loss);
      tape.reset();
      strategy->finish_gradients();
      strategy->clip_and_step(*sgd, {});
    }
    const Tensor value = strategy->values().whole(net.layer.weight);
    for (std::size_t i = 0; i < expected.size(); ++i)
      EXPECT_NEAR(value.data<float>()[i], expected[i], 4e-6) << i;
  });
}

}  // namespace
}  // namespace rz
