/// ZeRO-3 only: which parameters are gathered when.
#include <gtest/gtest.h>

#include <cmath>
#include <stdexcept>

#include "autograd_lite/ops.h"
#include "comm/core/error.h"
#include "sharding/optim/optimizers.h"
#include "sharding/strategy/strategy.h"
#include "tests/lab/group.h"
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
      : comm(Communicator::connect(rank, size, std::move(store))),
        strategy(make_strategy(StrategyKind::zero3, model, comm, std::move(options))) {
    strategy->attach(tape);
  }
  void pass() {
    const Var loss = model.loss(tape, one);
    strategy->begin_backward();
    tape.backward(loss);
    tape.reset();
    strategy->finish_gradients();
  }
  ToyModel model{index_value};
  Communicator comm;
  Tape tape;
  std::unique_ptr<Strategy> strategy;
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

// The last scope's prefetch is still in flight when a rank has ended its pass.
TEST(Zero3, DestructionWithAPrefetchInFlightIsClean) {
  run_ranks(3, [](int rank, std::shared_ptr<Store> store) {
    for (int i = 0; i < 100; ++i) {
      Rank r(rank, 3, prefix_store(store, concat(i, "/")));
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
      r.strategy->zero_grad();
      r.pass();
      for (const Parameter* p : r.model.parameters()) EXPECT_FALSE(p->grad.defined()) << p->name;
      r.strategy->step(*sgd);
      expect_none_there(r.model);
      EXPECT_EQ(r.strategy->memory().transient_in_use, 0u);
    }
  });
}

TEST(Zero3, CheckpointedScopesGatherAgain) {
  run_ranks(2, [](int rank, std::shared_ptr<Store> store) {
    Rank r(rank, 2, std::move(store));
    const Scope& scope = *r.model.scopes()[2];
    Parameter* p = scope.parameters[1];
    const Var x = r.tape.variable(Tensor::zeros({}));
    int runs = 0;
    const Var loss = r.tape.checkpoint(scope, x, [&, p](Var in) {
      ++runs;
      const Var w = r.tape.parameter(*p);
      EXPECT_TRUE(p->value.defined());
      return r.tape.record(Tensor::zeros({}), {in, w}, [w](Tape& t, const Tensor& d_out) {
        const auto target = t.grad_target(w);
        for (std::size_t i = 0; i < target.tensor.count(); ++i)
          target.tensor.data<float>()[i] = *d_out.data<float>() * t.value(w).data<float>()[i];
      });
    });
    r.strategy->begin_backward();
    r.tape.backward(loss);
    EXPECT_EQ(runs, 2);
    r.strategy->finish_gradients();
    double square = 0;
    for (std::size_t i = 0; i < p->count(); ++i)
      square += std::pow(static_cast<double>(index_value(7, i)), 2);
    EXPECT_EQ(r.strategy->gradient_norm(), std::sqrt(square));
  });
}

/// Its flat parameter is reduced when it leaves backward for the last time, with the gradients of every run.
TEST(Zero3, AScopeMayRunTwice) {
  run_ranks(2, [](int rank, std::shared_ptr<Store> store) {
    Rank r(rank, 2, std::move(store));
    const Scope &scope = *r.model.scopes()[2], &after = *r.model.scopes()[3];
    Parameter *p = scope.parameters[1], *norm = after.parameters[0];
    Var sum = r.tape.variable(Tensor::zeros({}));
    const auto add_once = [&](Var in, Parameter* p) {
      const Var w = r.tape.parameter(*p);
      return r.tape.record(Tensor::zeros({}), {in, w}, [in, w](Tape& t, const Tensor& d_out) {
        const auto target = t.grad_target(w);
        for (std::size_t i = 0; i < target.tensor.count(); ++i) {
          float& place = target.tensor.data<float>()[i];
          place = (target.accumulate ? place : 0) + *d_out.data<float>() * t.value(w).data<float>()[i];
        }
        t.accumulate_grad(in, d_out);
      });
    };
    for (int run = 0; run < 2; ++run) sum = r.tape.scope(scope, [&] { return add_once(sum, p); });
    sum = r.tape.scope(after, [&] { return add_once(sum, norm); });  // so that its reduction begins at once
    r.strategy->begin_backward();
    r.tape.backward(sum);
    r.strategy->finish_gradients();
    double square = std::pow(static_cast<double>(index_value(8, 0)), 2);
    for (std::size_t i = 0; i < p->count(); ++i)
      square += std::pow(2 * static_cast<double>(index_value(7, i)), 2);
    EXPECT_EQ(r.strategy->gradient_norm(), std::sqrt(square));
  });
}

