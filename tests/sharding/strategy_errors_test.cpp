/// Errors of strategies: calls in a wrong order, ranks that disagree, and updates that fail and are repeated.
#include <gtest/gtest.h>

#include <functional>
#include <stdexcept>
#include <utility>

#include "comm/core/error.h"
#include "sharding/optim/optimizers.h"
#include "sharding/strategy/strategy.h"
#include "tests/lab/group.h"
#include "tests/support/error_of.h"
#include "tests/support/toy_training.h"

namespace rz {
namespace {

using test::datum;
using test::initial_value;
using test::kinds;
using test::Replica;
using test::ToyModel;
using test::values_of;

class Strategies : public testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Ranks, Strategies, testing::Values(1, 2, 3, 4));

// ---- calls in a wrong order

struct Fixture {
  explicit Fixture(StrategyKind kind)
      : comm(Communicator::connect(0, 1, memory_store())), strategy(make_strategy(kind, model, comm)) {
    strategy->attach(tape);
  }
  void pass(bool synchronise) {
    const Var loss = model.loss(tape, [](std::size_t, std::size_t) { return 1.0f; });
    strategy->begin_backward(synchronise);
    tape.backward(loss);
    tape.reset();
  }
  Errc error_of(const std::function<void()>& f, const std::string& word) {
    try {
      f();
    } catch (const Error& e) {
      EXPECT_NE(std::string(e.what()).find(word), std::string::npos) << e.what();
      return e.code();
    }
    ADD_FAILURE() << "no error, expected one with " << word;
    return Errc::system;
  }
  ToyModel model{initial_value};
  Communicator comm;
  Tape tape;
  std::unique_ptr<Strategy> strategy;
  std::unique_ptr<Optimizer> sgd = make_sgd({});
};

TEST(Strategy, StepWithUnsynchronisedGradientsIsAnError) {
  for (const StrategyKind kind : kinds) {
    Fixture f(kind);
    const auto step = [&] { f.strategy->step(*f.sgd); };
    EXPECT_EQ(f.error_of(step, "step() with unsynchronised gradients: no backward"), Errc::unsynchronised);
    f.pass(false);
    EXPECT_EQ(f.error_of(step, "begin_backward(true)"), Errc::unsynchronised);
    EXPECT_EQ(f.error_of([&] { f.strategy->finish_gradients(); }, "finish_gradients()"),
              Errc::unsynchronised);
    EXPECT_EQ(f.error_of([&] { f.strategy->gradient_norm(); }, "gradient_norm()"), Errc::unsynchronised);
    EXPECT_EQ(f.error_of([&] { f.strategy->clip_gradients(1); }, "clip_gradients()"), Errc::unsynchronised);
    {
      const Strategy::NoSync no_sync(*f.strategy);
      f.pass(true);
      EXPECT_EQ(f.error_of(step, "begin_backward(true)"), Errc::unsynchronised);
    }
    f.pass(true);
    EXPECT_EQ(f.error_of(step, "finish_gradients()"), Errc::unsynchronised);
    EXPECT_EQ(f.error_of([&] { f.strategy->zero_grad(); }, "zero_grad()"), Errc::invalid_argument);
    f.strategy->finish_gradients();
    step();
    f.strategy->zero_grad();
    EXPECT_EQ(f.error_of(step, "no backward"), Errc::unsynchronised);
  }
}

TEST(Strategy, BackwardWithoutBeginIsAnError) {
  Fixture f(StrategyKind::zero2);
  const auto pass = [&] {
    f.tape.backward(f.model.loss(f.tape, [](std::size_t, std::size_t) { return 1.0f; }));
  };
  EXPECT_EQ(f.error_of(pass, "begin_backward()"), Errc::invalid_argument);
}

TEST(Strategy, AParameterThatIsFrozenLaterIsAnError) {
  for (const StrategyKind kind : kinds) {
    Fixture f(kind);
    Parameter& norm = f.model[f.model.index("norm")];
    f.pass(true);
    f.strategy->finish_gradients();
    norm.requires_grad = false;
    EXPECT_EQ(f.error_of([&] { f.strategy->step(*f.sgd); }, "step(): norm was frozen"),
              Errc::invalid_argument);
    EXPECT_EQ(f.error_of([&] { f.strategy->begin_backward(); }, "backward(): norm was frozen"),
              Errc::invalid_argument);
    norm.requires_grad = true;
    f.strategy->step(*f.sgd);
  }
}

// ---- replicas

/// The error of every rank; each names `culprit`, which two ranks do not have.
void expect_mismatch(int ranks, int culprit, const std::string& words,
                     const std::function<void(int rank, Communicator&)>& body) {
  lab::group(ranks, [&](Communicator& comm) {
    const Error e = test::error_of([&] { body(comm.rank(), comm); });
    EXPECT_EQ(e.code(), Errc::mismatch);
    EXPECT_EQ(e.culprit(), culprit);
    EXPECT_NE(std::string(e.what()).find(words), std::string::npos) << e.what();
    comm.barrier().wait();  // the group still works
  });
}

TEST(Replicas, WithDifferentValuesAreNamed) {
  for (const StrategyKind kind : kinds)
    for (const char* parameter : {"second.weight", "frozen"})
      expect_mismatch(3, 2, concat("value differs over the ranks: ", parameter),
                      [&](int rank, Communicator& comm) {
                        Replica r(kind, comm);
                        r.fill(parameter, rank == 2 ? 2.0f : 1.0f);
                        r.update();
                      });
}

TEST(Replicas, AreComparedAfterEveryFill) {
  expect_mismatch(2, -1, "tied", [&](int rank, Communicator& comm) {
    Replica r(StrategyKind::ddp, comm);
    r.fill("", 1);
    r.update();
    if (rank == 1) r.fill("", 1);  // on one rank alone: as before the update
    r.update();
  });
}

TEST(Replicas, WithOtherOptimizersAreNamed) {
  const std::string words =
      "the optimizer is adamw, learning_rate 0.125, beta1 0.5, beta2 0.75, epsilon 1, weight_"
      "decay 0 on rank 0 and adamw, learning_rate 0.125, beta1 0.5, beta2 0.75, epsilon 1, "
      "weight_decay 2 on rank 2";
  expect_mismatch(3, 2, words, [](int rank, Communicator& comm) {
    Replica r(StrategyKind::zero2, comm);
    r.optimizer = make_adamw({.learning_rate = 0.125,
                              .beta1 = 0.5,
                              .beta2 = 0.75,
                              .epsilon = 1,
                              .weight_decay = rank == 2 ? 2.0 : 0.0});
    r.update();
  });
}

/// The majority is right, also where rank 0 is not of it.
TEST(Replicas, OfTheMinorityAreTheCulprits) {
  for (const int odd : {0, 1, 3})
    expect_mismatch(4, odd,
                    concat("prefetch_bucket_size is ", odd == 0 ? 7 : 1, " on rank 0 and ", odd == 0 ? 1 : 7,
                           " on rank ", odd == 0 ? 1 : odd),
                    [&](int rank, Communicator& comm) {
                      ToyModel model(initial_value);
                      StrategyOptions options;
                      options.gathers.prefetch_bucket_size = rank == odd ? 7 : 1;
                      make_strategy(StrategyKind::zero1, model, comm, options);
                    });
  expect_mismatch(4, -1, "prefetch_bucket_size is 1 on rank 0 and 2 on rank 2",
                  [](int rank, Communicator& comm) {
                    ToyModel model(initial_value);
                    StrategyOptions options;
                    options.gathers.prefetch_bucket_size = rank < 2 ? 1 : 2;
                    make_strategy(StrategyKind::zero1, model, comm, options);
                  });
}

TEST(Replicas, WithOtherOptionsAreNamed) {
  const auto refused = [](const std::string& words, const std::function<void(StrategyOptions&)>& change) {
    expect_mismatch(3, 1, words, [&](int rank, Communicator& comm) {
      ToyModel model(initial_value);
      StrategyOptions options;
      if (rank == 1) change(options);
      make_strategy(StrategyKind::zero1, model, comm, options);
    });
  };
  refused("reduce_bucket_size is default on rank 0 and 5 on rank 1",
          [](auto& o) { o.reduce_bucket_size = 5; });
  refused("prefetch_bucket_size is 1 on rank 0 and 7 on rank 1",
          [](auto& o) { o.gathers.prefetch_bucket_size = 7; });
  refused("overlap_comm is yes on rank 0 and no on rank 1", [](auto& o) { o.overlap_comm = false; });
  refused("unused_parameters is pytorch",
          [](auto& o) { o.unused_parameters = UnusedParameterPolicy::deepspeed; });
  expect_mismatch(2, -1, "the strategy is ddp on rank 0 and zero3 on rank 1",
                  [](int rank, Communicator& comm) {
                    ToyModel model(initial_value);
                    make_strategy(rank ? StrategyKind::zero3 : StrategyKind::ddp, model, comm);
                  });
}

TEST(Strategy, DifferentModelsNameTheParameterThatDiffers) {
  lab::group(3, [](Communicator& comm) {
    ToyModel model(initial_value);
    if (comm.rank() == 2) model[3].shape = {2, 5}, model[3].value = Tensor::zeros({2, 5});
    try {
      make_strategy(StrategyKind::ddp, model, comm);
      ADD_FAILURE() << "no error on rank " << comm.rank();
    } catch (const Error& e) {
      EXPECT_EQ(e.code(), Errc::mismatch);
      EXPECT_EQ(e.culprit(), 2);
      EXPECT_NE(std::string(e.what()).find("first.bias [10] on rank 0 and first.bias [2, 5] on rank 2"),
                std::string::npos)
          << e.what();
    }
  });
}

// ---- after an error

struct Failing {
  enum Where { nowhere, forward, backward, late } where = nowhere;
  int update = 1;
  bool everywhere = true;  ///< otherwise rank 1 alone
  std::size_t prefetch = 1;
};

/// Values after three successful updates, one of which is repeated after it failed.
std::vector<float> train_through(StrategyKind kind, Communicator& comm, const Failing& failing) {
  ToyModel model(initial_value);
  const auto strategy = make_strategy(kind, model, comm,
                                      {.reduce_bucket_size = 225,
                                       .first_bucket_size = 75,
                                       .gathers = {.prefetch_bucket_size = failing.prefetch}});
  Tape tape;
  strategy->attach(tape);
  const auto adamw = make_adamw(matrices_and_rest(AdamOptions{.learning_rate = 0.05, .weight_decay = 0.1}));
  bool pending = failing.where != Failing::nowhere;
  for (int step = 0; step < 3; ++step) {
    const bool fails = step == failing.update && std::exchange(pending, step != failing.update && pending);
    const bool here = fails && (failing.everywhere || comm.rank() == 1);
    strategy->zero_grad();
    model.in_backward = [&] {
      if (here && failing.where == Failing::backward) throw std::runtime_error("an operator failed");
    };
    try {
      const Var loss = model.loss(tape, [&](std::size_t p, std::size_t i) {
        if (here && failing.where == Failing::forward && p == 7) throw std::runtime_error("no such sample");
        return datum(p, i, comm.rank(), step);
      });
      strategy->begin_backward();
      tape.backward(loss);
      if (here && failing.where == Failing::late) throw std::runtime_error("after backward");
      tape.reset();
      strategy->finish_gradients();
      EXPECT_FALSE(fails);
    } catch (const std::runtime_error& e) {
      if (!fails) throw;
      if (const auto* const error = dynamic_cast<const Error*>(&e)) {
        EXPECT_EQ(error->code(), Errc::cancelled) << e.what();
        EXPECT_TRUE(failing.everywhere || (!here && error->culprit() == 1)) << e.what();
        EXPECT_EQ(std::string(e.what()), concat("rank ", error->culprit(),
                                                " cancelled the update: call cancel_update() on every rank"));
      }
      tape.reset();
      strategy->cancel_update();
    }
    if (fails) {
      EXPECT_EQ(test::error_of([&] { strategy->step(*adamw); }).code(), Errc::unsynchronised);
      --step;
      continue;
    }
    strategy->step(*adamw);
  }
  std::vector<float> out;
  for (const Parameter* p : model.parameters()) {
    const auto values = values_of(*strategy, *p);
    out.insert(out.end(), values.begin(), values.end());
  }
  return out;
}

TEST_P(Strategies, GoOnAfterAnErrorOnEveryRank) {
  for (const StrategyKind kind : kinds)
    lab::group(GetParam(), [&](Communicator& comm) {
      SCOPED_TRACE(concat(name(kind), " on rank ", comm.rank()));
      const auto good = train_through(kind, comm, {});
      for (const auto where : {Failing::forward, Failing::backward, Failing::late})
        for (const int update : {0, 1}) EXPECT_EQ(train_through(kind, comm, {where, update}), good) << where;
    });
}

TEST(Strategy, GoesOnAfterAnErrorOnOneRank) {
  for (const StrategyKind kind : kinds)
    lab::group(3, [&](Communicator& comm) {
      SCOPED_TRACE(concat(name(kind), " on rank ", comm.rank()));
      const auto good = train_through(kind, comm, {});
      for (const auto where : {Failing::forward, Failing::backward, Failing::late})
        for (const int update : {0, 1})
          EXPECT_EQ(train_through(kind, comm, {where, update, false}), good) << where;
    });
}

TEST(Strategy, AnUpdateIsCancelledAtAnyPlace) {
  Fixture f(StrategyKind::ddp);
  f.pass(true);
  EXPECT_EQ(f.error_of([&] { f.strategy->begin_backward(); }, "cancel_update()"), Errc::invalid_argument);
  f.strategy->finish_gradients();
  f.strategy->cancel_update();
  EXPECT_EQ(f.error_of([&] { f.strategy->gradient_norm(); }, "no backward pass"), Errc::unsynchronised);
  f.pass(true);
  f.strategy->finish_gradients();
}

/// Fails on rank 1, as the file of offloaded states may.
class Failing1 final : public Optimizer {
 public:
  explicit Failing1(int rank) : Optimizer({{"all", {}, 0}}), rank_(rank) {}
  const char* name() const override { return "failing"; }
  std::vector<StateSpec> states(int) const override { return {}; }
  void update(std::span<const UpdateSpan>, const UpdateScale&, const Stream&) const override {
    if (rank_ == 1) throw std::runtime_error("a state cannot be read");
  }
  std::vector<std::byte> constants(std::int64_t) const override { return {}; }

