// Runs: ci

#include <gtest/gtest.h>
#include <hwy/targets.h>

#include <cmath>
#include <functional>
#include <limits>

#include "comm/core/math.h"
#include "tensor/kernels/optimizer/optimizer.h"
#include "tests/support/reference.h"

namespace rz::test {
namespace {

using kernels::AdamStep;
using kernels::UpdateRun;
using Floats = std::vector<float>;

Floats floats(std::size_t n, unsigned seed) {
  const Values v = random_values(n, seed);
  return Floats(v.begin(), v.end());
}

/// Values and states of a run.
struct State {
  explicit State(std::size_t n = 301) : p(floats(n, 1)), m(n), v(n), w(n) {}
  UpdateRun run(const Floats& g, int states = 2) {
    return {.value = p.data(),
            .gradient = g.data(),
            .state0 = m.data(),
            .state1 = states > 1 ? v.data() : nullptr,
            .state2 = states > 2 ? w.data() : nullptr,
            .count = p.size()};
  }
  bool operator==(const State&) const = default;
  Floats p, m, v, w;
};

AdamStep step_at(int t) {
  AdamStep s{.lr = 1e-2, .weight_decay = 0.1f, .scale = 0.5f, .decoupled = true};
  s.bias_correction1 = 1 - std::pow(s.beta1, t);
  s.bias_correction2_sqrt = std::sqrt(1 - std::pow(s.beta2, t));
  return s;
}

/// One element in double; x is its gradient, scaled.
using Rule = std::function<void(double& p, double x, double& first, double& second, int t)>;

/// Runs `update(run, t)` five times, and the rule.
void expect_rule(const std::function<void(const UpdateRun&, int)>& update, const Rule& rule) {
  State state;
  Values p(state.p.begin(), state.p.end()), m(p.size()), v(p.size());
  for (int t = 1; t <= 5; ++t) {
    const Floats g = floats(p.size(), 10 + static_cast<unsigned>(t));
    update(state.run(g), t);
    for (std::size_t i = 0; i < p.size(); ++i) {
      rule(p[i], 0.5 * g[i], m[i], v[i], t);
      ASSERT_NEAR(state.p[i], p[i], 5e-6) << "step " << t << " element " << i;
    }
  }
}

TEST(OptimizerKernels, AdamFollowsItsDefinition) {
  for (const bool decoupled : {true, false})
    expect_rule(
        [&](const UpdateRun& run, int t) {
          AdamStep s = step_at(t);
          s.decoupled = decoupled;
          kernels::adam(run, kernels::adam_factors(s));
        },
        [&](double& p, double x, double& m, double& v, int t) {
          const AdamStep s = step_at(t);
          const double decay = s.weight_decay;
          if (decoupled)
            p *= 1 - s.lr * decay;
          else
            x += decay * p;
          m = s.beta1 * m + (1 - s.beta1) * x;
          v = s.beta2 * v + (1 - s.beta2) * x * x;
          p -= s.lr / s.bias_correction1 * m / (std::sqrt(v) / s.bias_correction2_sqrt + s.eps);
        });
}

TEST(OptimizerKernels, SgdFollowsItsDefinition) {
  for (const bool nesterov : {false, true})
    expect_rule(
        [&](const UpdateRun& run, int) {
          kernels::sgd(run, {0.1f, 0.9f, 0.75f, 0.01f, 0.5f, nesterov});
        },
        [&](double& p, double x, double& buf, double&, int) {
          x += 0.01 * p;
          buf = 0.9 * buf + 0.75 * x;
          p -= 0.1 * (nesterov ? x + 0.9 * buf : buf);
        });
  float p = 1;
  const float g = 0.5f;
  kernels::sgd({.value = &p, .gradient = &g, .count = 1}, {.lr = 0.5f, .scale = 1});
  EXPECT_EQ(p, 0.75f);
}

TEST(OptimizerKernels, LionFollowsItsDefinition) {
  expect_rule(
      [&](const UpdateRun& run, int) {
        kernels::lion(run, {0.99f, 0.9f, 0.1f, 0.75f, 0.25f, 0.03f, 0.5f});
      },
      [&](double& p, double x, double& m, double&, int) {
        const double c = 0.9 * m + 0.1 * x;
        p = 0.99 * p - 0.03 * (c > 0 ? 1 : c < 0 ? -1 : 0);
        m = 0.75 * m + 0.25 * x;
      });
}

TEST(OptimizerKernels, LionMovesNothingWithoutGradientAndKeepsNaN) {
  State state(19);
  Floats g(19), before = state.p;
  g[3] = NAN;
  kernels::lion(state.run(g), {1, 0.9f, 0.1f, 0.75f, 0.25f, 0.03f, 1});
  EXPECT_TRUE(std::isnan(state.p[3]) && std::isnan(state.m[3]));
  state.p[3] = before[3];
  EXPECT_EQ(state.p, before);
}

TEST(OptimizerKernels, AdagradFollowsItsDefinition) {
  expect_rule(
      [&](const UpdateRun& run, int) {
        kernels::adagrad(run, {0.1f, 0.03f, 1e-6f, 0.5f});
      },
      [&](double& p, double x, double& s, double&, int) {
        x += 0.1 * p;
        s += x * x;
        p -= 0.03 * x / (std::sqrt(s) + 1e-6);
      });
}

/// The maximum of the second moments does not fall as they do. NaN in a moment or in the maximum stays.
TEST(OptimizerKernels, AmsgradKeepsTheMaximum) {
  State state(40), plain(40);
  const Floats large(40, 1), small(40, 0.5f);
  const auto step = [](const UpdateRun& run) {
    kernels::adam(run, kernels::adam_factors({.lr = 0.25, .beta1 = 0, .beta2 = 0.5, .eps = 0}));
  };
  step(state.run(large, 3)), step(plain.run(large));
  EXPECT_EQ(state.p, plain.p);
  EXPECT_EQ(state.w, Floats(40, 0.5f));
  const Floats before = state.p;
  state.w[3] = NAN, state.v[4] = NAN;
  step(state.run(small, 3));
  for (std::size_t i = 0; i < 40; ++i) {
    if (i == 3 || i == 4) {
      EXPECT_TRUE(std::isnan(state.w[i]) && std::isnan(state.p[i])) << i;
      continue;
    }
    EXPECT_EQ(state.v[i], 0.375f);
    EXPECT_EQ(state.w[i], 0.5f);
    EXPECT_EQ(state.p[i], before[i] - 0.125f / std::sqrt(0.5f));
  }
}

/// With three states: OptimizerTraining of sharding.
TEST(OptimizerKernels, RmspropFollowsItsDefinition) {
  for (const bool centered : {false, true})
    for (const bool momentum : {false, true}) {
      if (centered && momentum) continue;
      expect_rule(
          [&](const UpdateRun& given, int) {
            UpdateRun run = given;
            if (!centered && !momentum) run.state1 = nullptr;
            kernels::rmsprop(run, {0.1f, 0.9f, 0.1f, 0.5f, 0.03f, 1e-2f, 0.5f, centered});
          },
          [&](double& p, double x, double& s, double& second, int) {
            x += 0.1 * p;
            s = 0.9 * s + 0.1 * x * x;
            if (centered) second = 0.9 * second + 0.1 * x;
            double u = x / (std::sqrt(centered ? s - second * second : s) + 1e-2);
            if (momentum) u = second = 0.5 * second + u;
            p -= 0.03 * u;
          });
    }
}

/// Runs f on every CPU path this machine has.
template <class F>
void on_each_target(const F& f) {
  for (const auto target : {HWY_AVX3, HWY_AVX2, HWY_EMU128, HWY_SCALAR})
    if (target & hwy::SupportedTargets()) {
      hwy::GetChosenTarget().Update(target);
      f();
    }
  hwy::GetChosenTarget().Update(hwy::SupportedTargets());
}

constexpr kernels::LambFactors lamb_factors{0.9f, 0.1f, 0.99f, 0.01f, 1e-6f, 0.1f, 0.03f, 0.5f, 0.01f, 10, 0};

/// The rules, by name.
struct NamedRule {
  const char* name;
  void (*update)(const UpdateRun&);
  int states = 2;
};
const NamedRule rules[] = {
    {"adam", [](const UpdateRun& r) { kernels::adam(r, kernels::adam_factors(step_at(3))); }},
    {"sgd",
     [](const UpdateRun& r) {
       kernels::sgd(r, {0.1f, 0.9f, 1, 0.01f, 0.5f, 1});
     }},
    {"lion",
     [](const UpdateRun& r) {
       kernels::lion(r, {0.99f, 0.9f, 0.1f, 0.99f, 0.01f, 0.03f, 0.5f});
     }},
    {"adagrad",
     [](const UpdateRun& r) {
       kernels::adagrad(r, {0.1f, 0.03f, 1e-10f, 0.5f});
     }},
    {"amsgrad", [](const UpdateRun& r) { kernels::adam(r, kernels::adam_factors(step_at(3))); }, 3},
    {"rmsprop",
     [](const UpdateRun& r) {
       kernels::rmsprop(r, {0.1f, 0.9f, 0.1f, 0, 0.03f, 1e-8f, 0.5f, 0});
     },
     1},
    {"rmsprop with momentum",
     [](const UpdateRun& r) {
       kernels::rmsprop(r, {0.1f, 0.9f, 0.1f, 0.5f, 0.03f, 1e-8f, 0.5f, 0});
     }},
    {"centered rmsprop with momentum",
     [](const UpdateRun& r) {
       kernels::rmsprop(r, {0.1f, 0.9f, 0.1f, 0.5f, 0.03f, 1e-8f, 0.5f, 1});
     },
     3}};

/// Moments that decay without gradients end at 0, where a subnormal one would stay: 0.9 of the smallest
/// rounds to itself.
TEST(OptimizerKernels, SubnormalMomentsBecomeZero) {
  constexpr float smallest = std::numeric_limits<float>::min();
  on_each_target([&] {
    for (const bool decoupled : {true, false}) {
      Floats p(21, 1), g(21), m(21, 1e-37f), v(21, 1e-37f);
      m[1] = -1e-37f, m[2] = NAN, g[3] = 1e-30f;
      const UpdateRun run{
          .value = p.data(), .gradient = g.data(), .state0 = m.data(), .state1 = v.data(), .count = 21};
      for (int t = 0; t < 100; ++t)
        kernels::adam(run, kernels::adam_factors({.beta1 = 0.9, .beta2 = 0.9, .decoupled = decoupled}));
      EXPECT_TRUE(std::isnan(m[2]) && std::isnan(v[2]));
      EXPECT_GE(m[3], smallest);
      EXPECT_EQ(v[3], 0);
      for (std::size_t i = 0; i < 21; ++i)
        EXPECT_TRUE(i == 2 || i == 3 || (m[i] == 0 && !std::signbit(m[i]) && v[i] == 0)) << i << ": " << m[i];
    }
    Floats p(21, 1), g(21), buf(21, -1e-37f), exp_avg(21, 1e-37f);
    buf[2] = exp_avg[2] = NAN;
    for (int t = 0; t < 100; ++t) {
      kernels::sgd({.value = p.data(), .gradient = g.data(), .state0 = buf.data(), .count = 21},
                   {.lr = 0.1f, .momentum = 0.9f, .rest = 1, .scale = 1});
      kernels::lion({.value = p.data(), .gradient = g.data(), .state0 = exp_avg.data(), .count = 21},
                    {1, 0.9f, 0.1f, 0.9f, 0.1f, 0.1f, 1});
    }
    for (std::size_t i = 0; i < 21; ++i)
      EXPECT_TRUE(i == 2 ? std::isnan(buf[i]) && std::isnan(exp_avg[i]) : buf[i] == 0 && exp_avg[i] == 0)
          << i;
  });
}

TEST(OptimizerKernels, EverySplitAndEveryCpuPathHaveTheSameBits) {
  const Floats g = floats(301, 9);
  for (const NamedRule& rule : rules) {
    State whole;
    for (int t = 0; t < 2; ++t) rule.update(whole.run(g, rule.states));
    on_each_target([&] {
      for (const std::size_t cut : {std::size_t{1}, std::size_t{8}, std::size_t{150}, std::size_t{299}}) {
        State s;
        for (int t = 0; t < 2; ++t) {
          rule.update(part_of(s.run(g, rule.states), 0, cut));
          rule.update(part_of(s.run(g, rule.states), cut, 301));
        }
        EXPECT_TRUE(s == whole) << rule.name << " cut at " << cut;
      }
    });
  }
}

/// Gradients in 16 bits and the working copy.
template <class T>
void expect_sixteen_bits(DType dtype) {
  Floats wide = floats(301, 9);
  wide[1] = 1e-7f, wide[2] = -3e-5f, wide[3] = 60000,
  wide[4] = 0;  // subnormal in f16, and large
  std::vector<T> narrow;
  for (const float x : wide) narrow.push_back(from_f32<T>(x));
  for (std::size_t i = 0; i < wide.size(); ++i) wide[i] = to_f32(narrow[i]);
  for (const NamedRule& rule : rules) {
    State expected;
    expected.p[7] = 1e5f, expected.p[8] = 3e-6f, expected.p[9] = -1e-8f, expected.p[10] = NAN;
    const State start = expected;
    rule.update(expected.run(wide, rule.states));
    on_each_target([&] {
      State s = start;
      std::vector<T> working(301);
      UpdateRun run = s.run(wide, rule.states);
      run.gradient = narrow.data(), run.gradient_dtype = dtype;
      run.working = working.data(), run.working_dtype = dtype;
      rule.update(part_of(run, 0, 150));
      rule.update(part_of(run, 150, 301));
      for (std::size_t i = 0; i < 301; ++i) {
        if (i == 10) {
          EXPECT_TRUE(std::isnan(s.p[i]) && std::isnan(to_f32(working[i])));
          continue;
        }
        ASSERT_EQ(s.p[i], expected.p[i]) << rule.name << " " << i;
        ASSERT_EQ(s.m[i], expected.m[i]) << rule.name << " " << i;
        ASSERT_EQ(working[i].bits, from_f32<T>(s.p[i]).bits) << rule.name << " " << i << ": " << s.p[i];
      }
    });
  }
}

TEST(OptimizerKernels, GradientsAndWorkingCopiesMayHave16Bits) {
  expect_sixteen_bits<f16>(DType::f16);
  expect_sixteen_bits<bf16>(DType::bf16);
}

/// Rounding changes no NaN to a number, whatever its bits: 0x7fffffff is a device's NaN.
TEST(OptimizerKernels, NaNStaysNaNInAWorkingCopy) {
  State s(40);
  for (float& p : s.p) p = detail::float_of(0x7fffffff);
  std::vector<bf16> working(40);
  const Floats g(40);
  UpdateRun run = s.run(g);
  run.working = working.data();
  rules[0].update(run);
  for (const bf16 w : working) EXPECT_TRUE(std::isnan(to_f32(w)));
}

/// f32 gradients beside a 16-bit working copy, and the reverse.
TEST(OptimizerKernels, DtypesAreIndependent) {
  const Floats g(40, 0.5f);
  const std::vector<bf16> narrow(40, from_f32<bf16>(0.5f));
  std::vector<bf16> working(40);
  State a(40), b(40);
  UpdateRun with_copy = a.run(g), without = b.run(g);
  with_copy.working = working.data();
  without.gradient = narrow.data(), without.gradient_dtype = DType::bf16;
  rules[0].update(with_copy), rules[0].update(without);
  EXPECT_TRUE(a == b);
  for (std::size_t i = 0; i < 40; ++i) EXPECT_EQ(working[i].bits, from_f32<bf16>(a.p[i]).bits);
}

TEST(OptimizerKernels, LambSumsTheSquaresOfValuesAndUpdates) {
  for (const bool inside : {false, true}) {
    kernels::LambFactors f = lamb_factors;
    f.eps_inside_sqrt = inside;
    const Floats g = floats(256, 9);
    State whole(256);
    const State start = whole;
    std::vector<double> squares(8);
    kernels::lamb_moments(whole.run(g), f, squares.data());
    EXPECT_EQ(whole.p, start.p);
    for (std::size_t b = 0; b < 4; ++b) {
      double values = 0, updates = 0;
      for (std::size_t i = 64 * b; i < 64 * b + 64; ++i) {
        const double x = 0.5 * g[i], m = 0.1 * x, v = 0.01 * x * x, p = start.p[i];
        const double u = m / (inside ? std::sqrt(v + 1e-6) : std::sqrt(v) + 1e-6) + 0.1 * p;
        values += p * p, updates += u * u;
        EXPECT_NEAR(whole.m[i], m, 1e-7);
        EXPECT_NEAR(whole.v[i], v, 1e-8);
      }
      EXPECT_NEAR(squares[2 * b], values, 1e-13 * values);
      EXPECT_NEAR(squares[2 * b + 1], updates, 1e-6 * updates);
    }
    on_each_target([&] {
      State s = start;
      std::vector<double> parts(8);
      for (std::size_t at : {0, 64})
        kernels::lamb_moments(part_of(s.run(g), at, at ? 256 : 64), f, parts.data() + at / 32);
      EXPECT_TRUE(s == whole);
      EXPECT_EQ(parts, squares);
    });
  }
}

TEST(OptimizerKernels, LambsTrustRatioHasLimits) {
  EXPECT_EQ(trust_ratio(lamb_factors, 16, 4), 2);
  EXPECT_EQ(trust_ratio(lamb_factors, 16, 1e-9), 10);
  EXPECT_EQ(trust_ratio(lamb_factors, 1e-9, 16), 0.01f);
  EXPECT_EQ(trust_ratio(lamb_factors, 0, 4), 1);
  EXPECT_EQ(trust_ratio(lamb_factors, 4, 0), 1);
  EXPECT_TRUE(std::isnan(trust_ratio(lamb_factors, NAN, 4)));
}

TEST(OptimizerKernels, MuonDirectionsFollowTheirDefinition) {
  for (const bool nesterov : {false, true}) {
    const kernels::MuonFactors f{0.9f, 0.1f, 0.5f, nesterov};
    const Floats g = floats(301, 9);
    State whole;
    whole.m = floats(301, 4);
    const State start = whole;
    Floats direction(301);
    kernels::muon_direction(whole.run(g), f, direction.data());
    EXPECT_EQ(whole.p, start.p);
    for (std::size_t i = 0; i < 301; ++i) {
      const double x = 0.5 * g[i], m = 0.9 * start.m[i] + 0.1 * x;
      EXPECT_NEAR(whole.m[i], m, 1e-6);
      EXPECT_NEAR(direction[i], nesterov ? 0.1 * x + 0.9 * m : m, 1e-6);
    }
    on_each_target([&] {
      State s = start;
      Floats parts(301);
      kernels::muon_direction(part_of(s.run(g), 0, 75), f, parts.data());
      kernels::muon_direction(part_of(s.run(g), 75, 301), f, parts.data() + 75);
      EXPECT_TRUE(s == whole);
      EXPECT_EQ(parts, direction);
    });
  }
}

TEST(OptimizerKernels, SumOfSquaresIsTheSameEverywhere) {
  const Floats x = floats(64 * 5, 3);
  std::vector<double> whole(5);
  kernels::sum_of_squares(x.data(), 5, whole.data());
  for (std::size_t b = 0; b < 5; ++b) {
    double sum = 0;
    for (std::size_t i = 0; i < 64; ++i) sum += static_cast<double>(x[64 * b + i]) * x[64 * b + i];
    EXPECT_NEAR(whole[b], sum, 1e-14 * sum);
  }
  on_each_target([&] {
    Floats shifted(x.size() + 3);
    std::copy(x.begin(), x.end(), shifted.begin() + 3);
    for (std::size_t b = 0; b < 5; ++b) {
      double one = 0;
      kernels::sum_of_squares(shifted.data() + 3 + 64 * b, 1, &one);
      EXPECT_EQ(one, whole[b]);
    }
  });
}

}  // namespace
}  // namespace rz::test
