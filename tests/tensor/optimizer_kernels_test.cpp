#include <gtest/gtest.h>
#include <hwy/targets.h>

#include <cmath>
#include <limits>

#include "tensor/kernels/optimizer.h"
#include "tests/support/reference.h"

namespace rz::test {
namespace {

using kernels::AdamStep;
using kernels::SgdStep;
using Floats = std::vector<float>;

Floats floats(std::size_t n, unsigned seed) {
  const Values v = random_values(n, seed);
  return Floats(v.begin(), v.end());
}

struct AdamState {
  Floats p = floats(301, 1), m = Floats(301), v = Floats(301);
};

AdamStep step_at(int t) {
  AdamStep s{.lr = 1e-2, .weight_decay = 0.1f, .grad_scale = 0.5f};
  s.bias_correction1 = 1 - std::pow(s.beta1, t);
  s.bias_correction2_sqrt = std::sqrt(1 - std::pow(s.beta2, t));
  return s;
}

TEST(OptimizerKernels, AdamFollowsItsDefinition) {
  for (const bool decoupled : {true, false}) {
    AdamState state;
    Values p(state.p.begin(), state.p.end()), m(p.size()), v(p.size());
    for (int t = 1; t <= 5; ++t) {
      const Floats g = floats(p.size(), 10 + static_cast<unsigned>(t));
      const AdamStep s = step_at(t);
      (decoupled ? kernels::adamw : kernels::adam)(state.p.data(), g.data(), state.m.data(), state.v.data(),
                                                   p.size(), s);
      for (std::size_t i = 0; i < p.size(); ++i) {
        const double decay = s.weight_decay, grad = 0.5 * g[i] + (decoupled ? 0 : decay * p[i]);
        if (decoupled) p[i] *= 1 - s.lr * decay;
        m[i] = s.beta1 * m[i] + (1 - s.beta1) * grad;
        v[i] = s.beta2 * v[i] + (1 - s.beta2) * grad * grad;
        p[i] -= s.lr / s.bias_correction1 * m[i] / (std::sqrt(v[i]) / s.bias_correction2_sqrt + s.eps);
        ASSERT_NEAR(state.p[i], p[i], 5e-6) << "step " << t << " element " << i;
      }
    }
  }
}

TEST(OptimizerKernels, SgdFollowsItsDefinition) {
  for (const bool nesterov : {false, true}) {
    Floats p = floats(77, 1), buf(77, NAN);
    Values q(p.begin(), p.end()), b(77);
    for (int t = 0; t < 4; ++t) {
      const Floats g = floats(77, 20 + static_cast<unsigned>(t));
      const SgdStep s{
          .lr = 0.1f, .momentum = 0.9f, .weight_decay = 0.01f, .nesterov = nesterov, .first = t == 0};
      kernels::sgd_momentum(p.data(), g.data(), buf.data(), 77, s);
      for (std::size_t i = 0; i < 77; ++i) {
        const double grad = g[i] + 0.01f * q[i];
        b[i] = t ? 0.9f * b[i] + grad : grad;
        q[i] -= 0.1f * (nesterov ? grad + 0.9f * b[i] : b[i]);
        ASSERT_NEAR(p[i], q[i], 1e-6);
      }
    }
  }
  float p = 1;
  const float g = 0.5f;
  kernels::sgd_momentum(&p, &g, nullptr, 1, {.lr = 0.5f});
  EXPECT_EQ(p, 0.75f);
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

/// Moments that decay without gradients end at 0, where a subnormal one would stay: 0.9 of the smallest
/// rounds to itself.
TEST(OptimizerKernels, SubnormalMomentsBecomeZero) {
  constexpr float smallest = std::numeric_limits<float>::min();
  on_each_target([&] {
    for (const auto& kernel : {kernels::adamw, kernels::adam}) {
      Floats p(21, 1), g(21), m(21, 1e-37f), v(21, 1e-37f);
      m[1] = -1e-37f, m[2] = NAN, g[3] = 1e-30f;
      for (int t = 0; t < 100; ++t)
        kernel(p.data(), g.data(), m.data(), v.data(), 21, {.beta1 = 0.9, .beta2 = 0.9});
      EXPECT_TRUE(std::isnan(m[2]) && std::isnan(v[2]));
      EXPECT_GE(m[3], smallest);
      EXPECT_EQ(v[3], 0);
      for (std::size_t i = 0; i < 21; ++i)
        EXPECT_TRUE(i == 2 || i == 3 || (m[i] == 0 && !std::signbit(m[i]) && v[i] == 0)) << i << ": " << m[i];
    }
  });
  Floats p(21, 1), g(21), buf(21, -1e-37f);
  buf[2] = NAN;
  for (int t = 0; t < 100; ++t) kernels::sgd_momentum(p.data(), g.data(), buf.data(), 21, {.momentum = 0.9f});
  for (std::size_t i = 0; i < 21; ++i) EXPECT_TRUE(i == 2 ? std::isnan(buf[i]) : buf[i] == 0) << i;
}

TEST(OptimizerKernels, EverySplitAndEveryCpuPathHaveTheSameBits) {
  const Floats g = floats(301, 9);
  AdamState whole;
  kernels::adamw(whole.p.data(), g.data(), whole.m.data(), whole.v.data(), 301, step_at(3));
  on_each_target([&] {
    for (const std::size_t cut : {std::size_t{1}, std::size_t{8}, std::size_t{150}, std::size_t{299}}) {
      AdamState s;
      kernels::adamw(s.p.data(), g.data(), s.m.data(), s.v.data(), cut, step_at(3));
      kernels::adamw(s.p.data() + cut, g.data() + cut, s.m.data() + cut, s.v.data() + cut, 301 - cut,
                     step_at(3));
      EXPECT_EQ(s.p, whole.p);
      EXPECT_EQ(s.m, whole.m);
      EXPECT_EQ(s.v, whole.v);
    }
  });
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
