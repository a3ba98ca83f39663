/// Optimizers that differ over the ranks are found in the update in which they differ.
#include <gtest/gtest.h>

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "sharding/engine/engine.h"
#include "sharding/optim/optimizers.h"
#include "sharding/parallel/rank_consistency.h"
#include "sharding/strategy/step_control.h"
#include "sharding/strategy/strategy.h"
#include "tests/lab/training.h"
#include "tests/support/error_of.h"

namespace rz {
namespace {

constexpr lab::MlpSizes sizes{.dropout = 0};

struct Case {
  int ranks = 2, stage = 0;
  std::string keys{};  ///< more of the configuration
  bool train_batch = false;
};

std::string config(const Case& c) {
  return concat(
      R"({"train_micro_batch_size_per_gpu": 4, "optimizer": {"type": "Adam", "params": {"lr": 0.125}},
                    "zero_optimization": {"stage": )",
      c.stage, R"(, "stage3_param_persistence_threshold": 0})", c.keys, "}");
}

struct Rank {
  Rank(World& world, const Case& c) : case_(c), world_(world), engine(initialize(world, net, options(c))) {}
  static EngineOptions options(const Case& c) { return {.config = config(c), .seed = 2, .log = nullptr}; }
  struct Numbers {
    const int& next() const { return update; }
    int update;
  };
  void update(int number) {
    const Batch batch = lab::batch(static_cast<std::uint64_t>(number * 4 + world_.rank()));
    const auto loss = [&](Tape& t) { return net(t, batch); };
    if (case_.train_batch) {
      Numbers numbers{number};
      engine.train_batch(numbers, [&](Tape& t, int) { return loss(t); });
    } else {
      engine.backward(loss(engine.tape()));
      engine.step();
    }
  }
  std::vector<float> values() { return lab::values_of(engine, net); }
  Case case_;
  World& world_;
  lab::Mlp net{sizes};
  Engine engine;
};

/// The update fails on every rank, with both descriptions, and the culprit if there is a majority.
void expect_refused(Rank& rank, int number, const std::string& expected, const std::string& other) {
  const std::vector<float> before = rank.values();
  const Error e = test::error_of([&] { rank.update(number); });
  EXPECT_EQ(e.code(), Errc::mismatch) << e.what();
  EXPECT_EQ(e.culprit(), rank.case_.ranks == 2 ? -1 : rank.case_.ranks - 1) << e.what();
  for (const std::string& text : {expected, other})
    EXPECT_NE(std::string(e.what()).find(text), std::string::npos) << e.what() << "\nhas no " << text;
  EXPECT_EQ(rank.values(), before);
}

/// A rate that one rank sets by a metric of its own, in an update between others, which is then left out.
void expect_found(const Case& c) {
  lab::world(c.ranks, [&](World& world) {
    SCOPED_TRACE(concat("stage ", c.stage, ", rank ", world.rank(), " of ", c.ranks, c.keys));
    Rank rank(world, c), expected(world, c);
    Optimizer& optimizer = rank.engine.optimizer();
    for (const int number : {0, 1}) rank.update(number), expected.update(number);
    for (const double rate : {0.25, 0.0625}) {
      if (world.rank() == c.ranks - 1) optimizer.set_learning_rate(rate);
      expect_refused(rank, 2, "learning_rate 0.125, beta1", concat("learning_rate ", rate, ", beta1"));
      rank.engine.cancel_update();  // all ranks have dropped the update before
      optimizer.set_learning_rate(0.125);
    }
    for (const int number : {3, 4}) rank.update(number), expected.update(number);
    EXPECT_EQ(rank.values(), expected.values());
    EXPECT_EQ(rank.engine.loss(), expected.engine.loss());
    EXPECT_EQ(rank.engine.global_steps(), 4);
  });
}

TEST(OptimizersOfRanks, WithARateSetByHandAreFoundInThatUpdate) {
  for (const int stage : {0, 1, 2, 3})
    for (const int ranks : {2, 3}) expect_found({.ranks = ranks, .stage = stage});
}
TEST(OptimizersOfRanks, AreFoundWithoutClippingWithAScalerAndInTrainBatch) {
  for (const int stage : {0, 3}) {
    expect_found({.ranks = 3, .stage = stage, .keys = R"(, "gradient_clipping": 0)"});
    expect_found({.stage = stage, .keys = R"(, "fp16": {"enabled": true, "initial_scale_power": 4})"});
    expect_found({.stage = stage, .train_batch = true});
  }
}

struct ByHand {
  ByHand(World& world, StrategyKind kind)
      : world_(world), comm_(world.new_communicator()), strategy(make_strategy(kind, net, comm_)) {
    strategy->values().fill([](const Parameter&, Range e, float* out) { std::fill_n(out, e.count(), 0.5f); });
    strategy->attach(tape_);
  }
  void pass(bool weights = true) {
    strategy->zero_grad();
    const nn::Loss loss = net(tape_, lab::batch(static_cast<std::uint64_t>(world_.rank())));
    if (weights) {
      strategy->backward(tape_, loss);
    } else {
      strategy->begin_backward();
      tape_.backward(loss.sum);
    }
    tape_.reset();
    strategy->finish_gradients();
  }
  /// The error of an update, with its culprit.
  std::string refused(Optimizer& optimizer, int culprit) {
    pass();
    const Error e = test::error_of([&] { strategy->clip_and_step(optimizer, {}); });
    EXPECT_EQ(e.code(), Errc::mismatch) << e.what();
    EXPECT_EQ(e.culprit(), culprit) << e.what();
    return e.what();
  }
  void update(Optimizer& optimizer) {
    pass();
    strategy->clip_and_step(optimizer, {});
  }