TEST(Zero3, AFailedForwardPassLeavesNothingStale) {
  run_ranks(2, [](int rank, std::shared_ptr<Store> store) {
    Rank r(rank, 2, std::move(store));
    EXPECT_THROW(r.tape.scope(*r.model.scopes()[1], [&]() -> Var { throw std::runtime_error("bad token"); }),
                 std::runtime_error);
    r.tape.reset();
    r.strategy->zero_grad();
    expect_none_there(r.model);
    EXPECT_EQ(r.strategy->memory().transient_in_use, 0u);
    r.pass();
    r.strategy->step(*make_sgd({.learning_rate = 0}));
    expect_none_there(r.model);
  });
}

struct OneScope final : Module {
  OneScope() {
    register_parameter(listed, "listed", {3});
    register_parameter(forgotten, "forgotten", {2});
    register_scope("only", std::vector<Parameter*>{&listed, &forgotten}).parameters.pop_back();
  }
  Parameter listed, forgotten;
};

TEST(Zero3, AParameterInNoScopeIsNamed) {
  OneScope model;
  auto comm = Communicator::connect(0, 1, memory_store());
  try {
    const auto strategy = make_strategy(StrategyKind::zero3, model, comm);
    FAIL() << "no error";
  } catch (const Error& e) {
    EXPECT_EQ(e.code(), Errc::invalid_argument);
    EXPECT_STREQ(e.what(),
                 "zero3: parameter forgotten stands in no scope; list it in the scope that uses it");
  }
}

/// One operator on parameters of these shapes, in a scope of its own.
struct OneOperator final : Module {
  using Run = std::function<Var(Tape&, const std::vector<Var>&)>;
  OneOperator(const std::vector<Shape>& shapes, Run run) : run(std::move(run)) {
    for (const Shape& shape : shapes) {
      auto& p = *storage.emplace_back(std::make_unique<Parameter>());
      register_parameter(p, concat("p", storage.size()), shape);
      p.value = Tensor::empty(shape);
      for (std::size_t i = 0; i < p.count(); ++i)
        p.value.data<float>()[i] = static_cast<float>((i * 7 + storage.size()) % 11) / 8 - 0.5f;
    }
  }
  /// The operator within the scope, and behind it a scalar of its output.
  Var loss(Tape& tape) {
    const Var out = in_scope(tape, [&] {
      std::vector<Var> vars;
      for (Parameter* p : parameters()) vars.push_back(tape.parameter(*p));
      return run(tape, vars);
    });
    const Tensor zeros = Tensor::zeros(tape.value(out).shape());
    return nn::mse(tape, nn::mul(tape, out, 1), zeros);
  }
  Run run;
  std::vector<std::unique_ptr<Parameter>> storage;
};

struct OperatorCase {
  const char* name;
  std::vector<Shape> shapes;
  OneOperator::Run run;
};
void PrintTo(const OperatorCase& c, std::ostream* out) { *out << c.name; }

Tensor counting(const Shape& shape) {
  Tensor t = Tensor::empty(shape);
  for (std::size_t i = 0; i < t.count(); ++i) t.data<float>()[i] = static_cast<float>(i % 5) / 4 - 0.5f;
  return t;
}

