// Runs: ci operators

// Updates and sums of squares on a device have the host's bits: many spans in one call, unaligned ones and
// empty ones, gradients and working copies in 16 bits.

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <random>

#include "comm/core/math.h"
#include "sharding/optim/grad_norm.h"
#include "tensor/kernels/device_ops.h"
#include "tensor/kernels/optimizer/optimizer.h"
#include "tests/gpu/on_device.h"
#include "tests/support/reference.h"

namespace rz::test {
namespace {

using kernels::AdagradFactors;
using kernels::AdamFactors;
using kernels::LionFactors;
using kernels::SgdFactors;
using kernels::UpdateRun;
using ops::Squared;
using ops::StepInputs;
using Floats = std::vector<float>;

const ops::DeviceOptimizer& optimizer() { return ops::device_ops().optimizer; }

Floats floats(std::size_t n, unsigned seed, double range = 1) {
  const Values v = random_values(n, seed, range);
  return Floats(v.begin(), v.end());
}

/// EXPECT_EQ of bits: NaN is NaN, and 0 is not -0.
void expect_same_bits(const Tensor& on_device, const Floats& host, const Stream& stream, const char* what) {
  const Tensor got = on_device.on_host(stream);
  for (std::size_t i = 0; i < host.size(); ++i) {
    const float g = got.data<float>()[i];
    if (std::isnan(g) && std::isnan(host[i])) continue;
    ASSERT_EQ(detail::bits_of(g), detail::bits_of(host[i]))
        << what << " " << i << ": " << g << ", on the host " << host[i];
  }
}

template <class T>
std::vector<T> rounded(const Floats& x) {
  std::vector<T> y;
  for (const float v : x) y.push_back(from_f32<T>(v));
  return y;
}

template <class T>
Floats widened(const std::vector<T>& x) {
  Floats y;
  for (const T v : x) y.push_back(to_f32(v));
  return y;
}

/// A span on the host and on the device.
struct Piece {
  Floats p, g, m, v, w;
  Tensor value, gradient, state0, state1, state2, working;
  std::uint32_t rule;

  /// On the host.
  UpdateRun run(int states = 2) {
    return {.value = p.data(),
            .gradient = g.data(),
            .state0 = states > 0 ? m.data() : nullptr,
            .state1 = states > 1 ? v.data() : nullptr,
            .state2 = states > 2 ? w.data() : nullptr,
            .count = p.size()};
  }
};

class DeviceOptimizer : public OnDevice {
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
    if (t == DType::f32) to.assign(std::span<const float>(x), stream);
    if (t == DType::f16) to.assign(std::span<const f16>(rounded<f16>(x)), stream);
    if (t == DType::bf16) to.assign(std::span<const bf16>(rounded<bf16>(x)), stream);
    return to;
  }
  Piece piece(std::size_t n, unsigned seed, DType gradients, DType working, std::size_t shift) const {
    Piece x{floats(n, seed), floats(n, seed + 1, 1e-3), floats(n, seed + 2, 1e-3), floats(n, seed + 3, 1e-6),
            floats(n, seed + 4, 1e-6)};
    for (float& v : x.v) v = std::abs(v);
    if (n > 8) x.g[1] = 0, x.g[2] = 1e-42f, x.g[3] = 1e30f, x.v[4] = 1e-44f, x.p[5] = -0.0f, x.g[6] = NAN;
    if (n > 8) x.g[7] = 0, x.m[7] = -1e-38f,
               x.v[7] = 1e-38f;  // to become subnormal, hence 0
    x.gradient = place(x.g, gradients, shift);
    const Values g = from_device(x.gradient, stream);
    x.g.assign(g.begin(), g.end());
    x.value = place(x.p, DType::f32, shift), x.state0 = place(x.m, DType::f32, shift);
    x.state1 = place(x.v, DType::f32, shift), x.state2 = place(x.w, DType::f32, shift);
    if (working != DType::f32) x.working = allocate(n, working, shift);
    x.rule = seed / 10 % 3;
    return x;
  }
  static UpdateRun run(const Piece& x, int states = 2) {
    return {.value = x.value.data<float>(),
            .gradient = x.gradient.raw(),
            .gradient_dtype = x.gradient.dtype(),
            .working = x.working.raw(),
            .working_dtype = x.working.defined() ? x.working.dtype() : DType::bf16,
            .state0 = states > 0 ? x.state0.data<float>() : nullptr,
            .state1 = states > 1 ? x.state1.data<float>() : nullptr,
            .state2 = states > 2 ? x.state2.data<float>() : nullptr,
            .count = x.p.size(),
            .rule = x.rule};
  }
  void expect_as_on_host(const Piece& x) const {
    expect_same_bits(x.value, x.p, stream, "value");
    expect_same_bits(x.state0, x.m, stream, "state0");
    expect_same_bits(x.state1, x.v, stream, "state1");
    expect_same_bits(x.state2, x.w, stream, "state2");
    if (!x.working.defined()) return;
    const Values got = from_device(x.working, stream);
    const Floats expected =
        x.working.dtype() == DType::f16 ? widened(rounded<f16>(x.p)) : widened(rounded<bf16>(x.p));
    for (std::size_t i = 0; i < got.size(); ++i) {
      if (std::isnan(expected[i])) continue;
      ASSERT_EQ(got[i], expected[i]) << i;
    }
  }
  /// More than one launch holds, of sizes that no pack, block or tile divides.
  std::vector<Piece> pieces() {
    arena_ = empty_on(stream, {1 << 20}, DType::f32), used_ = 0;
    std::vector<Piece> all;
    const DType types[] = {DType::f32, DType::f16, DType::bf16};
    for (unsigned i = 0; i < 130; ++i) {
      const std::size_t n = i == 7 ? 5003 : i == 64 ? 0 : i == 100 ? 2048 : 1 + i * 37 % 150;
      all.push_back(piece(n, 10 * i, types[i % 3], types[i / 3 % 3], i % 5));
    }
    return all;
  }
  Tensor scalar(float x) const { return to_device({static_cast<double>(x)}, {1}, DType::f32, stream); }

