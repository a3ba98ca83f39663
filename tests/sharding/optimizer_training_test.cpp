// Runs: ci long
// Not under sanitizers: OptimizerTraining[.](FollowsItsReference|ASkippedUpdate|AnotherNumberOfThreads)

/// Every optimizer in every strategy: against references in double, with the same bits for every strategy and
/// bucket size, with states that can be moved from one strategy to another.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <map>
#include <random>

#include "comm/core/error.h"
#include "sharding/optim/optimizers.h"
#include "sharding/strategy/optimizer_state.h"
#include "sharding/strategy/strategy.h"
#include "tests/lab/training.h"
#include "tests/support/error_of.h"
#include "tests/support/reference_optimizers.h"
#include "tests/support/toy_model.h"

namespace rz {
namespace {

using test::ToyModel;
using Values = std::vector<double>;

constexpr int updates = 24;

float noise(std::size_t p, std::size_t i, int seed) {
  std::minstd_rand random(static_cast<unsigned>(p * 1000 + i + static_cast<std::size_t>(seed) * 100000 + 1));
  random.discard(3);
  return static_cast<float>(random()) / 1e9f - 1;
}
float initial(std::size_t p, std::size_t i) { return noise(p, i, 999); }
float datum(std::size_t p, std::size_t i, int step, int rank) { return noise(p, i, step * 8 + rank); }
/// Rank 0 alone reaches "sometimes", and in every third step no rank.
bool reaches_sometimes(int step, int rank) { return rank == 0 && step % 3 != 0; }
double rate_at(double base, int step) { return base * (1 - step / 40.0); }

// ---- references

using Reference = test::ReferenceState;
/// Update number t of a parameter of a group, 0 or 1, from the mean of the gradients.
using Rule = std::function<void(Reference&, const Values& g, int group, double rate, int t)>;

// ---- cases: group 0 has the matrices, group 1 the rest

template <class Options>
ParameterGroups<Options> two_groups(const Options& matrices, const Options& rest) {
  return ParameterGroups<Options>({{"matrices", is_matrix, matrices}, {"rest", {}, rest}});
}

struct Case {
  const char* name;
  std::function<std::unique_ptr<Optimizer>()> make;
  Rule rule;
  double rates[2];
  double tolerance;
};
void PrintTo(const Case& c, std::ostream* out) { *out << c.name; }

const SgdOptions sgd_groups[] = {{.momentum = 0.9, .weight_decay = 0.1, .nesterov = true},
                                 {.momentum = 0.5, .dampening = 0.25}};
const AdamOptions adam_groups[] = {{.beta2 = 0.99, .weight_decay = 0.1}, {.beta1 = 0.8, .beta2 = 0.95}};
// The second group has no third state.
const AdamOptions amsgrad_groups[] = {{.beta2 = 0.8, .weight_decay = 0.1, .amsgrad = true},
                                      {.beta1 = 0.8, .beta2 = 0.9, .maximize = true}};
const AdamOptions amsgrad_maximize_groups[] = {
    {.beta1 = 0.8, .beta2 = 0.8, .weight_decay = 0.1, .maximize = true},
    {.beta2 = 0.7, .amsgrad = true, .maximize = true}};
const SgdOptions sgd_maximize_groups[] = {
    {.momentum = 0.9, .weight_decay = 0.1, .dampening = 0.5, .maximize = true},
    {.weight_decay = 0.1, .maximize = true}};
const RmspropOptions rmsprop_groups[] = {
    {.alpha = 0.9, .weight_decay = 0.1, .momentum = 0.9, .centered = true}, {.alpha = 0.95}};
const RmspropOptions rmsprop_maximize_groups[] = {{.alpha = 0.9, .momentum = 0.5, .maximize = true},
                                                  {.alpha = 0.9, .centered = true, .maximize = true}};
const LionOptions lion_groups[] = {{.beta2 = 0.99, .weight_decay = 0.1}, {.beta1 = 0.8, .beta2 = 0.9}};
const AdagradOptions adagrad_groups[] = {{.weight_decay = 0.1, .lr_decay = 0.05, .initial_accumulator = 0.25},
                                         {.lr_decay = 0.05}};
const LambOptions lamb_groups[] = {
    {.beta2 = 0.99, .epsilon = 1e-6, .weight_decay = 0.1},
    {.beta2 = 0.95, .epsilon = 1e-6, .max_coeff = 0.3, .bias_correction = false, .eps_inside_sqrt = true}};
const MuonOptions muon_matrices{.momentum = 0.9, .weight_decay = 0.1};
const AdamOptions muon_rest{.beta1 = 0.8, .beta2 = 0.95, .epsilon = 1e-10};

/// Adagrad that maximizes.
AdagradOptions maximizing(AdagradOptions o) {
  o.maximize = true;
  return o;
}

const Case cases[] = {
    {"sgd",
     [] { return make_sgd(two_groups(sgd_groups[0], sgd_groups[1])); },
     [](Reference& r, const Values& g, int group, double rate, int t) {
       test::sgd_rule(r, g, sgd_groups[group], rate, t);
     },
     {0.05, 0.1},
     1e-5},
    {"adam",
     [] { return make_adam(two_groups(adam_groups[0], adam_groups[1])); },
     [](Reference& r, const Values& g, int group, double rate, int t) {
       test::adam_rule(r, g, adam_groups[group], false, rate, t);
     },
     {0.01, 0.03},
     3e-6},
    {"adamw",
     [] { return make_adamw(two_groups(adam_groups[0], adam_groups[1])); },
     [](Reference& r, const Values& g, int group, double rate, int t) {
       test::adam_rule(r, g, adam_groups[group], true, rate, t);
     },
     {0.01, 0.03},
     3e-6},
    {"lion",
     [] { return make_lion(two_groups(lion_groups[0], lion_groups[1])); },
     [](Reference& r, const Values& g, int group, double rate, int) {
       test::lion_rule(r, g, lion_groups[group], rate);
     },
     {0.003, 0.01},
     3e-6},
    {"adagrad",
     [] { return make_adagrad(two_groups(adagrad_groups[0], adagrad_groups[1])); },
     [](Reference& r, const Values& g, int group, double rate, int t) {
       test::adagrad_rule(r, g, adagrad_groups[group], rate, t);
     },
     {0.05, 0.02},
     3e-6},
    {"lamb",
     [] { return make_lamb(two_groups(lamb_groups[0], lamb_groups[1])); },
     [](Reference& r, const Values& g, int group, double rate, int t) {
       test::lamb_rule(r, g, lamb_groups[group], rate, t);
     },
     {0.02, 0.01},
     3e-6},
    {"muon",
     [] {
       return make_muon(ParameterGroups<MuonOptions>({{"matrices", is_matrix, muon_matrices}}),
                        ParameterGroups<AdamOptions>({{"rest", {}, muon_rest}}));
     },
     [](Reference& r, const Values& g, int group, double rate, int t) {
       group == 0 ? test::muon_rule(r, g, muon_matrices, rate)
                  : test::adam_rule(r, g, muon_rest, true, rate, t);
     },
     {0.02, 0.03},
     3e-6},
    {"adamw_amsgrad",
     [] { return make_adamw(two_groups(amsgrad_groups[0], amsgrad_groups[1])); },
     [](Reference& r, const Values& g, int group, double rate, int t) {
       test::adam_rule(r, g, amsgrad_groups[group], true, rate, t);
     },
     {0.01, 0.03},
     3e-6},
    {"adam_amsgrad_maximize",
     [] { return make_adam(two_groups(amsgrad_maximize_groups[0], amsgrad_maximize_groups[1])); },
     [](Reference& r, const Values& g, int group, double rate, int t) {
       test::adam_rule(r, g, amsgrad_maximize_groups[group], false, rate, t);
     },
     {0.01, 0.03},
     3e-6},
    {"sgd_maximize",
     [] { return make_sgd(two_groups(sgd_maximize_groups[0], sgd_maximize_groups[1])); },
     [](Reference& r, const Values& g, int group, double rate, int t) {
       test::sgd_rule(r, g, sgd_maximize_groups[group], rate, t);
     },
     {0.02, 0.05},
     1e-5},
    {"adagrad_maximize",
     [] { return make_adagrad(two_groups(maximizing(adagrad_groups[0]), maximizing(adagrad_groups[1]))); },
     [](Reference& r, const Values& g, int group, double rate, int t) {
       test::adagrad_rule(r, g, maximizing(adagrad_groups[group]), rate, t);
     },
     {0.05, 0.02},
     3e-6},
    {"rmsprop",
     [] { return make_rmsprop(two_groups(rmsprop_groups[0], rmsprop_groups[1])); },
     [](Reference& r, const Values& g, int group, double rate, int) {
       test::rmsprop_rule(r, g, rmsprop_groups[group], rate);
     },
     {0.002, 0.005},
     3e-6},
    {"rmsprop_maximize",
     [] { return make_rmsprop(two_groups(rmsprop_maximize_groups[0], rmsprop_maximize_groups[1])); },
     [](Reference& r, const Values& g, int group, double rate, int) {
       test::rmsprop_rule(r, g, rmsprop_maximize_groups[group], rate);
     },
     {0.002, 0.005},
     3e-6},
};

/// Trains in double on `ranks` ranks.
std::vector<Reference> trained_reference(const Case& c, int ranks) {
  ToyModel model(initial);
  std::vector<Reference> all;
  std::vector<int> t;
  for (const Parameter* p : model.parameters()) {
    const Values start(p->value.data<float>(), p->value.data<float>() + p->count());
    const bool matrix = p->shape.dims() == 2;
    all.push_back({matrix ? p->shape[0] : 1, matrix ? p->shape[1] : p->count(), start, Values(p->count()),
                   Values(p->count())});
    t.push_back(0);
  }
  for (int step = 0; step < updates; ++step)
    for (std::size_t p = 0; p < all.size(); ++p) {
      const bool sometimes = model[p].name == "sometimes";
      if (!model[p].requires_grad || model[p].name == "never" || (sometimes && !reaches_sometimes(step, 0)))
        continue;
      Values g(all[p].p.size());
      for (std::size_t i = 0; i < g.size(); ++i) {
        double x = 0;
        for (int r = 0; r < ranks; ++r)
          if (!sometimes || reaches_sometimes(step, r)) x += datum(p, i, step, r);
        g[i] = (model[p].name == "tied" ? 3 : 1) * x / ranks * all[p].p[i];
      }
      const int group = is_matrix(model[p]) ? 0 : 1;
      c.rule(all[p], g, group, rate_at(c.rates[group], step), ++t[p]);
    }
  return all;
}

// ---- training

/// A model in training on one rank.
struct Training {
  Training(const Case& c, StrategyKind kind, Communicator& communicator, const StrategyOptions& options = {},
           const Stream& stream = {})
      : setting(c),
        comm(communicator),
        tape(stream),
        strategy(make_strategy(kind, model, comm, options)),
        optimizer(c.make()) {
    strategy->attach(tape);
  }
  /// `factor` multiplies the data.
  void update(int step, float factor = 1) {
    for (int g = 0; g < optimizer->groups(); ++g)
      optimizer->set_learning_rate(g, rate_at(setting.rates[g], step));
    strategy->zero_grad();
    const Var loss = model.loss(
        tape, [&](std::size_t p, std::size_t i) { return factor * datum(p, i, step, comm.rank()); },
        reaches_sometimes(step, comm.rank()));
    strategy->begin_backward();
    tape.backward(loss);
    tape.reset();
    strategy->finish_gradients();
    strategy->clip_and_step(*optimizer, {.skip_overflow = true});
  }
  std::vector<std::vector<float>> values() {
    std::vector<std::vector<float>> out;
    for (const Parameter* p : model.parameters()) {
      const Tensor value = strategy->values().whole(*p);
      out.emplace_back(value.data<float>(), value.data<float>() + value.count());
    }
    return out;
  }