std::vector<OperatorCase> products_of_parameters() {
  const Tensor data = counting({4, 6});
  const auto layout = nn::WeightLayout::in_out;
  return {
      {"matmul_right",
       {{6, 8}},
       [=](Tape& t, auto& v) { return nn::matmul(t, t.constant(data), false, v[0], false); }},
      {"matmul_left",
       {{8, 4}},
       [=](Tape& t, auto& v) { return nn::matmul(t, v[0], false, t.constant(data), false); }},
      {"matmul_both",
       {{8, 4}, {4, 3}},
       [](Tape& t, auto& v) { return nn::matmul(t, v[0], false, v[1], false); }},
      {"linear",
       {{4, 6}, {6, 3}, {3}},
       [=](Tape& t, auto& v) { return nn::linear(t, v[0], v[1], v[2], layout); }},
      {"linear_gelu",
       {{4, 6}, {6, 3}, {3, 2}},
       [=](Tape& t, auto& v) {
         return nn::linear(t, nn::linear_gelu(t, v[0], v[1], Var(), layout), v[2], Var(), layout);
       }},
  };
}

std::vector<OperatorCase> elements_of_parameters() {
  const Tensor data = counting({4, 6});
  return {
      {"mul", {{4, 6}, {4, 6}}, [](Tape& t, auto& v) { return nn::mul(t, v[0], v[1]); }},
      {"mul_by_data", {{4, 6}}, [=](Tape& t, auto& v) { return nn::mul(t, t.constant(data), v[0]); }},
      {"div_broadcast", {{4, 6}, {6}}, [](Tape& t, auto& v) { return nn::div(t, v[0], nn::exp(t, v[1])); }},
      {"maximum", {{4, 6}, {4, 1}}, [](Tape& t, auto& v) { return nn::maximum(t, v[0], v[1]); }},
      {"pow", {{4, 6}, {6}}, [](Tape& t, auto& v) { return nn::pow(t, nn::exp(t, v[0]), v[1]); }},
      {"elu", {{4, 6}}, [](Tape& t, auto& v) { return nn::elu(t, v[0]); }},
      {"where",
       {{4, 6}, {6}},
       [=](Tape& t, auto& v) { return nn::where(t, nn::lt(t, t.constant(data), 0), v[0], v[1]); }},
      {"where_of_a_parameter",
       {{4, 6}, {6}},
       [](Tape& t, auto& v) { return nn::where(t, v[0], v[0], v[1]); }},
      {"silu", {{4, 6}}, [](Tape& t, auto& v) { return nn::silu(t, v[0]); }},
      {"clamp", {{4, 6}}, [](Tape& t, auto& v) { return nn::clamp(t, v[0], -0.3f, 0.3f); }},
      {"log_softmax", {{4, 6}}, [](Tape& t, auto& v) { return nn::log_softmax(t, v[0]); }},
      {"gelu", {{4, 6}}, [](Tape& t, auto& v) { return nn::gelu(t, v[0]); }},
      {"swiglu", {{4, 6}, {4, 6}}, [](Tape& t, auto& v) { return nn::swiglu(t, v[0], v[1]); }},
      {"relu", {{4, 6}}, [](Tape& t, auto& v) { return nn::relu(t, v[0]); }},
      {"tanh", {{4, 6}}, [](Tape& t, auto& v) { return nn::tanh(t, v[0]); }},
      {"softmax", {{4, 6}}, [](Tape& t, auto& v) { return nn::softmax(t, v[0]); }},
  };
}

