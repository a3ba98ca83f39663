/// What is ZeRO-3's own: which parameters are there when.
#include "sharding/zero3.h"

#include <gtest/gtest.h>

#include <cmath>
#include <stdexcept>

#include "comm/core/error.h"
#include "tests/support/ranks.h"
#include "tests/support/toy_model.h"

namespace rz {
namespace {

using test::run_ranks;
using test::ToyModel;

float index_value(std::size_t p, std::size_t i) { return static_cast<float>(p * 1000 + i); }
float one(std::size_t, std::size_t) { return 1; }

void expect_none_there(ToyModel& model) {
  for (const Parameter* p : model.parameters()) EXPECT_FALSE(p->value.defined()) << p->name;
}

struct Rank {
  Rank(int rank, int size, std::shared_ptr<Store> store, StrategyOptions options = {})
      : comm(Communicator::connect(rank, size, std::move(store))), strategy(model, comm, std::move(options)) {
    strategy.attach(tape);
  }
  void pass() {
    const Var loss = model.loss(tape, one);
    strategy.begin_backward();
    tape.backward(loss);
    tape.reset();
    strategy.finish_gradients();
  }
  ToyModel model{index_value};
  Communicator comm;
  Tape tape;
  Zero3 strategy;
};

TEST(Zero3, AScopeHasItsParametersAndNoOthers) {
  run_ranks(3, [](int rank, std::shared_ptr<Store> store) {
    Rank r(rank, 3, std::move(store));
    expect_none_there(r.model);
    const auto scopes = r.model.scopes();
    for (const Scope* scope : {scopes[0], scopes[1], scopes[3], scopes[0], scopes[2]}) {  // any order
      const Tape::NoGrad no_grad(r.tape);
      r.tape.scope(*scope, [&] {
        for (const Parameter* p : scope->parameters) {
          const std::size_t index = r.model.index(p->name);
          for (std::size_t i = 0; i < p->count(); ++i)
            EXPECT_EQ(p->value.data<float>()[i], index_value(index, i));
        }
        std::size_t there = 0;
        for (const Parameter* p : r.model.parameters()) there += p->value.defined();
        EXPECT_EQ(there, scope->parameters.size());
        return Var{};
      });
      expect_none_there(r.model);
    }
  });
}

// The last scope's prefetch is still on its way when a rank has no more to do.
TEST(Zero3, EndingWithAPrefetchInFlightHarmsNobody) {
  run_ranks(3, [](int rank, std::shared_ptr<Store> store) {
    for (int i = 0; i < 100; ++i) {
      Rank r(rank, 3, prefix_store(store, str(i, "/")));
      const Tape::NoGrad no_grad(r.tape);
      r.tape.scope(*r.model.scopes()[0], [] { return Var{}; });
    }
  });
}

TEST(Zero3, NestedScopesMayShareParameters) {
  run_ranks(2, [](int rank, std::shared_ptr<Store> store) {
    Rank r(rank, 2, std::move(store));
    const auto scopes = r.model.scopes();
    const Tape::NoGrad no_grad(r.tape);
    r.tape.scope(*scopes[0], [&] {
      r.tape.scope(*scopes[3], [] { return Var{}; });  // both use "tied"
      EXPECT_TRUE(r.model[0].value.defined());
      EXPECT_EQ(r.model[0].value.data<float>()[5], index_value(0, 5));
      return Var{};
    });
    expect_none_there(r.model);
  });
}

TEST(Zero3, NothingIsHeldBetweenSteps) {
  run_ranks(2, [](int rank, std::shared_ptr<Store> store) {
    Rank r(rank, 2, std::move(store));
    const auto sgd = make_sgd({});
    for (int step = 0; step < 3; ++step) {
      r.strategy.zero_grad();
      r.pass();
      for (const Parameter* p : r.model.parameters()) EXPECT_FALSE(p->grad.defined()) << p->name;
      r.strategy.step(*sgd);
      expect_none_there(r.model);
      EXPECT_EQ(r.strategy.memory().transient_in_use, 0u);
    }
  });
}

TEST(Zero3, RecomputedScopesGatherAgain) {
  run_ranks(2, [](int rank, std::shared_ptr<Store> store) {
    Rank r(rank, 2, std::move(store));
    const Scope& scope = *r.model.scopes()[2];
    Parameter* p = scope.parameters[1];
    const Var x = r.tape.variable(Tensor::zeros({}));
    int runs = 0;
    const Var loss = r.tape.recompute(scope, x, [&, p](Var in) {
      ++runs;
      const Var w = r.tape.parameter(*p);
      EXPECT_TRUE(p->value.defined());
      return r.tape.record(Tensor::zeros({}), {in, w}, [w](Tape& t, const Tensor& d_out) {
        const auto target = t.grad_target(w);
        for (std::size_t i = 0; i < target.tensor.count(); ++i)
          target.tensor.data<float>()[i] = *d_out.data<float>() * t.value(w).data<float>()[i];
      });
    });
    r.strategy.begin_backward();
    r.tape.backward(loss);
    EXPECT_EQ(runs, 2);
    r.strategy.finish_gradients();
    double square = 0;
    for (std::size_t i = 0; i < p->count(); ++i)
      square += std::pow(static_cast<double>(index_value(7, i)), 2);
    EXPECT_EQ(r.strategy.gradient_norm(), std::sqrt(square));
  });
}

TEST(Zero3, AFailedForwardPassLeavesNothingStale) {
  run_ranks(2, [](int rank, std::shared_ptr<Store> store) {
    Rank r(rank, 2, std::move(store));
    EXPECT_THROW(r.tape.scope(*r.model.scopes()[1], [&]() -> Var { throw std::runtime_error("bad token"); }),
                 std::runtime_error);
    r.tape.reset();
    r.strategy.zero_grad();
    expect_none_there(r.model);
    EXPECT_EQ(r.strategy.memory().transient_in_use, 0u);
    r.pass();
    r.strategy.step(*make_sgd({.learning_rate = 0}));
    expect_none_there(r.model);
  });
}

struct OneScope final : Module {
  std::vector<Parameter*> parameters() override { return {&listed, &forgotten}; }
  std::vector<const Scope*> scopes() override { return {&scope}; }
  Parameter listed{.name = "listed", .shape = {3}}, forgotten{.name = "forgotten", .shape = {2}};
  Scope scope{"only", {&listed}};
};

TEST(Zero3, AParameterInNoScopeIsNamed) {
  OneScope model;
  auto comm = Communicator::connect(0, 1, memory_store());
  try {
    Zero3 strategy(model, comm, {});
    FAIL() << "no error";
  } catch (const Error& e) {
    EXPECT_EQ(e.code(), Errc::invalid_argument);
    EXPECT_STREQ(e.what(),
                 "zero3: parameter forgotten stands in no scope; list it in the scope that uses it");
  }
}

TEST(Zero3, FrozenModelRunsForwardOnly) {
  run_ranks(2, [](int rank, std::shared_ptr<Store> store) {
    auto comm = Communicator::connect(rank, 2, std::move(store));
    ToyModel model(index_value);
    for (Parameter* p : model.parameters()) p->requires_grad = false;
    Zero3 strategy(model, comm, {});
    Tape tape;
    strategy.attach(tape);
    model.loss(tape, one);
    const MemoryReport memory = strategy.memory();
    EXPECT_EQ(memory.gradients, 0u);
    EXPECT_EQ(memory.optimizer_state, 0u);
    EXPECT_GT(memory.parameters, 0u);
  });
}

}  // namespace
}  // namespace rz
