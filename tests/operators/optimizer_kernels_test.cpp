// Runs: ci host operators

// Updates and sums of squares: by their definitions in double on the host; with the same bits for every
// split, by the vectors of every target of a CPU, and on a device: many spans in one call, unaligned ones and
// empty ones, gradients and working copies in 16 bits.

#include <cmath>
#include <limits>
#include <random>

#include "comm/core/math.h"
#include "sharding/optim/grad_norm.h"
#include "tensor/kernels/device_ops.h"
#include "tensor/kernels/optimizer/optimizer.h"
#include "tests/operators/operator.h"
#include "tests/support/error_of.h"

namespace rz::test {
namespace {

using kernels::AdamFactors;
using kernels::UpdateRun;
using Calls = ops::DeviceOptimizer;
using ops::StepInputs;
using Floats = std::vector<float>;

const Calls& optimizer() { return ops::device_ops().optimizer; }

Floats floats(std::size_t n, unsigned seed, double range = 1) {
  const Values v = random_values(n, seed, range);
  return Floats(v.begin(), v.end());
}

/// Values and states in f32, on the host.
struct State {
  explicit State(std::size_t n = 301) : p(floats(n, 1)), m(n), v(n), w(n) {}
  UpdateRun run(const Floats& g, int states = 2, std::uint32_t rule = 0) {
    return {.value = p.data(),
            .gradient = g.data(),
            .state0 = states > 0 ? m.data() : nullptr,
            .state1 = states > 1 ? v.data() : nullptr,
            .state2 = states > 2 ? w.data() : nullptr,
            .count = p.size(),
            .rule = rule};
  }
  bool operator==(const State&) const = default;
  Floats p, m, v, w;
};

// ---- the rules

/// An update with each of some constants, of which run.rule is the number.
struct Rule {
  const char* name;
  int states, fewest;  ///< fewest: in other runs of a call
  bool working;        ///< has a copy in 16 bits
  std::uint32_t constants;
  std::function<void(const UpdateRun&, float scale)> on_host;  ///< with `scale` times that of the constants
  std::function<void(std::span<const UpdateRun>, const StepInputs&, const Stream&)> on_device;
  /// One element in double; x is its gradient.
  std::function<void(std::uint32_t rule, int states, double& p, double x, double (&state)[3])> definition;
};

template <class F, class Definition>
Rule rule(const char* name, int states, int fewest, const std::vector<F>& constants,
          void (*host)(const UpdateRun&, const F&), auto Calls::*device, const Definition& definition,
          bool working = true) {
  return {name,
          states,
          fewest,
          working,
          static_cast<std::uint32_t>(constants.size()),
          [=](const UpdateRun& run, float scale) {
            F f = constants[run.rule];
            f.scale *= scale;
            host(run, f);
          },
          [=](std::span<const UpdateRun> runs, const StepInputs& inputs, const Stream& stream) {
            (optimizer().*device)(runs, constants, inputs, stream);
          },
          [=](std::uint32_t of, int states, double& p, double x, double(&s)[3]) {
            const F& f = constants[of];
            definition(f, states, p, f.scale * x, s);
          }};
}

/// With and without weight decay, and one with rates of its own.
std::vector<kernels::AdamStep> adam_steps(bool decoupled) {
  const auto step = [=](int t, kernels::AdamStep s) {
    s.scale = 0.7f, s.decoupled = decoupled;
    s.bias_correction1 = 1 - std::pow(s.beta1, t);
    s.bias_correction2_sqrt = std::sqrt(1 - std::pow(s.beta2, t));
    return s;
  };
  return {step(1, {.lr = 1e-2, .weight_decay = 0.1f}), step(3, {.lr = 1e-2}),
          step(1, {.lr = 1e-4, .beta1 = 0.5, .beta2 = 0.5, .weight_decay = 0.1f})};
}
std::vector<AdamFactors> factors_of(const std::vector<kernels::AdamStep>& steps) {
  std::vector<AdamFactors> all;
  for (const kernels::AdamStep& s : steps) all.push_back(adam_factors(s));
  return all;
}

/// AMSGrad where a run has a third state.
Rule adam(bool decoupled) {
  const std::vector<kernels::AdamStep> steps = adam_steps(decoupled);
  Rule r = rule(decoupled ? "adamw" : "adam", 3, 2, factors_of(steps), kernels::adam, &Calls::adam,
                [](const AdamFactors&, int, double&, double, double*) {});
  r.definition = [=](std::uint32_t of, int states, double& p, double x, double(&state)[3]) {
    const kernels::AdamStep& s = steps[of];
    const double decay = s.weight_decay, before = p;
    auto& [m, v, largest] = state;
    if (decoupled) p *= 1 - s.lr * decay;
    x = double{s.scale} * x + (decoupled ? 0 : decay * before);
    m = s.beta1 * m + (1 - s.beta1) * x;
    v = s.beta2 * v + (1 - s.beta2) * x * x;
    largest = std::max(largest, v);
    p -= s.lr / s.bias_correction1 * m /
         (std::sqrt(states > 2 ? largest : v) / s.bias_correction2_sqrt + s.eps);
  };
  return r;
}

Rule rmsprop(bool centered) {
  std::vector<kernels::RmspropFactors> constants{{0.1f, 0.9f, 0.1f, 0.5f, 0.03f, 1e-2f, -0.7f, 0},
                                                 {0, 0.9f, 0.1f, 0.9f, 0.03f, 1e-2f, 0.7f, 0},
                                                 {0, 0.5f, 0.5f, 0.5f, 0.01f, 1e-3f, 0.7f, 0}};
  for (auto& f : constants) f.centered = centered;
  return rule(centered ? "centered rmsprop" : "rmsprop", 2 + centered, 1 + centered, constants,
              kernels::rmsprop, &Calls::rmsprop,
              [=](const auto& f, int states, double& p, double x, double(&state)[3]) {
                auto& [s, mean, third] = state;
                x += f.l2 * p;
                s = f.alpha * s + f.rest * x * x;
                if (centered) mean = f.alpha * mean + f.rest * x;
                double u = x / (std::sqrt(centered ? s - mean * mean : s) + f.eps);
                double& buf = centered ? third : mean;
                if (states == 2 + centered) u = buf = f.momentum * buf + u;
                p -= f.rate * u;
              });
}

std::vector<Rule> rules() {
  const auto sign = [](double x) { return x > 0 ? 1 : x < 0 ? -1 : 0; };
  return {
      adam(true),
      adam(false),
      rmsprop(false),
      rmsprop(true),
      rule("sgd", 1, 0,
           std::vector<kernels::SgdFactors>{{0.1f, 0.9f, 1, 0.01f, 0.7f, 0},
                                            {0.1f, 0.9f, 0.75f, 0, 0.7f, 1},
                                            {0.3f, 0.8f, 0.5f, 0.01f, 0.7f, 0}},
           kernels::sgd, &Calls::sgd,
           [](const auto& f, int states, double& p, double x, double(&s)[3]) {
             x += f.weight_decay * p;
             s[0] = f.momentum * s[0] + f.rest * x;
             p -= f.lr * (states == 0 ? x : f.nesterov ? x + f.momentum * s[0] : s[0]);
           }),
      rule("lion", 1, 1,
           std::vector<kernels::LionFactors>{{0.9f, 0.9f, 0.1f, 0.99f, 0.01f, 0.1f, 0.7f},
                                             {1, 0.9f, 0.1f, 0.99f, 0.01f, 0.1f, 0.7f},
                                             {0.99f, 0.5f, 0.5f, 0.75f, 0.25f, 0.03f, 0.7f}},
           kernels::lion, &Calls::lion,
           [=](const auto& f, int, double& p, double x, double(&s)[3]) {
             p = f.keep * p - f.rate * sign(f.beta1 * s[0] + f.rest1 * x);
             s[0] = f.beta2 * s[0] + f.rest2 * x;
           }),
      rule("adagrad", 1, 1,
           std::vector<kernels::AdagradFactors>{
               {0.1f, 0.03f, 1e-10f, 0.7f}, {0, 0.03f, 1e-6f, 0.7f}, {0, 0.01f, 1e-3f, 0.7f}},
           kernels::adagrad, &Calls::adagrad,
           [](const auto& f, int, double& p, double x, double(&s)[3]) {
             x += f.l2 * p;
             s[0] += x * x;
             p -= f.rate * x / (std::sqrt(s[0]) + f.eps);
           }),
      rule(
          "muon_direction", 1, 1,
          std::vector<kernels::MuonFactors>{
              {0.9f, 0.1f, 0.7f, 1}, {0.9f, 0.1f, 0.7f, 0}, {0.5f, 0.5f, 0.7f, 1}},
          +[](const UpdateRun& r, const kernels::MuonFactors& f) { kernels::muon_direction(r, f, r.value); },
          &Calls::muon_direction,
          [](const auto& f, int, double& direction, double x, double(&s)[3]) {
            s[0] = f.beta * s[0] + f.rest * x;
            direction = f.nesterov ? f.rest * x + f.beta * s[0] : s[0];
          },
          false),
      rule("decayed_step", 0, 0,
           std::vector<kernels::DecayedStepFactors>{{0.9f, 0.1f, 0.7f}, {1, 0.1f, 0.7f}, {0.5f, 0.3f, 0.7f}},
           kernels::decayed_step, &Calls::decayed_step,
           [](const auto& f, int, double& p, double x, double(&)[3]) { p = f.keep * p - f.rate * x; })};
}

// ---- spans

/// The bits of the numbers: NaN is NaN, and 0 is not -0.
void expect_same_bits(const Tensor& got, const Floats& expected, const Stream& stream,
                      const std::string& what) {
  const Tensor host = got.on_host(stream);
  for (std::size_t i = 0; i < expected.size(); ++i) {
    const float g = host.data<float>()[i];
    if (std::isnan(g) && std::isnan(expected[i])) continue;
    ASSERT_EQ(detail::bits_of(g), detail::bits_of(expected[i]))
        << what << " " << i << ": " << g << ", on the host " << expected[i];
  }
}

/// A span in f32 on the host, and where it is tested.
struct Piece {
  State plain;
  Floats g;
  Tensor value, gradient, state0, state1, state2, working;
  std::uint32_t rule;

