/// Rules about the gradients of a pass: find_unused_parameters and static_graph.
#include <gtest/gtest.h>

#include <vector>

#include "comm/core/error.h"
#include "sharding/optim/optimizers.h"
#include "sharding/strategy/strategy.h"
#include "tests/lab/group.h"
#include "tests/support/error_of.h"
#include "tests/support/toy_training.h"

namespace rz {
namespace {

using test::kinds;
using test::values_of;

constexpr std::size_t sizes[] = {300, 70, 130, 9};

/// Parameters p0 to p3; each loss uses some of them. A pass gives w the gradient (1 + its number) · w.
class Choice final : public Module {
 public:
  Choice() {
    for (const std::size_t n : sizes) {
      auto& p = *parameters_.emplace_back(std::make_unique<Parameter>());
      register_parameter(p, concat("p", parameters_.size() - 1), {n});
      p.value = Tensor::zeros(p.shape);
      std::fill_n(p.value.data<float>(), n, 1.0f);
    }
  }
  Parameter& operator[](std::size_t i) { return *parameters_[i]; }

  Var loss(Tape& tape, const std::vector<std::size_t>& used) {
    return in_scope(tape, [&] {
      Var sum = tape.variable(Tensor::zeros({}));
      for (const std::size_t i : used) {
        const Var w = tape.parameter(*parameters_[i]);
        const float factor = 1 + static_cast<float>(i);
        sum = tape.record(Tensor::zeros({}), {sum, w}, [sum, w, factor](Tape& t, const Tensor& d_out) {
          const auto target = t.grad_target(w);
          if (target.tensor.defined())
            for (std::size_t k = 0; k < target.tensor.count(); ++k)
              target.tensor.data<float>()[k] =
                  factor + (target.accumulate ? target.tensor.data<float>()[k] : 0);
          t.accumulate_grad(sum, d_out);
        });
      }
      return sum;
    });
  }