std::vector<OperatorCase> rows_of_parameters() {
  const Tensor data = counting({4, 6}), labels = Tensor::zeros({4}, DType::i32);
  return {
      {"mean", {{4, 6}}, [](Tape& t, auto& v) { return nn::mean(t, v[0], 0); }},
      {"layer_norm",
       {{4, 6}, {6}, {6}},
       [](Tape& t, auto& v) { return nn::layer_norm(t, v[0], v[1], v[2], 1e-5f); }},
      {"add_layer_norm",
       {{4, 6}, {4, 6}, {6}, {6}},
       [](Tape& t, auto& v) { return nn::add_layer_norm(t, v[0], v[1], v[2], v[3], 1e-5f).norm; }},
      {"rms_norm", {{4, 6}, {6}}, [](Tape& t, auto& v) { return nn::rms_norm(t, v[0], v[1], 1e-5f); }},
      {"add_rms_norm",
       {{4, 6}, {4, 6}, {6}},
       [](Tape& t, auto& v) { return nn::add_rms_norm(t, v[0], v[1], v[2], 1e-5f).norm; }},
      {"reshape",
       {{4, 6}},
       [=](Tape& t, auto& v) {
         const Var once = nn::reshape(t, v[0], {2, 12});
         return nn::matmul(t, t.constant(data), false, nn::reshape(t, once, {6, 4}), false);
       }},
      {"causal_attention", {{1, 4, 12}}, [](Tape& t, auto& v) { return nn::causal_attention(t, v[0], 2); }},
      {"attention",
       {{1, 4, 8}, {1, 5, 4}, {1, 5, 4}},
       [](Tape& t, auto& v) { return nn::attention(t, v[0], v[1], v[2], {.heads = 4, .kv_heads = 2}); }},
      {"rotary",
       {{1, 4, 8}},
       [](Tape& t, auto& v) { return nn::rotary(t, v[0], 2, ops::rotary_tables(4, 4)); }},
      {"cross_entropy", {{4, 6}}, [=](Tape& t, auto& v) { return nn::cross_entropy(t, v[0], labels).sum; }},
      {"mse", {{4, 6}}, [=](Tape& t, auto& v) { return nn::mse(t, v[0], data); }},
  };
}

std::vector<OperatorCase> operators_on_parameters() {
  std::vector<OperatorCase> all = products_of_parameters();
  for (const auto& more : {elements_of_parameters(), rows_of_parameters()})
    all.insert(all.end(), more.begin(), more.end());
  return all;
}

class OperatorOnParameters : public testing::TestWithParam<OperatorCase> {};

TEST_P(OperatorOnParameters, KeepsNoneOfThemAfterForward) {
  OneOperator plain(GetParam().shapes, GetParam().run);
  Tape alone;
  alone.backward(plain.loss(alone));
  double square = 0;
  for (const Parameter* p : plain.parameters())
    for (std::size_t i = 0; i < p->count(); ++i) square += std::pow(double{p->grad.data<float>()[i]}, 2);
  ASSERT_GT(square, 0);

  lab::group(2, [&](Communicator& comm) {
    OneOperator model(GetParam().shapes, GetParam().run);
    Tape tape;
    StrategyOptions options;
    options.gathers.prefetch_bucket_size = 0;
    const auto strategy = make_strategy(StrategyKind::zero3, model, comm, std::move(options));
    strategy->attach(tape);
    const Var loss = model.loss(tape);
    EXPECT_EQ(strategy->memory().transient_in_use, 0u) << "after forward a parameter is still there";
    strategy->begin_backward();
    tape.backward(loss);
    strategy->finish_gradients();
    EXPECT_NEAR(strategy->gradient_norm(), std::sqrt(square), 1e-6 * std::sqrt(square));
  });
}

INSTANTIATE_TEST_SUITE_P(Zero3, OperatorOnParameters, testing::ValuesIn(operators_on_parameters()),
                         [](const auto& info) { return info.param.name; });

TEST(Zero3, FrozenModelRunsForwardOnly) {
  lab::group(2, [](Communicator& comm) {
    ToyModel model(index_value);
    for (Parameter* p : model.parameters()) p->requires_grad = false;
    const auto strategy = make_strategy(StrategyKind::zero3, model, comm);
    Tape tape;
    strategy->attach(tape);
    model.loss(tape, one);
    const MemoryReport memory = strategy->memory();
    EXPECT_EQ(memory.gradients, 0u);
    EXPECT_EQ(memory.optimizer_state, 0u);
    EXPECT_GT(memory.parameters, 0u);
  });
}

}  // namespace
}  // namespace rz