  UpdateRun on_host(int states) { return plain.run(g, states, rule); }
  UpdateRun run(int states) const {
    return {.value = value.data<float>(),
            .gradient = gradient.raw(),
            .gradient_dtype = gradient.dtype(),
            .working = working.raw(),
            .working_dtype = working.defined() ? working.dtype() : DType::bf16,
            .state0 = states > 0 ? state0.data<float>() : nullptr,
            .state1 = states > 1 ? state1.data<float>() : nullptr,
            .state2 = states > 2 ? state2.data<float>() : nullptr,
            .count = value.count(),
            .rule = rule};
  }
};

class OptimizerKernels : public OnDevice {
 protected:
  /// Memory that starts `shift` elements behind an aligned address: of the arena, if there is one, since
  /// thousands of allocations are slow on the emulated device.
  Tensor allocate(std::size_t n, DType t, std::size_t shift) const {
    if (!arena_.defined()) return empty_on(stream, {n + shift}, t).view(shift, {n});
    std::byte* const at = arena_.raw() + used_ + shift * size_of(t);
    used_ += ((n + shift) * size_of(t) + 255) / 256 * 256;
    EXPECT_LE(used_, arena_.bytes());
    return Tensor::borrow(at, {n}, t, device);
  }
  Tensor place(const Floats& x, DType t, std::size_t shift) const {
    const Tensor to = allocate(x.size(), t, shift);
    ops::copy(to, to_device({x.begin(), x.end()}, {x.size()}, t, stream), stream);
    return to;
  }
  /// Among its numbers those that are subnormal, or become so, -0, NaN, and some that 16 bits lack.
  Piece piece(std::size_t n, unsigned seed, DType gradients, DType working, std::size_t shift) const {
    Piece x{.plain = State(n), .g = floats(n, seed + 1, 1e-3), .rule = seed / 10 % 3};
    auto& [p, m, v, w] = x.plain;
    p = floats(n, seed), m = floats(n, seed + 2, 1e-3), v = floats(n, seed + 3, 1e-6),
    w = floats(n, seed + 4, 1e-6);
    for (float& e : v) e = std::abs(e);
    if (seed % 20 == 0)  // a first state that is a square
      for (float& e : m) e = std::abs(e);
    if (n > 14) {
      x.g[1] = 0, x.g[2] = 1e-42f, x.g[3] = 1e30f, v[4] = 1e-44f, p[5] = -0.0f, x.g[6] = NAN;
      x.g[7] = 0, m[7] = -1e-38f, v[7] = 1e-38f;
      w[8] = NAN, w[9] = 1;
      p[10] = 1e5f, p[11] = 3e-6f, p[12] = -1e-8f, p[13] = detail::float_of(0x7fffffff);  // a device's NaN
      x.g[11] = 60000, x.g[12] = -3e-5f, x.g[14] = 1e-7f;
    }
    x.gradient = place(x.g, gradients, shift);
    const Values g = from_device(x.gradient, stream);
    x.g.assign(g.begin(), g.end());
    x.value = place(p, DType::f32, shift), x.state0 = place(m, DType::f32, shift);
    x.state1 = place(v, DType::f32, shift), x.state2 = place(w, DType::f32, shift);
    if (working != DType::f32) x.working = allocate(n, working, shift);
    return x;
  }
  /// More than one launch holds, of sizes that no pack, block or tile divides.
  std::vector<Piece> pieces(unsigned count) {
    arena_ = empty_on(stream, {1 << 20}, DType::f32), used_ = 0;
    std::vector<Piece> all;
    const DType types[] = {DType::f32, DType::f16, DType::bf16};
    for (unsigned i = 0; i < count; ++i) {
      const std::size_t n = i == 7 ? 5003 : i == 64 ? 0 : i == 100 ? 2048 : 1 + i * 37 % 150;
      all.push_back(piece(n, 10 * i, types[i % 3], types[i / 3 % 3], i % 5));
    }
    return all;
  }
  void expect_as_on_host(const Piece& x) const {
    expect_same_bits(x.value, x.plain.p, stream, "value");
    expect_same_bits(x.state0, x.plain.m, stream, "state0");
    expect_same_bits(x.state1, x.plain.v, stream, "state1");
    expect_same_bits(x.state2, x.plain.w, stream, "state2");
    if (!x.working.defined()) return;
    const Values got = from_device(x.working, stream),
                 expected = from_device(place(x.plain.p, x.working.dtype(), 0), stream);
    for (std::size_t i = 0; i < got.size(); ++i)
      ASSERT_TRUE(got[i] == expected[i] || (std::isnan(got[i]) && std::isnan(expected[i])))
          << "working " << i << ": " << got[i] << ", expected " << expected[i];
  }
  Tensor scalar(float x) const { return to_device({static_cast<double>(x)}, {1}, DType::f32, stream); }
  void expect_same_bits_of(const Rule&);

