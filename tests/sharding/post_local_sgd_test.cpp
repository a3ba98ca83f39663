/// Post-local SGD against replicas in float64.
#include "sharding/model/post_local_sgd.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <memory>
#include <string>
#include <vector>

#include "autograd_lite/nn/layers.h"
#include "sharding/optim/optimizers.h"
#include "sharding/strategy/model_averager.h"
#include "sharding/strategy/strategy.h"
#include "tests/support/error_of.h"
#include "tests/support/ranks.h"

namespace rz {
namespace {

using test::run_ranks;

constexpr std::size_t rows = 4, in = 3, out = 2;
constexpr int updates = 9;
constexpr double rate = 0.25, momentum = 0.5;

/// Values that bf16 holds.
float start_value(std::size_t i) { return static_cast<float>(i % 5) / 4 - 0.5f; }
float input(int rank, int update, std::size_t i) {
  return static_cast<float>((i * 5 + static_cast<std::size_t>(7 * rank + 3 * update)) % 8) / 8 - 0.25f;
}
float target(int rank, int update, std::size_t i) {
  return static_cast<float>((i * 3 + static_cast<std::size_t>(5 * rank + update)) % 8) / 4;
}

struct Net : Module {
  nn::Linear layer{*this, "layer", in, out, nn::WeightLayout::out_in, false},
      frozen{*this, "frozen", in, out};
  Net() {
    for (Parameter* p : parameters()) {
      p->value = Tensor::zeros(p->shape);
      for (std::size_t i = 0; i < p->count(); ++i) p->value.data<float>()[i] = start_value(i);
    }
    frozen.requires_grad_(false);
  }
};

struct Plan {
  std::int64_t start = 3;
  std::size_t group = 2;  ///< consecutive ranks of a subgroup; 1: no reduction after the start
  PeriodicModelAveragerOptions averager;
};

std::vector<double> gradient(const std::vector<double>& w, int rank, int update) {
  std::vector<double> g(w.size());
  for (std::size_t r = 0; r < rows; ++r)
    for (std::size_t o = 0; o < out; ++o) {
      double p = 0;
      for (std::size_t i = 0; i < in; ++i) p += w[o * in + i] * input(rank, update, r * in + i);
      const double d = 2 * (p - target(rank, update, r * out + o)) / (rows * out);
      for (std::size_t i = 0; i < in; ++i) g[o * in + i] += d * input(rank, update, r * in + i);
    }
  return g;
}

using Replicas = std::vector<std::vector<double>>;

/// Replaces [first, last) by their mean.
void average(Replicas& all, std::size_t first, std::size_t last) {
  for (std::size_t i = 0; i < all[0].size(); ++i) {
    double sum = 0;
    for (std::size_t r = first; r < last; ++r) sum += all[r][i];
    for (std::size_t r = first; r < last; ++r) all[r][i] = sum / static_cast<double>(last - first);
  }
}

/// The weights of every rank after each update.
std::vector<Replicas> reference(std::size_t ranks, const Plan& plan) {
  Replicas w(ranks, std::vector<double>(in * out)), v = w;
  for (auto& replica : w)
    for (std::size_t i = 0; i < replica.size(); ++i) replica[i] = start_value(i);
  std::vector<Replicas> history;
  for (int u = 0; u < updates; ++u) {
    Replicas g;
    for (std::size_t r = 0; r < ranks; ++r) g.push_back(gradient(w[r], static_cast<int>(r), u));
    const std::size_t group = u < plan.start ? ranks : plan.group;
    for (std::size_t first = 0; first < ranks; first += group)
      average(g, first, std::min(ranks, first + group));
    for (std::size_t r = 0; r < ranks; ++r)
      for (std::size_t i = 0; i < w[r].size(); ++i)
        w[r][i] -= rate * (v[r][i] = momentum * v[r][i] + g[r][i]);
    const auto since = u - plan.averager.warmup_steps;
    if (since >= 0 && since % plan.averager.period == 0) average(w, 0, ranks);
    history.push_back(w);
  }
  return history;
}

void expect_reference(int ranks, const Plan& plan) {
  const auto expected = reference(static_cast<std::size_t>(ranks), plan);
  run_ranks(ranks, [&](int rank, std::shared_ptr<Store> store) {
    auto comm = Communicator::connect(rank, ranks, std::move(store));
    auto subgroup = comm.split(rank / static_cast<int>(plan.group), rank);
    const bool reduces = plan.group > 1;
    Net net;
    const auto ddp =
        make_strategy(StrategyKind::ddp, net, comm,
                      {.communication_hook = make_post_local_sgd_hook(
                           {.start_local_sgd_iter = plan.start, .post_local_gradient_allreduce = reduces},
                           reduces ? &*subgroup : nullptr)});
    Tape tape;
    ddp->attach(tape);
    const auto sgd = make_sgd({.learning_rate = rate, .momentum = momentum});
    PeriodicModelAverager averager(*ddp, net, comm, plan.averager);
    for (int u = 0; u < updates; ++u) {
      Tensor x = Tensor::empty({rows, in}), y = Tensor::empty({rows, out});
      for (std::size_t i = 0; i < x.count(); ++i) x.data<float>()[i] = input(rank, u, i);
      for (std::size_t i = 0; i < y.count(); ++i) y.data<float>()[i] = target(rank, u, i);
      ddp->zero_grad();
      ddp->begin_backward();
      tape.backward(nn::mse(tape, net.layer(tape, x), y));
      tape.reset();
      ddp->finish_gradients();
      ddp->step(*sgd);
      averager.average_parameters();
      const Tensor w = ddp->values().whole(net.layer.weight);
      for (std::size_t i = 0; i < w.count(); ++i)
        EXPECT_NEAR(w.data<float>()[i],
                    expected[static_cast<std::size_t>(u)][static_cast<std::size_t>(rank)][i], 2e-6)
            << "update " << u << ", rank " << rank << " of " << ranks;
    }
    EXPECT_EQ(averager.step(), updates);
    EXPECT_EQ(ddp->values().whole(net.frozen.weight).data<float>()[1], start_value(1));
    const std::uint64_t reduced = reduces ? updates : static_cast<std::uint64_t>(plan.start);
    EXPECT_EQ(ddp->traffic().all_reduce.calls, reduced);
  });
}

TEST(PostLocalSgd, TrainsAsReplicasInFloat64) {
  for (const int ranks : {2, 3, 4})
    for (const std::size_t group : {1u, 2u}) {
      expect_reference(ranks, {.group = group, .averager = {.period = 2, .warmup_steps = 3}});
      expect_reference(ranks, {.group = group, .averager = {.period = 3, .warmup_steps = 5}});
      expect_reference(ranks, {.start = 0, .group = group, .averager = {.period = 1}});
    }
}

/// The reference itself: replicas differ between averagings, else the test above would show nothing.
TEST(PostLocalSgd, ReplicasDifferInBetween) {
  const auto history = reference(4, {.averager = {.period = 2, .warmup_steps = 3}});
  EXPECT_EQ(history[2][0], history[2][3]);
  EXPECT_EQ(history[4][0], history[4][1]) << "of a group";
  EXPECT_GT(std::abs(history[4][0][0] - history[4][3][0]), 1e-3);
  EXPECT_EQ(history[5][0], history[5][3]);
}

/// Means of masters, of which the values are the 16-bit image.
TEST(PostLocalSgd, MastersAreAveraged) {
  run_ranks(2, [](int rank, std::shared_ptr<Store> store) {
    auto comm = Communicator::connect(rank, 2, std::move(store));
    Net net;
    const auto ddp =
        make_strategy(StrategyKind::ddp, net, comm,
                      {.precision = {DType::bf16, DType::bf16},
                       .communication_hook = make_post_local_sgd_hook(
                           {.start_local_sgd_iter = 0, .post_local_gradient_allreduce = false}, nullptr)});
    PeriodicModelAverager averager(*ddp, net, comm, {});
    Tape tape;
    ddp->attach(tape);
    const auto sgd = make_sgd({.learning_rate = 0.001});
    Tensor x = Tensor::empty({rows, in});
    for (std::size_t i = 0; i < x.count(); ++i) x.data<float>()[i] = input(rank, 0, i);
    ddp->zero_grad();
    const Tensor y = Tensor::zeros({rows}, DType::i32);
    ddp->backward(tape, nn::cross_entropy(tape, net.layer(tape, x), y));
    tape.reset();
    ddp->finish_gradients();
    ddp->step(*sgd);
    const auto whole = [&] {
      const Tensor w = ddp->values().whole(net.layer.weight);
      return std::vector<float>(w.data<float>(), w.data<float>() + w.count());
    };
    const std::vector<float> own = whole();
    std::vector<float> both(2 * own.size());
    comm.all_gather(ConstBuffer(own.data(), own.size()), Buffer(both.data(), both.size())).wait();
    averager.average_parameters();
    const std::vector<float> mean = whole();
    EXPECT_NE(own, mean);
    for (std::size_t i = 0; i < own.size(); ++i) EXPECT_EQ(mean[i], (both[i] + both[own.size() + i]) / 2);
  });
}

TEST(PostLocalSgd, WhatMakesNoSenseIsRefused) {
  run_ranks(2, [](int rank, std::shared_ptr<Store> store) {
    auto comm = Communicator::connect(rank, 2, std::move(store));
    const PostLocalSgdOptions alone{.post_local_gradient_allreduce = false};
    const auto message = [](const auto& body) { return std::string(test::error_of(body).what()); };
    EXPECT_NE(message([&] { make_post_local_sgd_hook({}, nullptr); }).find("no subgroup"), std::string::npos);
    EXPECT_NE(message([&] { make_post_local_sgd_hook(alone, &comm); }).find("a subgroup"), std::string::npos);
    EXPECT_NE(message([&] { make_post_local_sgd_hook({.start_local_sgd_iter = -1}, &comm); }).find("is -1"),
              std::string::npos);
    for (const StrategyKind kind : {StrategyKind::zero1, StrategyKind::zero2, StrategyKind::zero3}) {
      Net net, other;
      const Error hook = test::error_of([&] {
        make_strategy(kind, net, comm, {.communication_hook = make_post_local_sgd_hook(alone, nullptr)});
      });
      EXPECT_EQ(hook.code(), Errc::unsupported);
      EXPECT_NE(std::string(hook.what()).find("post_local_sgd"), std::string::npos) << hook.what();
      const auto strategy = make_strategy(kind, other, comm);
      EXPECT_NE(message([&] { PeriodicModelAverager(*strategy, other, comm, {}); }).find(name(kind)),
                std::string::npos);
    }
    Net net;
    const auto ddp = make_strategy(StrategyKind::ddp, net, comm);
    EXPECT_NE(message([&] { PeriodicModelAverager(*ddp, net, comm, {.period = 0}); }).find("period is 0"),
              std::string::npos);
    EXPECT_NE(message([&] {
                PeriodicModelAverager(*ddp, net, comm, {.warmup_steps = -1});
              }).find("warmup_steps is -1"),
              std::string::npos);
  });
}

}  // namespace
}  // namespace rz