  World& world_;
  lab::Mlp net{sizes};
  Communicator comm_;
  Tape tape_;
  std::unique_ptr<Strategy> strategy;
};

void expect_texts(const std::string& what, const std::string& one, const std::string& other) {
  for (const std::string& text : {one, other}) EXPECT_NE(what.find(text), std::string::npos) << what;
}

/// In the first update, and in a later one that another optimizer makes.
TEST(OptimizersOfRanks, WithOtherOptionsAreFound) {
  for (const StrategyKind kind : lab::strategies)
    for (const int ranks : {2, 3})
      lab::world(ranks, [&](World& world) {
        const bool last = world.rank() == ranks - 1;
        const int culprit = ranks == 2 ? -1 : 2;
        const auto sgd = [&](double momentum) {
          return make_sgd({.learning_rate = 0.5, .momentum = last ? momentum : 0.5});
        };
        const auto groups = [&](double decay) {
          const AdamOptions matrices{.weight_decay = 0.5}, rest{.weight_decay = last ? decay : 0};
          return make_adamw(
              ParameterGroups<AdamOptions>({{"matrices", is_matrix, matrices}, {"rest", {}, rest}}));
        };
        ByHand momenta(world, kind), decays(world, kind);
        const auto equal = sgd(0.5), other = sgd(0.75);
        for (int i = 0; i < 2; ++i) {
          expect_texts(momenta.refused(*other, culprit), "momentum 0.5", "momentum 0.75");
          momenta.update(*equal);
        }
        const auto equal_groups = groups(0), other_groups = groups(0.25);
        for (int i = 0; i < 2; ++i) {
          expect_texts(decays.refused(*other_groups, culprit), "weight_decay 0 ", "weight_decay 0.25");
          decays.update(*equal_groups);
        }
      });
}

TEST(OptimizersOfRanks, WithBetasOrCountsSetByHandAreFound) {
  lab::world(3, [&](World& world) {
    Rank rank(world, {.ranks = 3, .stage = 1});
    Optimizer& optimizer = rank.engine.optimizer();
    rank.update(0);
    if (world.rank() == 2) optimizer.set_betas(0, {0.5, 0.999});
    expect_refused(rank, 1, "beta1 0.9", "beta1 0.5");
    optimizer.set_betas(0, {0.75, 0.999});
    rank.update(1);
    if (world.rank() == 2) optimizer.set_updates(9);
    expect_refused(rank, 2, "the number of updates of the optimizer is 2 on rank 0", "9 on rank 2");
    optimizer.set_updates(2);
    rank.update(2);
    EXPECT_EQ(rank.engine.global_steps(), 3);
  });
}

/// Rates that are constructed differently and then set right are equal.
TEST(OptimizersOfRanks, AreComparedAsTheyAreAtTheUpdate) {
  lab::world(2, [&](World& world) {
    ByHand run(world, StrategyKind::zero1);
    const auto sgd = make_sgd({.learning_rate = world.rank() == 0 ? 0.5 : 0.25});
    sgd->set_learning_rate(0.125);
    run.update(*sgd);
    sgd->set_learning_rate(0.5);  // on every rank
    run.update(*sgd);
    EXPECT_EQ(sgd->updates(), 2);
  });
}

/// Without weights of losses there is no other sum over the ranks in step().
TEST(OptimizersOfRanks, AreComparedInStepToo) {
  lab::world(3, [&](World& world) {
    ByHand run(world, StrategyKind::ddp);
    const auto sgd = make_sgd({.learning_rate = 0.5});
    for (const bool weights : {false, true}) {
      run.pass(weights);
      run.strategy->step(*sgd);
      run.pass(weights);
      if (world.rank() == 1) sgd->set_learning_rate(0.25);
      const Error e = test::error_of([&] { run.strategy->step(*sgd); });
      EXPECT_EQ(e.code(), Errc::mismatch);
      EXPECT_EQ(e.culprit(), 1);
      sgd->set_learning_rate(0.5);
    }
  });
}

// ---- two words that compare

TEST(ComparedWords, AreEqualOnlyForEqualHashes) {
  const auto sums = [](const std::vector<std::uint64_t>& hashes) {
    std::array<std::int64_t, 2> all{};
    for (const std::uint64_t h : hashes) {
      const auto words = compared_words(h, static_cast<int>(hashes.size()));
      EXPECT_FALSE(__builtin_add_overflow(all[0], words[0], &all[0]));
      EXPECT_FALSE(__builtin_add_overflow(all[1], words[1], &all[1]));
    }
    return all;
  };
  for (const std::size_t ranks : {1u, 2u, 3u, 4u, 7u, 64u, 4096u})
    for (std::uint64_t seed = 0; seed < 20; ++seed) {
      const std::uint64_t hash = hash_bytes(&seed, sizeof seed);
      std::vector<std::uint64_t> hashes(ranks, hash);
      EXPECT_TRUE(hashes_are_equal(sums(hashes), static_cast<int>(ranks)));
      EXPECT_TRUE(hashes_are_equal(sums(std::vector(ranks, ~std::uint64_t{0})), static_cast<int>(ranks)));
      if (ranks == 1) continue;
      hashes[seed % ranks] = hash + 1;
      EXPECT_FALSE(hashes_are_equal(sums(hashes), static_cast<int>(ranks))) << ranks << " ranks";
      if (ranks == 2) continue;
      hashes[(seed + 1) % ranks] = hash - 1;  // the mean is that of equal ones
      EXPECT_FALSE(hashes_are_equal(sums(hashes), static_cast<int>(ranks))) << ranks << " ranks";
    }
}

}  // namespace
}  // namespace rz