  const Case& setting;
  Communicator& comm;
  ToyModel model{initial};
  Tape tape;
  std::unique_ptr<Strategy> strategy;
  std::unique_ptr<Optimizer> optimizer;
};

class OptimizerTraining : public testing::TestWithParam<Case> {};
INSTANTIATE_TEST_SUITE_P(Optimizers, OptimizerTraining, testing::ValuesIn(cases),
                         [](const auto& info) { return info.param.name; });

TEST_P(OptimizerTraining, FollowsItsReferenceWithTheSameBitsInEveryStrategy) {
  for (int ranks = 1; ranks <= 4; ++ranks) {
    const std::vector<Reference> reference = trained_reference(GetParam(), ranks);
    lab::group(ranks, [&](Communicator& comm) {
      std::vector<std::vector<float>> first;
      for (const StrategyKind kind : lab::strategies)
        for (const StrategyOptions& options :
             {StrategyOptions{}, StrategyOptions{.reduce_bucket_size = 225, .first_bucket_size = 75}}) {
          Training run(GetParam(), kind, comm, options);
          for (int step = 0; step < updates; ++step) run.update(step);
          const auto values = run.values();
          if (first.empty()) first = values;
          EXPECT_TRUE(values == first) << name(kind) << " on rank " << comm.rank() << " of " << ranks;
        }
      for (std::size_t p = 0; p < first.size(); ++p)
        for (std::size_t i = 0; i < first[p].size(); ++i)
          ASSERT_NEAR(first[p][i], reference[p].p[i], GetParam().tolerance) << "parameter " << p << " " << i;
    });
  }
}

TEST_P(OptimizerTraining, ASkippedUpdateLeavesNoTrace) {
  for (const StrategyKind kind : lab::strategies)
    lab::group(2, [&](Communicator& comm) {
      Training with(GetParam(), kind, comm), without(GetParam(), kind, comm);
      for (int step = 1; step < 4; ++step) {
        without.update(step);
        if (step == 2) with.update(step, std::numeric_limits<float>::infinity());
        with.update(step);
      }
      EXPECT_EQ(with.optimizer->updates(), 3);
      EXPECT_TRUE(with.values() == without.values()) << name(kind);
    });
}

/// The states of all parameters by "parameter state", gathered from the ranks.
using States = std::map<std::string, std::vector<float>>;
States gathered_states(Training& run) {
  States all;
  for (const Parameter* p : run.model.parameters())
    for (const StateSpec& s : run.optimizer->states(run.optimizer->group_of(*p)))
      if (p->requires_grad) all[p->name + " " + s.name].assign(p->count(), 0);
  std::map<std::string, std::size_t> seen;
  run.strategy->optimizer_state().visit(
      [&](const std::string& state, const Parameter& p, Range r, const float* value) {
        std::copy_n(value, r.count(),
                    all.at(p.name + " " + state).begin() + static_cast<std::ptrdiff_t>(r.begin));
        seen[p.name + " " + state] += r.count();
      });
  for (auto& [key, values] : all) {
    auto count = static_cast<double>(seen[key]);
    run.comm.all_reduce(Buffer(values.data(), values.size())).wait();
    run.comm.all_reduce(Buffer(&count, 1)).wait();
    EXPECT_EQ(count, static_cast<double>(values.size())) << key << ": each element on one rank";
  }
  return all;
}

TEST_P(OptimizerTraining, StatesMoveToAnotherStrategy) {
  lab::group(3, [&](Communicator& comm) {
    for (const StrategyKind kind : lab::strategies) {
      const StrategyKind other = lab::strategies[(static_cast<std::size_t>(kind) + 3) % 4];
      Training before(GetParam(), kind, comm), after(GetParam(), other, comm, {.reduce_bucket_size = 225});
      for (int step = 0; step < 3; ++step) before.update(step);  // the first misses "sometimes"
      const States states = gathered_states(before);
      const auto values = before.values();
      after.strategy->values().fill([&](const Parameter& p, Range r, float* out) {
        std::copy_n(values[after.model.index(p.name)].begin() + static_cast<std::ptrdiff_t>(r.begin),
                    r.count(), out);
      });
      after.strategy->optimizer_state().fill(
          *after.optimizer, [&](const std::string& state, const Parameter& p, Range r, float* out) {
            std::copy_n(states.at(p.name + " " + state).begin() + static_cast<std::ptrdiff_t>(r.begin),
                        r.count(), out);
          });
      after.optimizer->set_updates(before.optimizer->updates());
      for (const Parameter* p : after.model.parameters())
        if (p->requires_grad) {
          const std::int64_t missed =
              before.strategy->optimizer_state().missed_updates(before.model[after.model.index(p->name)]);
          EXPECT_EQ(missed, p->name == "sometimes" ? 1 : p->name == "never" ? 3 : 0);
          after.strategy->optimizer_state().set_missed_updates(*p, missed);
        }
      for (int step = 3; step < 6; ++step) before.update(step), after.update(step);
      EXPECT_TRUE(before.values() == after.values()) << name(kind) << " to " << name(other);
      EXPECT_TRUE(gathered_states(before) == gathered_states(after)) << name(kind) << " to " << name(other);
    }
  });
}

TEST_P(OptimizerTraining, AnotherNumberOfThreadsHasTheSameBits) {
  lab::group(1, [&](Communicator& comm) {
    Training one(GetParam(), StrategyKind::ddp, comm),
        three(GetParam(), StrategyKind::ddp, comm, {}, Stream::host(3));
    for (int step = 1; step < 4; ++step) one.update(step), three.update(step);
    EXPECT_TRUE(one.values() == three.values());
  });
}

TEST(Muon, KeepsOneStateForMatrices) {
  lab::group(1, [](Communicator& comm) {
    Training muon(cases[6], StrategyKind::ddp, comm), adamw(cases[2], StrategyKind::ddp, comm);
    muon.update(1), adamw.update(1);
    // "tied" and "first.weight", padded to multiples of 64 elements
    EXPECT_EQ(adamw.strategy->memory().optimizer_state - muon.strategy->memory().optimizer_state,
              4 * (64 + 192));
  });
}

TEST(Muon, AMatrixOfAnotherNumberOfDimensionsIsNamed) {
  auto comm = Communicator::connect(0, 1, memory_store());
  ToyModel model(initial);
  const auto strategy = make_strategy(StrategyKind::ddp, model, comm);
  const auto muon = make_muon({}, muon_adam_options, [](const Parameter& p) { return p.name != "norm"; });
  const Error e = test::error_of([&] { strategy->optimizer_state().fill(*muon, {}); });
  EXPECT_EQ(e.code(), Errc::invalid_argument);
  EXPECT_NE(std::string(e.what()).find("position of shape [5]"), std::string::npos) << e.what();
}

TEST(Muon, ChoosesMatricesAsDeepSpeedDoes) {
  const auto is_matrix_named = [](const char* name, const Shape& shape) {
    Parameter p;
    p.name = name, p.shape = shape;
    return is_muon_matrix(p);
  };
  EXPECT_TRUE(is_matrix_named("h.0.attn.c_attn.weight", {8, 24}));
  EXPECT_TRUE(is_matrix_named("transformer.wte.weight", {8, 24}));
  EXPECT_FALSE(is_matrix_named("h.0.attn.c_attn.bias", {24}));
  EXPECT_FALSE(is_matrix_named("model.Embed_tokens.weight", {8, 24}));
  EXPECT_FALSE(is_matrix_named("lm_head.weight", {8, 24}));
}

TEST(Optimizers, AFrozenParameterHasNoState) {
  auto comm = Communicator::connect(0, 1, memory_store());
  ToyModel model(initial);
  const auto strategy = make_strategy(StrategyKind::ddp, model, comm);
  const Error e = test::error_of(
      [&] { strategy->optimizer_state().set_missed_updates(model[model.index("frozen")], 1); });
  EXPECT_EQ(e.code(), Errc::invalid_argument);
  EXPECT_EQ(strategy->optimizer_state().missed_updates(model[0]), 0);
}

TEST(Optimizers, GroupsThatDifferOverTheRanksAreNamed) {
  lab::group(2, [](Communicator& comm) {
    const int rank = comm.rank();
    ToyModel model(initial);
    Tape tape;
    const auto strategy = make_strategy(StrategyKind::zero1, model, comm);
    strategy->attach(tape);
    const auto other = [=](const Parameter& p) { return is_matrix(p) || (rank == 1 && p.name == "norm"); };
    const auto sgd = make_sgd(ParameterGroups<SgdOptions>({{"matrices", other, {}}, {"rest", {}, {}}}));
    strategy->begin_backward();
    tape.backward(model.loss(tape, [](std::size_t, std::size_t) { return 1.0f; }));
    tape.reset();
    strategy->finish_gradients();
    const Error e = test::error_of([&] { strategy->step(*sgd); });
    EXPECT_EQ(e.code(), Errc::mismatch);
    EXPECT_NE(
        std::string(e.what()).find("the parameter group of norm is rest on rank 0 and matrices on rank 1"),
        std::string::npos)
        << e.what();
  });
}

}  // namespace
}  // namespace rz