 private:
  Tensor arena_;
  mutable std::size_t used_ = 0;
};

/// With and without weight decay, and one with a rate of its own.
std::vector<AdamFactors> adam_rules(int t, bool decoupled = true) {
  kernels::AdamStep s{.lr = 1e-2, .weight_decay = 0.1f, .scale = 0.7f, .decoupled = decoupled};
  s.bias_correction1 = 1 - std::pow(s.beta1, t);
  s.bias_correction2_sqrt = std::sqrt(1 - std::pow(s.beta2, t));
  kernels::AdamStep without = s, slow = s;
  without.weight_decay = 0, slow.lr = 1e-4, slow.beta1 = 0.5;
  return {adam_factors(s), adam_factors(without), adam_factors(slow)};
}
const std::vector<SgdFactors> sgd_rules{
    {0.1f, 0.9f, 1, 0.01f, 0.7f, 0}, {0.1f, 0.9f, 1, 0, 0.7f, 1}, {0.3f, 0.8f, 0.5f, 0.01f, 0.7f, 0}};
const std::vector<LionFactors> lion_rules{{0.9f, 0.9f, 0.1f, 0.99f, 0.01f, 0.1f, 0.7f},
                                          {1, 0.9f, 0.1f, 0.99f, 0.01f, 0.1f, 0.7f},
                                          {1, 0.5f, 0.5f, 0.75f, 0.25f, 0.3f, 0.7f}};
const std::vector<AdagradFactors> adagrad_rules{
    {0.1f, 0.03f, 1e-10f, 0.7f}, {0, 0.03f, 1e-10f, 0.7f}, {0, 0.01f, 1e-3f, 0.7f}};

/// Two updates on the device, and on the host with `scale` times the factor of the constants.
template <class Factors, class Device>
void expect_same_updates(std::vector<Piece>& all, const std::vector<UpdateRun>& runs,
                         const std::vector<Factors>& rules, Device device,
                         void (*host)(const UpdateRun&, const Factors&), const StepInputs& inputs,
                         float scale, const Stream& stream) {
  for (int t = 0; t < 2; ++t) {
    device(runs, rules, inputs, stream);
    for (std::size_t i = 0; i < all.size(); ++i) {
      Factors f = rules[all[i].rule];
      f.scale *= scale;
      host(all[i].run(!runs[i].state0 ? 0 : !runs[i].state1 ? 1 : runs[i].state2 ? 3 : 2), f);
    }
  }
}

TEST_F(DeviceOptimizer, AdamHasTheHostsBits) {
  for (const bool decoupled : {true, false}) {
    std::vector<Piece> all = pieces();
    std::vector<UpdateRun> runs;
    for (const Piece& x : all) runs.push_back(run(x));
    const Tensor scale = scalar(0.3f);
    expect_same_updates(all, runs, adam_rules(1, decoupled), optimizer().adam, kernels::adam,
                        {.grad_scale = scale.data<float>()}, 0.3f, stream);
    for (const Piece& x : all) expect_as_on_host(x);
  }
}

/// In one call with runs that have no maximum.
TEST_F(DeviceOptimizer, AmsgradHasTheHostsBits) {
  std::vector<Piece> all = pieces();
  std::vector<UpdateRun> runs;
  for (std::size_t i = 0; i < all.size(); ++i) {
    Piece& x = all[i];
    if (x.p.size() > 9) x.w[8] = NAN, x.w[9] = 1;
    x.state2.assign(std::span<const float>(x.w), stream);
    runs.push_back(run(x, i % 4 ? 3 : 2));
  }
  expect_same_updates(all, runs, adam_rules(1), optimizer().adam, kernels::adam, {}, 1, stream);
  for (const Piece& x : all) expect_as_on_host(x);
}

TEST_F(DeviceOptimizer, RmspropHasTheHostsBits) {
  for (const int centered : {0, 1})
    for (const bool momentum : {false, true}) {
      std::vector<Piece> all = pieces();
      all.resize(70);
      std::vector<UpdateRun> runs;
      for (Piece& x : all) {
        for (float& m : x.m) m = std::abs(m);
        x.state0.assign(std::span<const float>(x.m), stream);
        runs.push_back(run(x, 1 + centered + momentum));
      }
      const std::vector<kernels::RmspropFactors> rules{
          {0.1f, 0.9f, 0.1f, 0.5f, 0.03f, 1e-8f, -0.7f, centered},
          {0, 0.9f, 0.1f, 0.9f, 0.03f, 1e-8f, 0.7f, centered},
          {0, 0.5f, 0.5f, 0.5f, 0.01f, 1e-3f, 0.7f, centered}};
      expect_same_updates(all, runs, rules, optimizer().rmsprop, kernels::rmsprop, {}, 1, stream);
      for (const Piece& x : all) expect_as_on_host(x);
    }
}

TEST_F(DeviceOptimizer, SgdHasTheHostsBits) {
  for (const bool momentum : {true, false}) {
    std::vector<Piece> all = pieces();
    all.resize(momentum ? 70 : 20);
    std::vector<UpdateRun> runs;
    for (const Piece& x : all) {
      runs.push_back(run(x));
      if (!momentum) runs.back().state0 = nullptr;
    }
    expect_same_updates(all, runs, sgd_rules, optimizer().sgd, kernels::sgd, {}, 1, stream);
    for (const Piece& x : all) expect_as_on_host(x);
  }
}

TEST_F(DeviceOptimizer, LionAndAdagradHaveTheHostsBits) {
  for (const bool lion : {true, false}) {
    std::vector<Piece> all = pieces();
    all.resize(70);
    std::vector<UpdateRun> runs;
    for (Piece& x : all) {
      if (!lion)  // a sum of squares
        for (float& m : x.m) m = std::abs(m);
      x.state0.assign(std::span<const float>(x.m), stream);
      runs.push_back(run(x));
    }
    if (lion)
      expect_same_updates(all, runs, lion_rules, optimizer().lion, kernels::lion, {}, 1, stream);
    else
      expect_same_updates(all, runs, adagrad_rules, optimizer().adagrad, kernels::adagrad, {}, 1, stream);
    for (const Piece& x : all) expect_as_on_host(x);
  }
}

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
    if (x.p.size() > 8) {  // norms that are finite
      x.g[3] = 1, x.g[6] = 1;
      x.gradient = place(x.g, x.gradient.dtype(), i % 5);
      const Values g = from_device(x.gradient, stream);
      x.g.assign(g.begin(), g.end());
    }
    x.rule = i % 2;
    runs.push_back(run(x));
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
      std::vector<double> squares(all[i].p.size() / 32);
      kernels::lamb_moments(all[i].run(), f, squares.data());
      for (std::size_t b = 0; b < squares.size(); ++b) expected[2 * (i / 4) + b % 2].add(squares[b]);
    }
    const Values got = from_device(norms, stream);
    for (std::size_t i = 0; i < 4; ++i) EXPECT_EQ(got[i], expected[i].value()) << i;
    for (std::size_t i = 0; i < all.size(); ++i) {
      kernels::LambFactors f = rules[all[i].rule];
      f.rate *= trust_ratio(f, expected[2 * (i / 4)].value(), expected[2 * (i / 4) + 1].value());
      kernels::lamb(all[i].run(), f);
    }
  }
  for (const Piece& x : all) expect_as_on_host(x);
}

