/// Update rules against their formulas in double, and the properties that strategies build on.
#include "sharding/optim/optimizer.h"

#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <vector>

#include "comm/core/error.h"

namespace rz {
namespace {

constexpr std::size_t count = 64 * 300;

float wave(std::size_t i, int phase) {
  return std::sin(static_cast<float>(i) * 0.37f + static_cast<float>(phase));
}

/// One element in double.
struct Element {
  double p, first = 0, second = 0;
};
using Rule = std::function<void(Element&, double g, int t)>;

/// Ten updates of `count` elements, cut into spans at `cuts`.
std::vector<float> train(Optimizer& optimizer, bool decay, float grad_scale, const Stream& stream,
                         const std::vector<std::size_t>& cuts = {}) {
  std::vector<float> p(count), g(count), m(count), v(count);
  for (std::size_t i = 0; i < count; ++i) p[i] = wave(i, 100);
  for (int t = 1; t <= 10; ++t) {
    for (std::size_t i = 0; i < count; ++i) g[i] = wave(i, t);
    optimizer.begin_update();
    std::size_t begin = 0;
    auto ends = cuts;
    ends.push_back(count);
    for (const std::size_t end : ends) {
      UpdateSpan span{p.data() + begin, g.data() + begin, {}, end - begin, decay};
      if (optimizer.state_count() > 0) span.state[0] = m.data() + begin;
      if (optimizer.state_count() > 1) span.state[1] = v.data() + begin;
      optimizer.update({&span, 1}, {.factor = grad_scale}, stream);
      begin = end;
    }
  }
  return p;
}

void expect_rule(const std::function<std::unique_ptr<Optimizer>()>& make, bool decay, const Rule& rule) {
  const float grad_scale = 0.5f;
  const auto optimizer = make();
  const auto p = train(*optimizer, decay, grad_scale, {});
  EXPECT_EQ(optimizer->updates(), 10);
  for (std::size_t i = 0; i < count; ++i) {
    Element e{wave(i, 100)};
    for (int t = 1; t <= 10; ++t) rule(e, static_cast<double>(wave(i, t)) * grad_scale, t);
    ASSERT_NEAR(p[i], e.p, 2e-6) << "element " << i;
  }
  EXPECT_EQ(train(*make(), decay, grad_scale, {}, {64, 640, 64 * 99}), p) << "cuts change bits";
  EXPECT_EQ(train(*make(), decay, grad_scale, Stream::host(3)), p) << "threads change bits";
}

TEST(Optimizer, Sgd) {
  const auto make = [] { return make_sgd({.learning_rate = 0.1, .weight_decay = 0.01}); };
  EXPECT_EQ(make()->state_count(), 0);
  expect_rule(make, true, [](Element& e, double g, int) { e.p -= 0.1 * (g + 0.01 * e.p); });
  expect_rule(make, false, [](Element& e, double g, int) { e.p -= 0.1 * g; });
}

TEST(Optimizer, SgdWithMomentum) {
  for (const bool nesterov : {false, true}) {
    const auto make = [&] {
      return make_sgd({.learning_rate = 0.1, .momentum = 0.9, .weight_decay = 0.01, .nesterov = nesterov});
    };
    EXPECT_EQ(make()->state_count(), 1);
    expect_rule(make, true, [&](Element& e, double g, int) {
      g += 0.01 * e.p;
      e.first = 0.9 * e.first + g;
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
  expect_rule(make, true, [](Element& e, double g, int t) { adam_step(e, g + 0.1 * e.p, t); });
  expect_rule(make, false, adam_step);
}

TEST(Optimizer, AdamWDecaysApart) {
  const auto make = [] { return make_adamw(adam_options); };
  expect_rule(make, true, [](Element& e, double g, int t) {
    e.p *= 1 - 0.01 * 0.1;
    adam_step(e, g, t);
  });
  expect_rule(make, false, adam_step);
}

TEST(Optimizer, ZerosBetweenParametersStayZero) {
  for (const auto& make : {make_adam, make_adamw}) {
    std::vector<float> p(64), g(64), m(64), v(64);
    const auto optimizer = make(adam_options);
    optimizer->begin_update();
    const UpdateSpan span{p.data(), g.data(), {m.data(), v.data()}, 64, true};
    optimizer->update({&span, 1}, {}, {});
    EXPECT_EQ(p, std::vector<float>(64));
    EXPECT_EQ(v, std::vector<float>(64));
  }
}

TEST(Optimizer, LearningRateCanChangeBetweenUpdates) {
  const auto sgd = make_sgd({.learning_rate = 0.5});
  std::vector<float> p(64, 1), g(64, 1);
  for (const double rate : {0.5, 0.25, 0.0}) {
    sgd->set_learning_rate(rate);
    sgd->begin_update();
    const UpdateSpan span{p.data(), g.data(), {}, 64, true};
    sgd->update({&span, 1}, {}, {});
  }
  EXPECT_EQ(p[0], 0.25f);
  EXPECT_EQ(sgd->learning_rate(), 0);
}

TEST(Optimizer, OptionsOutOfRangeAreNamed) {
  const auto message = [](const std::function<void()>& make) -> std::string {
    try {
      make();
    } catch (const Error& e) {
      EXPECT_EQ(e.code(), Errc::invalid_argument);
      return e.what();
    }
    return "no error";
  };
  EXPECT_EQ(message([] { make_sgd({.learning_rate = -1}); }), "sgd: learning_rate = -1 must not be negative");
  EXPECT_NE(message([] { make_sgd({.nesterov = true}); }).find("momentum"), std::string::npos);
  EXPECT_EQ(message([] { make_adamw({.beta2 = 1}); }), "adamw: beta2 = 1 must lie in [0, 1)");
  EXPECT_EQ(message([] { make_adam({.epsilon = std::nan("")}); }),
            "adam: epsilon = nan must not be negative");
}

}  // namespace
}  // namespace rz