 private:
  Tensor arena_;
  mutable std::size_t used_ = 0;
};

/// Five updates of 301 elements.
TEST_F(OptimizerKernels, FollowTheirDefinitions) {
  if (!on_host()) GTEST_SKIP() << "a device has the host's bits";
  for (const Rule& rule : rules())
    for (const int states : {rule.fewest, rule.states})
      for (std::uint32_t of = 0; of < rule.constants; ++of) {
        State state;
        Values p(state.p.begin(), state.p.end());
        double s[301][3] = {};
        for (unsigned t = 1; t <= 5; ++t) {
          const Floats g = floats(301, 10 + t);
          rule.on_host(state.run(g, states, of), 1);
          for (std::size_t i = 0; i < 301; ++i) {
            rule.definition(of, states, p[i], double{g[i]}, s[i]);
            ASSERT_NEAR(state.p[i], p[i], 5e-6)
                << rule.name << " " << of << ", " << states << " states: step " << t << " element " << i;
          }
        }
      }
}

/// Two updates, of a part of a span after the other on the host, or of all spans at once on a device.
void OptimizerKernels::expect_same_bits_of(const Rule& rule) {
  SCOPED_TRACE(rule.name);
  const float scale = rule.states > 0 ? 0.3f : 1;  // decayed_step has no grad_scale
  const auto states = [&](std::size_t i) { return i % 4 ? rule.states : rule.fewest; };
  std::vector<Piece> expected;
  each_target([&] {
    std::vector<Piece> all = pieces(130);
    const Tensor grad_scale = scalar(scale);
    std::vector<UpdateRun> runs;
    for (std::size_t i = 0; i < all.size(); ++i) {
      runs.push_back(all[i].run(states(i)));
      if (!rule.working) all[i].working = {}, runs.back().working = nullptr;
    }
    for (int t = 0; t < 2 && !on_host(); ++t)
      rule.on_device(runs, {.grad_scale = scale == 1 ? nullptr : grad_scale.data<float>()}, stream);
    for (std::size_t i = 0; i < all.size(); ++i) {
      const std::size_t n = runs[i].count, cut = std::array{std::size_t{1}, n / 2, n - 2}[i % 3];
      for (int t = 0; t < 2; ++t) {
        if (on_host() && n > 2)
          for (const UpdateRun& part : {part_of(runs[i], 0, cut), part_of(runs[i], cut, n)})
            rule.on_host(part, scale);
        else if (on_host())
          rule.on_host(runs[i], scale);
      }
    }
    if (expected.empty()) {
      expected = all;
      for (std::size_t i = 0; i < all.size(); ++i)
        for (int t = 0; t < 2; ++t) rule.on_host(expected[i].on_host(states(i)), scale);
    }
    for (std::size_t i = 0; i < all.size(); ++i) {
      SCOPED_TRACE(i);
      all[i].plain = expected[i].plain;
      expect_as_on_host(all[i]);
      if (HasFatalFailure()) return;
    }
  });
}

TEST_F(OptimizerKernels, HaveTheSameBitsEverywhere) {
  for (const Rule& rule : rules()) {
    expect_same_bits_of(rule);
    if (HasFatalFailure()) return;
  }
}

// ---- the host

TEST(HostOptimizer, LionMovesNothingWithoutGradientAndKeepsNaN) {
  State state(19);
  Floats g(19), before = state.p;
  g[3] = NAN;
  kernels::lion(state.run(g), {1, 0.9f, 0.1f, 0.75f, 0.25f, 0.03f, 1});
  EXPECT_TRUE(std::isnan(state.p[3]) && std::isnan(state.m[3]));
  state.p[3] = before[3];
  EXPECT_EQ(state.p, before);
}

/// The maximum of the second moments does not fall as they do. NaN in a moment or in the maximum stays.
TEST(HostOptimizer, AmsgradKeepsTheMaximum) {
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

/// Moments that decay without gradients end at 0, where a subnormal one would stay: 0.9 of the smallest
/// rounds to itself.
TEST(HostOptimizer, SubnormalMomentsBecomeZero) {
  constexpr float smallest = std::numeric_limits<float>::min();
  each_target([&] {
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

constexpr kernels::LambFactors lamb_factors{0.9f, 0.1f, 0.99f, 0.01f, 1e-6f, 0.1f, 0.03f, 0.5f, 0.01f, 10, 0};

TEST(HostOptimizer, LambSumsTheSquaresOfValuesAndUpdates) {
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
    each_target([&] {
      State s = start;
      std::vector<double> parts(8);
      for (std::size_t at : {0, 64})
        kernels::lamb_moments(part_of(s.run(g), at, at ? 256 : 64), f, parts.data() + at / 32);
      EXPECT_TRUE(s == whole);
      EXPECT_EQ(parts, squares);
    });
  }
}

TEST(HostOptimizer, LambsTrustRatioHasLimits) {
  EXPECT_EQ(trust_ratio(lamb_factors, 16, 4), 2);
  EXPECT_EQ(trust_ratio(lamb_factors, 16, 1e-9), 10);
  EXPECT_EQ(trust_ratio(lamb_factors, 1e-9, 16), 0.01f);
  EXPECT_EQ(trust_ratio(lamb_factors, 0, 4), 1);
  EXPECT_EQ(trust_ratio(lamb_factors, 4, 0), 1);
  EXPECT_TRUE(std::isnan(trust_ratio(lamb_factors, NAN, 4)));
}

TEST(HostOptimizer, MuonsDirectionMayBeElsewhere) {
  const Floats g = floats(301, 9);
  State there, here;
  const Floats before = there.p;
  Floats direction(301);
  const kernels::MuonFactors f{0.9f, 0.1f, 0.5f, 1};
  kernels::muon_direction(there.run(g), f, direction.data());
  kernels::muon_direction(here.run(g), f, here.p.data());
  EXPECT_EQ(there.p, before);
  EXPECT_EQ(direction, here.p);
}

TEST(HostOptimizer, SumOfSquaresIsTheSameEverywhere) {
  const Floats x = floats(64 * 5, 3);
  std::vector<double> whole(5);
  kernels::sum_of_squares(x.data(), 5, whole.data());
  for (std::size_t b = 0; b < 5; ++b) {
    double sum = 0;
    for (std::size_t i = 0; i < 64; ++i) sum += static_cast<double>(x[64 * b + i]) * x[64 * b + i];
    EXPECT_NEAR(whole[b], sum, 1e-14 * sum);
  }
  each_target([&] {
    Floats shifted(x.size() + 3);
    std::copy(x.begin(), x.end(), shifted.begin() + 3);
    for (std::size_t b = 0; b < 5; ++b) {
      double one = 0;
      kernels::sum_of_squares(shifted.data() + 3 + 64 * b, 1, &one);
      EXPECT_EQ(one, whole[b]);
    }
  });
}

// ---- devices

class DeviceOptimizer : public OptimizerKernels {
 protected:
  void SetUp() override {
    if (on_host()) GTEST_SKIP() << "calls of devices";
    OnDevice::SetUp();
  }
  std::vector<AdamFactors> adam_rules = factors_of(adam_steps(true));
};

/// Sums of squares in double, of two members.
TEST_F(DeviceOptimizer, LambHasTheHostsBits) {
  const std::vector<kernels::LambFactors> rules{
      {0.9f, 0.1f, 0.99f, 0.01f, 1e-6f, 0.1f, 0.03f, 0.7f, 0.01f, 10, 0},
      {0.8f, 0.2f, 0.95f, 0.05f, 1e-4f, 0, 0.01f, 0.7f, 0.01f, 0.5f, 1}};
  const DType types[] = {DType::f32, DType::f16, DType::bf16};
  std::vector<Piece> all;
  std::vector<UpdateRun> runs;
  for (unsigned i = 0; i < 7; ++i) {
    Piece& x = all.emplace_back(piece(64 * (i == 3 ? 33 : i), i, types[i % 3], types[i / 3], i % 5));
    if (i > 0) {  // norms that are finite
      x.g[3] = x.g[6] = x.plain.p[13] = 1;
      x.gradient = place(x.g, x.gradient.dtype(), i % 5), x.value = place(x.plain.p, DType::f32, i % 5);
      const Values g = from_device(x.gradient, stream);
      x.g.assign(g.begin(), g.end());
    }
    x.rule = i % 2;
    runs.push_back(x.run(2));
    runs.back().member = i / 4;
  }
  const Tensor sums = empty_on(stream, {4 * ExactLayout::words}, DType::i64),
               norms = empty_on(stream, {4}, DType::f64), scale = scalar(0.3f);
  for (int t = 0; t < 2; ++t) {
    memset_async(sums.raw(), 0, sums.bytes(), stream);
    const StepInputs inputs{.grad_scale = scale.data<float>(), .norms = norms.data<double>()};
    optimizer().lamb_moments(runs, rules, inputs, sums.data<std::int64_t>(), stream);
    optimizer().read_sums(norms.data<double>(), sums.data<std::int64_t>(), 4, stream);
    optimizer().lamb(runs, rules, inputs, stream);
    ExactSum expected[4];
    for (std::size_t i = 0; i < all.size(); ++i) {
      kernels::LambFactors f = rules[all[i].rule];
      f.scale *= 0.3f;
      std::vector<double> squares(all[i].g.size() / 32);
      kernels::lamb_moments(all[i].on_host(2), f, squares.data());
      for (std::size_t b = 0; b < squares.size(); ++b) expected[2 * (i / 4) + b % 2].add(squares[b]);
    }
    const Values got = from_device(norms, stream);
    for (std::size_t i = 0; i < 4; ++i) EXPECT_EQ(got[i], expected[i].value()) << i;
    for (std::size_t i = 0; i < all.size(); ++i) {
      kernels::LambFactors f = rules[all[i].rule];
      f.rate *= trust_ratio(f, expected[2 * (i / 4)].value(), expected[2 * (i / 4) + 1].value());
      kernels::lamb(all[i].on_host(2), f);
    }
  }
  for (const Piece& x : all) expect_as_on_host(x);
}

TEST_F(DeviceOptimizer, ConstantsMayLieInDeviceMemory) {
  Piece x = piece(301, 10, DType::f32, DType::f32, 0);
  x.rule = 2;
  const UpdateRun r = x.run(2);
  const auto stale = factors_of(adam_steps(false));
  const Tensor constants = empty_on(stream, {adam_rules.size() * sizeof(AdamFactors)}, DType::u8);
  constants.assign(std::as_bytes(std::span(adam_rules)), stream);
  optimizer().adam({&r, 1}, stale, {.rules = constants.raw()}, stream);
  kernels::adam(x.on_host(2), adam_rules[2]);
  expect_as_on_host(x);
}

TEST_F(DeviceOptimizer, TheDeviceCanSkipAStep) {
  Piece x = piece(301, 1, DType::f16, DType::f32, 0);
  const UpdateRun r = x.run(2);
  const Tensor skip = to_device(std::vector<std::int32_t>{1}, {1}, stream);
  const StepInputs inputs{.skip = skip.data<std::int32_t>()};
  for (const Rule& rule : rules()) rule.on_device({&r, 1}, inputs, stream);
  expect_as_on_host(x);
  memset_async(skip.raw(), 0, skip.bytes(), stream);
  optimizer().adam({&r, 1}, adam_rules, inputs, stream);
  kernels::adam(x.on_host(2), adam_rules[x.rule]);
  expect_as_on_host(x);
}

TEST_F(DeviceOptimizer, NothingToUpdateIsNoWork) {
  const UpdateRun r = piece(0, 1, DType::f32, DType::f32, 0).run(2);
  optimizer().adam({}, adam_rules, {}, stream);
  optimizer().adam({&r, 1}, adam_rules, {}, stream);
}

TEST_F(DeviceOptimizer, RunsWithoutStateOrConstantsAreRefused) {
  const Piece one = piece(1, 1, DType::f32, DType::f32, 0);
  UpdateRun without_state = one.run(1), without_rule = one.run(2);
  without_rule.rule = 3;
  for (const UpdateRun& r : {without_state, without_rule})
    EXPECT_THROW(optimizer().adam({&r, 1}, adam_rules, {}, stream), Error);
  const UpdateRun r = one.run(2);
  EXPECT_THROW(optimizer().adam({&r, 1}, std::vector<AdamFactors>(9), {}, stream), Error);
}

}  // namespace
}  // namespace rz::test