TEST_F(DeviceOptimizer, MuonsDirectionsAndStepsHaveTheHostsBits) {
  const std::vector<kernels::MuonFactors> directions{
      {0.9f, 0.1f, 0.7f, 1}, {0.9f, 0.1f, 0.7f, 0}, {0.5f, 0.5f, 0.7f, 1}};
  const std::vector<kernels::DecayedStepFactors> steps{
      {0.9f, 0.1f, 0.7f}, {1, 0.1f, 0.7f}, {0.5f, 0.3f, 0.7f}};
  std::vector<Piece> all = pieces();
  all.resize(70);
  std::vector<UpdateRun> runs;
  for (const Piece& x : all) runs.push_back(run(x)), runs.back().working = nullptr;
  const Tensor scale = scalar(0.3f);
  optimizer().muon_direction(runs, directions, {.grad_scale = scale.data<float>()}, stream);
  for (Piece& x : all) {
    x.working = {};
    kernels::MuonFactors f = directions[x.rule];
    f.scale *= 0.3f;
    kernels::muon_direction(x.run(), f, x.p.data());
    expect_as_on_host(x);
  }
  runs.clear();
  for (const Piece& x : all) runs.push_back(run(x));
  optimizer().decayed_step(runs, steps, {}, stream);
  for (Piece& x : all) {
    kernels::decayed_step(x.run(), steps[x.rule]);
    expect_as_on_host(x);
  }
}