 private:
  std::string describe_group(int) const override { return ""; }
  int rank_;
};

TEST(Strategy, AnErrorInTheMidstOfAStepEndsTraining) {
  for (const StrategyKind kind : kinds)
    lab::group(3, [&](Communicator& comm) {
      test::ToyModel model([](std::size_t, std::size_t) { return 1.0f; });
      const auto strategy = make_strategy(kind, model, comm);
      Tape tape;
      strategy->attach(tape);
      const auto pass = [&] {
        strategy->zero_grad();
        strategy->begin_backward();
        tape.backward(model.loss(tape, [](std::size_t, std::size_t) { return 1.0f; }));
        tape.reset();
        strategy->finish_gradients();
      };
      pass();
      Failing1 optimizer(comm.rank());
      try {  // the others have made the update, or wait in it
        strategy->step(optimizer);
        if (comm.rank() != 1) comm.barrier().wait();
      } catch (const std::exception&) {
      }
      const Error e = test::error_of([&] { strategy->cancel_update(); });
      EXPECT_EQ(e.code(), Errc::mismatch) << e.what();
      EXPECT_NE(std::string(e.what()).find("load the last checkpoint"), std::string::npos) << e.what();
      pass();  // the group itself goes on
    });
}

TEST(Strategy, AnotherOptimizerIsAnError) {
  Fixture f(StrategyKind::ddp);
  f.pass(true);
  f.strategy->finish_gradients();
  f.strategy->step(*make_adam({}));
  EXPECT_EQ(f.error_of([&] { f.strategy->step(*make_sgd({.momentum = 0.9})); }, "one optimizer"),
            Errc::invalid_argument);
}

}  // namespace
}  // namespace rz
