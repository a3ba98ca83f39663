/// Several strategies on one tape: hooks are found through the parameters.
#include <gtest/gtest.h>

#include <memory>
#include <vector>

#include "autograd_lite/ops.h"
#include "sharding/optim/optimizers.h"
#include "sharding/strategy/strategy.h"
#include "tests/lab/training.h"
#include "tests/support/error_of.h"
#include "tests/support/ranks.h"
#include "tests/support/toy_model.h"

namespace rz {
namespace {

using test::run_ranks;
using test::ToyModel;

constexpr int ranks = 2, steps = 3;

/// Numbers where every rounding shows.
float noise(std::size_t p, std::size_t i, int seed) {
  const auto k = (p * 131 + i * 17 + static_cast<std::size_t>(seed) * 7919 + 3) * 2654435761u % 1000003u;
  return static_cast<float>(k) / 700001.0f - 0.7f;
}

/// A model that is trained, and its values afterwards.
struct Student {
  Student(StrategyKind kind, int seed, int rank, std::shared_ptr<Store> store)
      : seed(seed), comm(Communicator::connect(rank, ranks, std::move(store))) {
    strategy = make_strategy(kind, model, comm);
  }
  Var loss(Tape& tape, int step) {
    return model.loss(
        tape, [&](std::size_t p, std::size_t i) { return noise(p, i, seed + 10 * step + comm.rank()); });
  }
  void update() {
    strategy->finish_gradients();
    norms.push_back(strategy->clip_gradients(0.5));
    strategy->step(*adam);
  }
  std::vector<float> values() { return lab::values_of(*strategy, model); }
  int seed;
  ToyModel model{[this](std::size_t p, std::size_t i) { return noise(p, i, seed); }};
  Communicator comm;
  std::unique_ptr<Strategy> strategy;
  std::unique_ptr<Optimizer> adam = make_adamw({.learning_rate = 0.05});
  std::vector<double> norms;
};

/// Trains the students in one backward pass per update.
void train(const std::vector<Student*>& students) {
  Tape tape;
  for (Student* s : students) s->strategy->attach(tape);
  for (int step = 0; step < steps; ++step) {
    Var sum;
    for (Student* s : students) {
      s->strategy->zero_grad();
      const Var loss = s->loss(tape, step);
      sum = sum.defined() ? nn::add(tape, sum, loss) : loss;
      s->strategy->begin_backward();
    }
    tape.backward(sum);
    tape.reset();
    for (Student* s : students) s->update();
  }
}

TEST(OneTape, TwoStrategiesInOnePassTrainEachAsIfAlone) {
  run_ranks(ranks, [](int rank, std::shared_ptr<Store> store) {
    for (const StrategyKind kind :
         {StrategyKind::ddp, StrategyKind::zero1, StrategyKind::zero2, StrategyKind::zero3}) {
      const auto student = [&](const char* name, StrategyKind k, int seed) {
        return std::make_unique<Student>(k, seed, rank,
                                         prefix_store(store, concat(static_cast<int>(kind), name)));
      };
      const auto alone = student("a", kind, 1), other_alone = student("b", StrategyKind::zero3, 2);
      train({alone.get()});
      train({other_alone.get()});
      const auto first = student("c", kind, 1), second = student("d", StrategyKind::zero3, 2);
      train({first.get(), second.get()});
      EXPECT_EQ(first->norms, alone->norms) << name(kind);
      EXPECT_EQ(first->values(), alone->values()) << name(kind);
      EXPECT_EQ(second->norms, other_alone->norms) << name(kind);
      EXPECT_EQ(second->values(), other_alone->values()) << name(kind);
      EXPECT_NE(first->values(), second->values());
    }
  });
}

/// A teacher of which each rank holds its shards runs forward in a student's pass.
TEST(OneTape, AnInferenceOnlyTeacherServesAStudent) {
  run_ranks(ranks, [](int rank, std::shared_ptr<Store> store) {
    Student teacher(StrategyKind::zero3, 5, rank, prefix_store(store, "teacher")),
        student(StrategyKind::zero2, 1, rank, prefix_store(store, "student"));
    Tape tape;
    teacher.strategy->attach(tape);
    student.strategy->attach(tape);
    const std::vector<float> before = teacher.values();
    const auto expected = [&] {
      ToyModel whole([](std::size_t p, std::size_t i) { return noise(p, i, 5); });
      Tape other;
      return *other
                  .value(whole.loss(
                      other, [&](std::size_t p, std::size_t i) { return noise(p, i, 5 + 10 * 7 + rank); }))
                  .data<float>();
    }();
    for (int step = 0; step < steps; ++step) {
      student.strategy->zero_grad();
      const Var own = student.loss(tape, step);
      Var taught;
      {
        const Tape::NoGrad no_grad(tape);
        taught = teacher.loss(tape, 7);
        EXPECT_EQ(*tape.value(taught).data<float>(), expected);
      }
      for (const Parameter* p : teacher.model.parameters()) EXPECT_FALSE(p->value.defined()) << p->name;
      student.strategy->begin_backward();
      tape.backward(nn::add(tape, own, taught));
      tape.reset();
      student.update();
    }
    Student alone(StrategyKind::zero2, 1, rank, prefix_store(store, "alone"));
    train({&alone});
    EXPECT_EQ(student.values(), alone.values());
    EXPECT_EQ(teacher.values(), before);
  });
}

TEST(OneTape, AManagedModelIsRefusedUntilItsStrategyIsGone) {
  auto comm = Communicator::connect(0, 1, memory_store());
  ToyModel model([](std::size_t p, std::size_t i) { return noise(p, i, 1); });
  auto first = make_strategy(StrategyKind::zero2, model, comm);
  const Error e = test::error_of([&] { make_strategy(StrategyKind::ddp, model, comm); });
  EXPECT_EQ(e.code(), Errc::invalid_argument);
  EXPECT_STREQ(
      e.what(),
      "parameter tied is managed by a zero2 strategy; destroy that before a ddp strategy is made for it");
  Tape tape;
  const auto train_with = [&](Strategy& strategy) {
    strategy.attach(tape);
    strategy.begin_backward();
    tape.backward(model.loss(tape, [](std::size_t, std::size_t) { return 1.0f; }));
    tape.reset();
    strategy.finish_gradients();
    return strategy.gradient_norm();
  };
  const double norm = train_with(*first);  // it still has its parameters
  first = nullptr;
  EXPECT_EQ(train_with(*make_strategy(StrategyKind::ddp, model, comm)), norm);
}

TEST(OneTape, AfterAStrategyItsParametersArePlain) {
  auto comm = Communicator::connect(0, 1, memory_store());
  ToyModel model([](std::size_t p, std::size_t i) { return noise(p, i, 1); });
  make_strategy(StrategyKind::ddp, model, comm).reset();
  for (Parameter* p : model.parameters()) {
    EXPECT_EQ(p->hooks, nullptr) << p->name;
    p->grad = {};
  }
  Tape tape;
  tape.backward(model.loss(tape, [](std::size_t, std::size_t) { return 1.0f; }));
  for (std::size_t i = 0; i < model[2].count(); ++i)
    EXPECT_EQ(model[2].grad.data<float>()[i], model[2].value.data<float>()[i]);
}

}  // namespace
}  // namespace rz