TEST_F(DeviceOptimizer, ConstantsMayLieInDeviceMemory) {
  Piece x = piece(301, 10, DType::f32, DType::f32, 0);
  x.rule = 2;
  const UpdateRun r = run(x);
  const auto stale = adam_rules(9), now = adam_rules(1);
  const Tensor constants = empty_on(stream, {now.size() * sizeof(AdamFactors)}, DType::u8);
  constants.assign(std::as_bytes(std::span(now)), stream);
  optimizer().adam({&r, 1}, stale, {.rules = constants.raw()}, stream);
  kernels::adam(x.run(), now[2]);
  expect_as_on_host(x);
}

TEST_F(DeviceOptimizer, TheDeviceCanSkipAStep) {
  Piece x = piece(301, 1, DType::f16, DType::f32, 0);
  const UpdateRun r = run(x);
  const Tensor skip = to_device(std::vector<std::int32_t>{1}, {1}, stream);
  const StepInputs inputs{.skip = skip.data<std::int32_t>()};
  optimizer().adam({&r, 1}, adam_rules(1), inputs, stream);
  optimizer().sgd({&r, 1}, sgd_rules, inputs, stream);
  optimizer().lion({&r, 1}, lion_rules, inputs, stream);
  optimizer().adagrad({&r, 1}, adagrad_rules, inputs, stream);
  expect_as_on_host(x);
  memset_async(skip.raw(), 0, skip.bytes(), stream);
  optimizer().adam({&r, 1}, adam_rules(1), inputs, stream);
  kernels::adam(x.run(), adam_rules(1)[x.rule]);
  expect_as_on_host(x);
}

TEST_F(DeviceOptimizer, NothingToUpdateIsNoWork) {
  const Piece none = piece(0, 1, DType::f32, DType::f32, 0);
  const UpdateRun r = run(none);
  optimizer().adam({}, adam_rules(1), {}, stream);
  optimizer().adam({&r, 1}, adam_rules(1), {}, stream);
}

TEST_F(DeviceOptimizer, RunsWithoutStateOrConstantsAreRefused) {
  const Piece one = piece(1, 1, DType::f32, DType::f32, 0);
  UpdateRun without_state = run(one), without_rule = run(one);
  without_state.state1 = nullptr;
  without_rule.rule = 3;
  for (const UpdateRun& r : {without_state, without_rule})
    EXPECT_THROW(optimizer().adam({&r, 1}, adam_rules(1), {}, stream), Error);
  const UpdateRun r = run(one);
  EXPECT_THROW(optimizer().adam({&r, 1}, std::vector<AdamFactors>(9), {}, stream), Error);
}

