/// Update rules against their formulas in double, and the properties that strategies build on.
#include <gtest/gtest.h>

#include <array>
#include <cmath>
#include <functional>
#include <limits>
#include <vector>

#include "comm/core/error.h"
#include "sharding/optim/optimizers.h"
#include "tests/support/error_of.h"

namespace rz {
namespace {

constexpr std::size_t count = 64 * 120;

float wave(std::size_t i, int phase) {
  return std::sin(static_cast<float>(i) * 0.37f + static_cast<float>(phase));
}

/// One element in double.
struct Element {
  double p, first = 0, second = 0, third = 0;
};
using Rule = std::function<void(Element&, double g, int t)>;

constexpr int updates = 24;

/// Updates of `count` elements, cut into spans at `cuts`.
std::vector<float> train(Optimizer& optimizer, float grad_scale, const Stream& stream,
                         const std::vector<std::size_t>& cuts = {}) {
  const auto states = optimizer.states(0);
  std::vector<float> p(count), g(count);
  std::array<std::vector<float>, max_states> state;
  for (std::size_t s = 0; s < states.size(); ++s) state[s].assign(count, states[s].initial);
  for (std::size_t i = 0; i < count; ++i) p[i] = wave(i, 100);
  for (int t = 1; t <= updates; ++t) {
    for (std::size_t i = 0; i < count; ++i) g[i] = wave(i, t);
    optimizer.begin_update();
    std::size_t begin = 0;
    auto ends = cuts;
    ends.push_back(count);
    for (const std::size_t end : ends) {
      UpdateSpan span{.value = p.data() + begin, .gradient = g.data() + begin, .count = end - begin};
      for (std::size_t s = 0; s < states.size(); ++s) span.state[s] = state[s].data() + begin;
      optimizer.update({&span, 1}, {.factor = grad_scale}, stream);
      begin = end;
    }
  }
  return p;
}

using Make = std::function<std::unique_ptr<Optimizer>()>;

void expect_rule(const Make& make, const Rule& rule, double initial = 0) {
  const float grad_scale = 0.5f;
  const auto optimizer = make();
  const auto p = train(*optimizer, grad_scale, {});
  EXPECT_EQ(optimizer->updates(), updates);
  for (std::size_t i = 0; i < count; ++i) {
    Element e{wave(i, 100), initial};
    for (int t = 1; t <= updates; ++t) rule(e, static_cast<double>(wave(i, t)) * grad_scale, t);
    ASSERT_NEAR(p[i], e.p, 4e-6) << "element " << i;
  }
  EXPECT_EQ(train(*make(), grad_scale, {}, {64, 640, 64 * 99}), p) << "cuts change bits";
  EXPECT_EQ(train(*make(), grad_scale, Stream::host(3)), p) << "threads change bits";
}

std::vector<std::string> names_of(const std::vector<StateSpec>& states) {
  std::vector<std::string> names;
  for (const StateSpec& s : states) names.push_back(s.name);
  return names;
}
using Names = std::vector<std::string>;

TEST(Optimizer, Sgd) {
  const auto make = [](double decay) {
    return [=] { return make_sgd({.learning_rate = 0.1, .weight_decay = decay}); };
  };
  EXPECT_EQ(names_of(make(0)()->states(0)), Names{});
  expect_rule(make(0.01), [](Element& e, double g, int) { e.p -= 0.1 * (g + 0.01 * e.p); });
  expect_rule(make(0), [](Element& e, double g, int) { e.p -= 0.1 * g; });
}

TEST(Optimizer, SgdWithMomentum) {
  for (const bool nesterov : {false, true})
    for (const double dampening : {0.0, 0.25}) {
      if (nesterov && dampening > 0) continue;
      const auto make = [&] {
        return make_sgd({.learning_rate = 0.1,
                         .momentum = 0.9,
                         .weight_decay = 0.01,
                         .nesterov = nesterov,
                         .dampening = dampening});
      };
      EXPECT_EQ(names_of(make()->states(0)), Names{"momentum_buffer"});
      expect_rule(make, [&](Element& e, double g, int t) {
        g += 0.01 * e.p;
        e.first = t == 1 ? g : 0.9 * e.first + (1 - dampening) * g;
        e.p -= 0.1 * (nesterov ? g + 0.9 * e.first : e.first);
      });
    }
}

void adam_step(Element& e, double g, int t) {
  e.first = 0.9 * e.first + 0.1 * g;
  e.second = 0.95 * e.second + 0.05 * g * g;
  const double m = e.first / (1 - std::pow(0.9, t)), v = e.second / (1 - std::pow(0.95, t));
  e.p -= 0.01 * m / (std::sqrt(v) + 1e-8);
}
const AdamOptions adam_options{.learning_rate = 0.01, .beta2 = 0.95, .weight_decay = 0.1};

TEST(Optimizer, AdamAddsDecayToTheGradient) {
  const auto make = [] { return make_adam(adam_options); };
  EXPECT_EQ(names_of(make()->states(0)), (Names{"exp_avg", "exp_avg_sq"}));
  expect_rule(make, [](Element& e, double g, int t) { adam_step(e, g + 0.1 * e.p, t); });
}

TEST(Optimizer, AdamWDecaysApart) {
  expect_rule([] { return make_adamw(adam_options); },
              [](Element& e, double g, int t) {
                e.p *= 1 - 0.01 * 0.1;
                adam_step(e, g, t);
              });
}

TEST(Optimizer, AdamWithoutBiasCorrection) {
  AdamOptions options{.learning_rate = 0.001, .beta2 = 0.95, .bias_correction = false};
  expect_rule([&] { return make_adamw(options); },
              [](Element& e, double g, int) {
                e.first = 0.9 * e.first + 0.1 * g;
                e.second = 0.95 * e.second + 0.05 * g * g;
                e.p -= 0.001 * e.first / (std::sqrt(e.second) + 1e-8);
              });
  AdamOptions with = options;
  with.bias_correction = true;
  EXPECT_NE(make_adamw(options)->describe(), make_adamw(with)->describe());
}

TEST(Optimizer, AmsgradDividesByTheMaximum) {
  AdamOptions options{.learning_rate = 0.01, .beta2 = 0.5, .amsgrad = true};
  const auto make = [&] { return make_adamw(options); };
  EXPECT_EQ(names_of(make()->states(0)), (Names{"exp_avg", "exp_avg_sq", "max_exp_avg_sq"}));
  expect_rule(make, [](Element& e, double g, int t) {
    e.first = 0.9 * e.first + 0.1 * g;
    e.second = 0.5 * e.second + 0.5 * g * g;
    e.third = std::max(e.third, e.second);
    const double m = e.first / (1 - std::pow(0.9, t));
    e.p -= 0.01 * m / (std::sqrt(e.third) / std::sqrt(1 - std::pow(0.5, t)) + 1e-8);
  });
  EXPECT_NE(make()->describe().find("amsgrad"), std::string::npos) << make()->describe();
}

/// With the bits of an optimizer whose gradients are negated.
TEST(Optimizer, MaximizesByNegatedGradients) {
  const auto expect_negated = [](const Make& make, const Make& maximizing) {
    EXPECT_EQ(train(*maximizing(), 0.5f, {}), train(*make(), -0.5f, {})) << make()->name();
    EXPECT_NE(train(*maximizing(), 0.5f, {}), train(*make(), 0.5f, {})) << make()->name();
    EXPECT_EQ(maximizing()->describe(), make()->describe() + ", maximize");
  };
  for (const double momentum : {0.0, 0.9})
    expect_negated(
        [&] { return make_sgd({.learning_rate = 0.01, .momentum = momentum, .weight_decay = 0.1}); },
        [&] {
          return make_sgd(
              {.learning_rate = 0.01, .momentum = momentum, .weight_decay = 0.1, .maximize = true});
        });
  AdamOptions adam = adam_options;
  adam.maximize = true;
  expect_negated([] { return make_adam(adam_options); }, [&] { return make_adam(adam); });
  expect_negated([] { return make_adamw(adam_options); }, [&] { return make_adamw(adam); });
  expect_negated([] { return make_adagrad({.weight_decay = 0.1}); },
                 [] { return make_adagrad({.weight_decay = 0.1, .maximize = true}); });
  expect_negated([] { return make_rmsprop({.weight_decay = 0.1}); },
                 [] { return make_rmsprop({.weight_decay = 0.1, .maximize = true}); });
}

TEST(Optimizer, Rmsprop) {
  for (const bool centered : {false, true})
    for (const double momentum : {0.0, 0.5}) {
      const auto make = [&] {
        return make_rmsprop({.learning_rate = 0.005,
                             .alpha = 0.9,
                             .epsilon = 1e-3,
                             .weight_decay = 0.01,
                             .momentum = momentum,
                             .centered = centered});
      };
      Names names{"square_avg"};
      if (centered) names.push_back("grad_avg");
      if (momentum > 0) names.push_back("momentum_buffer");
      EXPECT_EQ(names_of(make()->states(0)), names);
      expect_rule(make, [&](Element& e, double g, int) {
        g += 0.01 * e.p;
        e.first = 0.9 * e.first + 0.1 * g * g;
        e.third = 0.9 * e.third + 0.1 * g;
        const double variance = centered ? e.first - e.third * e.third : e.first;
        e.second = momentum * e.second + g / (std::sqrt(variance) + 1e-3);
        e.p -= 0.005 * e.second;
      });
    }
}

/// The mean of equal gradients is their root mean square, up to rounding.
TEST(Optimizer, RmspropWithoutVarianceIsFinite) {
  const auto rmsprop = make_rmsprop({.learning_rate = 1e-9, .alpha = 0.5, .centered = true});
  std::vector<float> p(64), g(64), square(64), mean(64);
  for (std::size_t i = 0; i < 64; ++i) g[i] = 0.1f * static_cast<float>(i + 1);
  for (int t = 0; t < 60; ++t) {
    rmsprop->begin_update();
    const UpdateSpan span{
        .value = p.data(), .gradient = g.data(), .state = {square.data(), mean.data()}, .count = 64};
    rmsprop->update({&span, 1}, {}, {});
  }
  for (const float x : p) EXPECT_TRUE(std::isfinite(x)) << x;
}

TEST(Optimizer, Lion) {
  const auto make = [] {
    return make_lion({.learning_rate = 0.01, .beta1 = 0.8, .beta2 = 0.95, .weight_decay = 0.1});
  };
  EXPECT_EQ(names_of(make()->states(0)), Names{"exp_avg"});
  expect_rule(make, [](Element& e, double g, int) {
    const double c = 0.8 * e.first + 0.2 * g;
    e.p = e.p * (1 - 0.01 * 0.1) - 0.01 * (c > 0 ? 1 : c < 0 ? -1 : 0);
    e.first = 0.95 * e.first + 0.05 * g;
  });
}

TEST(Optimizer, Adagrad) {
  for (const double initial : {0.0, 0.5}) {
    const auto make = [&] {
      return make_adagrad(
          {.learning_rate = 0.05, .weight_decay = 0.01, .lr_decay = 0.1, .initial_accumulator = initial});
    };
    EXPECT_EQ(make()->states(0),
              (std::vector<StateSpec>{{.name = "sum", .initial = static_cast<float>(initial)}}));
    expect_rule(
        make,
        [](Element& e, double g, int t) {
          g += 0.01 * e.p;
          e.first += g * g;
          e.p -= 0.05 / (1 + (t - 1) * 0.1) * g / (std::sqrt(e.first) + 1e-10);
        },
        initial);
  }
}

// ---- groups

Parameter parameter(const std::string& name, const Shape& shape) {
  Parameter p;
  p.name = name, p.shape = shape;
  return p;
}

TEST(Optimizer, AParameterBelongsToTheFirstGroupThatContainsIt) {
  const auto adamw = make_adamw(matrices_and_rest(AdamOptions{.learning_rate = 0.5, .weight_decay = 0.1}));
  ASSERT_EQ(adamw->groups(), 2);
  EXPECT_EQ(adamw->group_name(0), "matrices");
  EXPECT_EQ(adamw->group_name(1), "rest");
  EXPECT_EQ(adamw->group_of(parameter("w", {3, 2})), 0);
  EXPECT_EQ(adamw->group_of(parameter("b", {3})), 1);
  EXPECT_NE(adamw->describe().find("group rest: learning_rate 0.5"), std::string::npos) << adamw->describe();
  EXPECT_EQ(make_adamw({})->group_of(parameter("b", {3})), 0);
  const auto alone = make_sgd(ParameterGroups<SgdOptions>({{"matrices", is_matrix, {}}}));
  try {
    alone->group_of(parameter("b", {3}));
    ADD_FAILURE() << "a parameter of no group";
  } catch (const Error& e) {
    EXPECT_EQ(e.code(), Errc::invalid_argument);
    EXPECT_NE(std::string(e.what()).find("parameter b belongs to no group"), std::string::npos) << e.what();
  }
}

TEST(Optimizer, GroupsHaveOptionsAndRatesOfTheirOwn) {
  const auto sgd = make_sgd(ParameterGroups<SgdOptions>(
      {{"fast", is_matrix, {.learning_rate = 0.5}}, {"slow", {}, {.learning_rate = 0.25, .momentum = 0.5}}}));
  EXPECT_EQ(sgd->states(0).size(), 0u);
  EXPECT_EQ(sgd->states(1).size(), 1u);
  std::vector<float> p(192, 1), g(64, 1), buf(64);
  const auto update = [&] {
    sgd->begin_update();
    const UpdateSpan spans[] = {
        {.value = p.data(), .gradient = g.data(), .count = 64, .group = 0},
        {.value = p.data() + 64, .gradient = g.data(), .state = {buf.data()}, .count = 64, .group = 1},
        {.value = p.data() + 128, .gradient = g.data(), .count = 64, .group = 0}};
    sgd->update(spans, {}, {});
  };
  update();
  EXPECT_EQ(p[0], 0.5f);
  EXPECT_EQ(p[64], 0.75f);
  EXPECT_EQ(p[128], 0.5f);
  sgd->set_learning_rate(1, 1);
  update();
  EXPECT_EQ(p[0], 0.0f);
  EXPECT_EQ(p[64], 0.75f - 1.5f);
  EXPECT_EQ(sgd->learning_rate(0), 0.5);
  sgd->set_learning_rate(0.125);
  EXPECT_EQ(sgd->learning_rate(0), 0.125);
  EXPECT_EQ(sgd->learning_rate(1), 0.125);
  EXPECT_THROW(sgd->set_learning_rate(2, 1), Error);
}

TEST(Optimizer, GroupsOfOneNameAreRefused) {
  EXPECT_THROW(make_sgd(ParameterGroups<SgdOptions>({{"a", {}, {}}, {"a", {}, {}}})), Error);
  EXPECT_THROW(make_sgd(ParameterGroups<SgdOptions>(std::vector<ParameterGroup<SgdOptions>>{})), Error);
}

TEST(Optimizer, ZerosBetweenParametersStayZero) {
  const Make all[] = {[] { return make_adam(adam_options); },
                      [] { return make_adamw(adam_options); },
                      [] { return make_lion({.weight_decay = 0.1}); },
                      [] { return make_adagrad({.weight_decay = 0.1}); },
                      [] { return make_adamw({.weight_decay = 0.1, .amsgrad = true}); },
                      [] { return make_rmsprop({.momentum = 0.9, .centered = true}); }};
  for (const Make& make : all) {
    std::vector<float> p(64), g(64), m(64), v(64), w(64);
    const auto optimizer = make();
    optimizer->begin_update();
    const UpdateSpan span{
        .value = p.data(), .gradient = g.data(), .state = {m.data(), v.data(), w.data()}, .count = 64};
    optimizer->update({&span, 1}, {}, {});
    EXPECT_EQ(p, std::vector<float>(64)) << optimizer->name();
    EXPECT_EQ(v, std::vector<float>(64));
    EXPECT_EQ(w, std::vector<float>(64));
  }
}

TEST(Optimizer, LearningRateCanChangeBetweenUpdates) {
  const auto sgd = make_sgd({.learning_rate = 0.5});
  std::vector<float> p(64, 1), g(64, 1);
  for (const double rate : {0.5, 0.25, 0.0}) {
    sgd->set_learning_rate(rate);
    sgd->begin_update();
    const UpdateSpan span{.value = p.data(), .gradient = g.data(), .count = 64};
    sgd->update({&span, 1}, {}, {});
  }
  EXPECT_EQ(p[0], 0.25f);
  EXPECT_EQ(sgd->learning_rate(), 0);
}

TEST(Optimizer, OptionsOutOfRangeAreNamed) {
  const auto message = [](const auto& make) { return test::refusal(make, Errc::invalid_argument); };
  EXPECT_EQ(message([] { make_sgd({.learning_rate = -1}); }), "sgd: learning_rate = -1 must not be negative");
  EXPECT_NE(message([] { make_sgd({.nesterov = true}); }).find("momentum"), std::string::npos);
  EXPECT_EQ(message([] { make_adamw({.beta2 = 1}); }), "adamw: beta2 = 1 must lie in [0, 1)");
  EXPECT_EQ(message([] { make_lion({.beta1 = -0.1}); }), "lion: beta1 = -0.1 must lie in [0, 1)");
  EXPECT_EQ(message([] { make_adagrad({.lr_decay = -1}); }), "adagrad: lr_decay = -1 must not be negative");
  EXPECT_NE(
      message([] { make_sgd({.momentum = 0.9, .nesterov = true, .dampening = 0.1}); }).find("dampening"),
      std::string::npos);
  EXPECT_EQ(message([] { make_adam({.epsilon = std::nan("")}); }),
            "adam: epsilon = nan is not finite in f32, in which updates are computed");
  EXPECT_NE(message([] { make_muon({}, {.maximize = true}); }).find("negate the loss"), std::string::npos);
}

/// f64 has numbers that f32 has not.
TEST(Optimizer, NumbersThatAreNotFiniteInF32AreRefused) {
  constexpr double infinite = std::numeric_limits<double>::infinity();
  for (const double x : {1e39, infinite, std::nan("")}) {
    const std::function<void()> all[] = {[&] { make_sgd({.learning_rate = x}); },
                                         [&] { make_sgd({.momentum = x}); },
                                         [&] { make_sgd({.momentum = 0.9, .dampening = x}); },
                                         [&] { make_sgd({.momentum = 0.9, .dampening = -x}); },
                                         [&] { make_adam({.weight_decay = x}); },
                                         [&] { make_adamw({.epsilon = x}); },
                                         [&] { make_lion({.learning_rate = x}); },
                                         [&] { make_adagrad({.initial_accumulator = x}); },
                                         [&] { make_rmsprop({.alpha = x}); },
                                         [&] { make_lamb({.epsilon = x}); },
                                         [&] { make_muon({.learning_rate = x}); },
                                         [&] { make_sgd({})->set_learning_rate(x); },
                                         [&] { make_sgd({})->set_learning_rate(0, -x); }};
    for (std::size_t i = 0; i < std::size(all); ++i) {
      try {
        all[i]();
        ADD_FAILURE() << "case " << i << " takes " << x;
      } catch (const Error& e) {
        EXPECT_EQ(e.code(), Errc::invalid_argument);
        EXPECT_NE(std::string(e.what()).find(" is not finite in f32"), std::string::npos)
            << i << ": " << e.what();
      }
    }
  }
  EXPECT_NO_THROW(make_lamb({.max_coeff = infinite}));
  const auto sgd = make_sgd({.learning_rate = 0.5});
  EXPECT_THROW(sgd->set_learning_rate(1e39), Error);
  EXPECT_EQ(sgd->learning_rate(), 0.5);
}

}  // namespace
}  // namespace rz