 private:
  std::vector<std::unique_ptr<Parameter>> parameters_;
};

using Used = std::vector<std::size_t>;
const Used all_of_them{0, 1, 2, 3};

struct Rank {
  Rank(StrategyKind kind, Communicator& comm, const StrategyOptions& options, const Used& frozen = {})
      : strategy((freeze(frozen), make_strategy(kind, model, comm, options))) {
    strategy->attach(tape);
  }
  void freeze(const Used& frozen) {
    for (const std::size_t i : frozen) model[i].requires_grad = false;
  }
  void pass(const Used& used, bool synchronise = true) {
    strategy->begin_backward(synchronise);
    tape.backward(model.loss(tape, used));
    tape.reset();
  }
  void update(const Used& used) {
    strategy->zero_grad();
    if (strategy->kind() == StrategyKind::zero3) {
      const Var loss = model.loss(tape, used);
      strategy->begin_backward();
      tape.backward(loss);
      tape.reset();
    } else {
      pass(used);
    }
    strategy->finish_gradients();
    strategy->step(*sgd);
  }
  Choice model;
  Tape tape;
  std::unique_ptr<Optimizer> sgd = make_sgd({.learning_rate = 1});
  std::unique_ptr<Strategy> strategy;
};

void expect_error(Rank& rank, const Used& used, Errc code, int culprit, const std::string& words) {
  const Error e = test::error_of([&] { rank.update(used); });
  EXPECT_EQ(e.code(), code) << e.what();
  EXPECT_EQ(e.culprit(), culprit);
  EXPECT_NE(std::string(e.what()).find(words), std::string::npos) << e.what();
}

class PassRules : public testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Ranks, PassRules, testing::Values(1, 2, 3, 4));

/// p1 is used on no rank, p2 on rank 0 alone.
TEST_P(PassRules, AnUnusedParameterIsNamedWithItsRanks) {
  const std::string others[] = {"", "; p2 on rank 1;", "; p2 on ranks 1 and 2;", "; p2 on ranks 1, 2 and 3;"};
  for (const StrategyKind kind : kinds)
    lab::group(GetParam(), [&](Communicator& comm) {
      SCOPED_TRACE(concat(name(kind), " on rank ", comm.rank()));
      Rank r(kind, comm, {.find_unused_parameters = false});
      const std::string& other = others[GetParam() - 1];
      expect_error(r, comm.rank() == 0 ? Used{0, 2, 3} : Used{0, 3}, Errc::invalid_argument, 0,
                   concat("no gradient reached p1 on every rank", other.empty() ? ";" : other));
      r.update(all_of_them);  // training continues, from the values before
      EXPECT_EQ(values_of(*r.strategy, r.model[1])[69], -1.0f);
      EXPECT_EQ(values_of(*r.strategy, r.model[2])[5], -2.0f);
    });
}

TEST_P(PassRules, WithFindUnusedParametersItContributesZeros) {
  for (const StrategyKind kind : kinds)
    lab::group(GetParam(), [&](Communicator& comm) {
      Rank r(kind, comm, {.find_unused_parameters = true});
      r.update(comm.rank() == 0 ? Used{0, 2, 3} : Used{0, 3});
      EXPECT_EQ(values_of(*r.strategy, r.model[1])[69], 1.0f);
      EXPECT_FLOAT_EQ(values_of(*r.strategy, r.model[2])[5], 1 - 3.0f / static_cast<float>(GetParam()));
    });
}

TEST_P(PassRules, FrozenIsNotUnused) {
  for (const StrategyKind kind : kinds)
    lab::group(GetParam(), [&](Communicator& comm) {
      Rank r(kind, comm, {.find_unused_parameters = false, .static_graph = true}, {1});
      for (int update = 1; update <= 3; ++update) {
        r.update(update % 2 ? Used{0, 1, 2, 3} : Used{0, 2, 3});
        EXPECT_EQ(values_of(*r.strategy, r.model[0])[0], 1.0f - static_cast<float>(update));
        EXPECT_EQ(values_of(*r.strategy, r.model[1])[0], 1.0f);
      }
    });
}

/// The update reads the gradients of all passes since zero_grad().
TEST(PassRules, AParameterIsUsedIfAnyPassOfTheUpdateUsesIt) {
  lab::group(2, [](Communicator& comm) {
    Rank r(StrategyKind::zero2, comm, {.find_unused_parameters = false});
    r.strategy->zero_grad();
    r.pass({0, 1}, false);
    r.pass({2, 3});
    r.strategy->finish_gradients();
    r.strategy->step(*r.sgd);
    EXPECT_EQ(values_of(*r.strategy, r.model[1])[0], -1.0f);
  });
}

TEST(PassRules, ARankWithoutDataBreaksNone) {
  for (const StrategyKind kind : {StrategyKind::ddp, StrategyKind::zero1, StrategyKind::zero2})
    lab::group(3, [&](Communicator& comm) {
      Rank r(kind, comm, {.find_unused_parameters = false, .static_graph = true});
      r.update(all_of_them);
      r.strategy->zero_grad();
      if (comm.rank() == 1)
        r.strategy->backward_without_data();
      else
        r.pass(all_of_them);
      r.strategy->finish_gradients();
      r.strategy->step(*r.sgd);
      EXPECT_FLOAT_EQ(values_of(*r.strategy, r.model[2])[0], 1 - 3 - 2);
      r.strategy->zero_grad();  // rank 1 is not named beside rank 2, which lacks p0
      if (comm.rank() == 1)
        r.strategy->backward_without_data();
      else
        r.pass(comm.rank() == 2 ? Used{1, 2, 3} : all_of_them);
      const Error e = test::error_of([&] { r.strategy->finish_gradients(); });
      EXPECT_NE(std::string(e.what()).find("rank 2 computed no gradient of p0"), std::string::npos)
          << e.what();
    });
}

// ---- static_graph

TEST_P(PassRules, AnotherGraphThanTheFirstIsNamed) {
  const int last = GetParam() - 1;
  for (const StrategyKind kind : kinds)
    lab::group(GetParam(), [&](Communicator& comm) {
      SCOPED_TRACE(concat(name(kind), " on rank ", comm.rank()));
      Rank r(kind, comm, {.static_graph = true});
      const Used graph{3, 2, 0};
      r.update(graph);
      r.update(graph);
      const auto changed = [&](const Used& used) { return comm.rank() == last ? used : graph; };
      expect_error(r, changed({3, 2, 1, 0}), Errc::mismatch, last,
                   concat("static_graph: rank ", last, " computed a gradient of p1, but none"));
      expect_error(r, changed({3, 0}), Errc::mismatch, last,
                   concat("static_graph: rank ", last, " computed no gradient of p2, but one"));
      if (kind != StrategyKind::zero3)  // where gradients of a scope are ready together
        expect_error(
            r, changed({2, 3, 0}), Errc::mismatch, last,
            concat("p3 became ready as number 1 on rank ", last, ", that of p2 in the first update"));
      r.update(graph);
      EXPECT_EQ(values_of(*r.strategy, r.model[2])[0], 1.0f - 3 * 3) << "three updates were made";
    });
}

/// p0 and p2 are 300 and 130 elements, padded to 64 per member and bucket.
TEST_P(PassRules, ParametersThatAStaticGraphLeavesOutAreNotExchanged) {
  lab::group(GetParam(), [&](Communicator& comm) {
    const auto bytes_of_updates = [&](bool static_graph) {
      Rank r(StrategyKind::ddp, comm, {.static_graph = static_graph});
      std::vector<std::uint64_t> bytes;
      for (int update = 0; update < 3; ++update) {
        const std::uint64_t before = r.strategy->traffic().total().all_reduce.bytes;
        r.update(comm.rank() == 0 ? Used{0, 2} : Used{0});
        bytes.push_back(r.strategy->traffic().total().all_reduce.bytes - before);
        EXPECT_FLOAT_EQ(values_of(*r.strategy, r.model[2])[0],
                        1 - 3 * static_cast<float>(update + 1) / static_cast<float>(GetParam()));
        EXPECT_EQ(values_of(*r.strategy, r.model[1])[0], 1.0f);
      }
      return bytes;
    };
    const auto padded = [&](std::uint64_t n) {
      const auto granularity = static_cast<std::uint64_t>(64 * GetParam());
      return 4 * ((n + granularity - 1) / granularity * granularity);
    };
    const std::uint64_t all = padded(320 + 128 + 192 + 64), used = padded(320 + 192);
    EXPECT_EQ(bytes_of_updates(false), (std::vector{all, all, all}));
    EXPECT_EQ(bytes_of_updates(true), (std::vector{all, used, used}));
  });
}

}  // namespace
}  // namespace rz