class DeviceNorm : public OnDevice {
 protected:
  /// Of all tensors, by the device; added to the contents of `sum`.
  void add_on_device(const Tensor& sum, const std::vector<Tensor>& all) const {
    std::vector<Squared> list;
    for (const Tensor& t : all) list.push_back({t.raw(), t.dtype(), t.count()});
    optimizer().add_squares(sum.data<std::int64_t>(), list, stream);
  }
  Tensor zeros() const {
    const Tensor sum = empty_on(stream, {ExactLayout::words}, DType::i64);
    memset_async(sum.raw(), 0, sum.bytes(), stream);
    return sum;
  }
  double value(const Tensor& sum) const {
    const Tensor host = sum.on_host(stream);
    ExactSum total;
    total.add(
        std::span<const std::int64_t, ExactLayout::words>(host.data<std::int64_t>(), ExactLayout::words));
    return total.value();
  }
  double on_host(const std::vector<Tensor>& all) const {
    ExactSum sum;
    for (const Tensor& t : all) {
      const Values v = from_device(t, stream);
      const Floats x(v.begin(), v.end());
      add_squares(sum, x.data(), x.size(), {});
    }
    return sum.value();
  }
};

TEST_F(DeviceNorm, HasTheHostsBits) {
  std::vector<Tensor> all;
  const DType types[] = {DType::f32, DType::f16, DType::bf16};
  for (unsigned i = 0; i < 130; ++i) {
    const std::size_t n = 64 * (i == 3 ? 300 : i == 50 ? 0 : i % 4);
    all.push_back(to_device(random_values(n, i, std::ldexp(1.0, -static_cast<int>(i % 24))), {n},
                            types[i % 3], stream));
  }
  const Tensor sum = zeros();
  add_on_device(sum, all);
  EXPECT_EQ(value(sum), on_host(all));
  add_on_device(sum, all);
  EXPECT_EQ(value(sum), 2 * on_host(all));
  EXPECT_EQ(value(zeros()), 0);
}

TEST_F(DeviceNorm, EveryMagnitudeIsKept) {
  std::mt19937_64 random(7);
  std::uniform_int_distribution<int> exponent(-149, 127);
  Values x = random_values(64 * 400, 5);
  for (std::size_t i = 0; i < x.size(); ++i)  // blocks of one magnitude, and of all
    x[i] = std::ldexp(x[i], i / 64 % 2 ? static_cast<int>(i / 64) % 277 - 149 : exponent(random));
  x[0] = 0x1p-149, x[640] = -0x1.8p-140, x[1280] = std::numeric_limits<float>::max();
  const std::vector<Tensor> all{to_device(x, {x.size()}, DType::f32, stream)};
  const Tensor sum = zeros();
  add_on_device(sum, all);
  EXPECT_EQ(value(sum), on_host(all));
}

TEST_F(DeviceNorm, InfinitiesAndNaNsAreSeen) {
  const double inf = std::numeric_limits<double>::infinity();
  for (const DType t : {DType::f32, DType::f16, DType::bf16}) {
    Values x = random_values(640, 5);
    x[100] = -inf;
    Tensor sum = zeros();
    add_on_device(sum, {to_device(x, {640}, t, stream)});
    EXPECT_EQ(value(sum), inf);
    x[639] = NAN;
    sum = zeros();
    add_on_device(sum, {to_device(x, {640}, t, stream)});
    EXPECT_TRUE(std::isnan(value(sum)));
  }
}

TEST_F(DeviceNorm, SumsAreAddedUpAsIntegers) {
  const Tensor a = to_device(random_values(64 * 50, 1), {64 * 50}, DType::f32, stream),
               b = to_device(random_values(64 * 30, 2, 1e-3), {64 * 30}, DType::bf16, stream);
  const Tensor sums[] = {zeros(), zeros()};
  add_on_device(sums[0], {a}), add_on_device(sums[1], {b});
  const Tensor first = sums[0].on_host(stream), second = sums[1].on_host(stream);
  std::array<std::int64_t, ExactLayout::words> words;
  for (std::size_t i = 0; i < words.size(); ++i)
    words[i] = first.data<std::int64_t>()[i] + second.data<std::int64_t>()[i];
  ExactSum total;
  total.add(std::span<const std::int64_t, ExactLayout::words>(words));
  EXPECT_EQ(total.value(), on_host({a, b}));
}

TEST_F(DeviceNorm, BlocksAreWhole) {
  const Tensor a = to_device(random_values(65, 1), {65}, DType::f32, stream);
  EXPECT_THROW(add_on_device(zeros(), {a}), Error);
}

}  // namespace
}  // namespace rz::test
