// Runs: ci

// The host's losses against definitions in double, by the vectors of every target of this CPU: short and long
// rows, extreme logits, 1 and 2 threads. The errors of f32 are bounded from the arithmetic: 2^-24 per
// rounding.
#include <gtest/gtest.h>
#include <hwy/targets.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <string>
#include <tuple>
#include <vector>

#include "comm/core/error.h"
#include "comm/device/stream.h"
#include "tensor/loss_ops.h"
#include "tests/support/reference.h"

namespace rz::test {
namespace {

using ops::ElementLoss;
using ops::LabelLoss;
using ops::SoftLoss;

constexpr double inf = std::numeric_limits<double>::infinity(), u = 0x1p-24;

Tensor in_dtype(const Values& values, const Shape& shape, DType dtype) {
  const Tensor f32 = tensor_of(values, shape), t = Tensor::empty(shape, dtype);
  ops::copy(t, f32, Stream());
  return t;
}
Values wide(const Tensor& t) {
  const Tensor f32 = Tensor::empty(t.shape());
  ops::copy(f32, t, Stream());
  return values_of(f32);
}
double rounding(DType dtype) { return dtype == DType::bf16 ? 0x1p-8 : dtype == DType::f16 ? 0x1p-11 : u; }

/// log Σ e^x of a row.
double log_sum(const double* x, std::size_t n) {
  const double shift = *std::max_element(x, x + n);
  double sum = 0;
  for (std::size_t i = 0; i < n; ++i) sum += std::exp(x[i] - shift);
  return shift + std::log(sum);
}

struct Outputs {
  explicit Outputs(std::size_t rows)
      : losses(Tensor::empty({rows})), log_sum(Tensor::empty({rows})), statistics(Tensor::empty({rows, 2})) {}
  Tensor loss = Tensor::empty({}), sums = Tensor::empty({2}, DType::f64), losses, log_sum, statistics;
};

std::vector<std::int64_t> targets_of_this_cpu() {
  std::vector<std::int64_t> all;
  for (std::int64_t rest = hwy::SupportedTargets() & HWY_TARGETS; rest != 0; rest &= rest - 1)
    all.push_back(rest & -rest);
  return all;
}
void use_targets(std::int64_t targets) {
  hwy::SetSupportedTargetsForTest(targets);
  hwy::GetChosenTarget().Update(hwy::SupportedTargets());
}

struct LossExtremes : testing::TestWithParam<std::int64_t> {
  void SetUp() override { use_targets(GetParam()); }
  void TearDown() override { use_targets(0); }
};
INSTANTIATE_TEST_SUITE_P(Targets, LossExtremes, testing::ValuesIn(targets_of_this_cpu()),
                         [](const auto& info) { return std::string(hwy::TargetName(info.param)); });

struct LongRows : testing::TestWithParam<std::tuple<DType, std::int64_t>> {
  void SetUp() override { use_targets(std::get<1>(GetParam())); }
  void TearDown() override { use_targets(0); }
  const DType dtype = std::get<0>(GetParam());
  const Stream two = Stream::host(2);
  Values random(std::size_t n, unsigned seed, double range) const {
    return wide(in_dtype(random_values(n, seed, range), {n}, dtype));
  }
  /// `derived`: a bound of the error of each gradient before it is stored, relative to the largest number in
  /// it.
  void expect_gradient(const Tensor& got, const Values& expected, const Values& largest,
                       double derived) const {
    const Values values = wide(got);
    ASSERT_EQ(values.size(), expected.size());
    const double smallest = dtype == DType::f16 ? 0x1p-24 : 0;  // spacing of subnormals
    for (std::size_t i = 0; i < values.size(); ++i)
      ASSERT_NEAR(values[i], expected[i],
                  rounding(dtype) * std::abs(expected[i]) + derived * largest[i] + smallest)
          << i;
  }
};

INSTANTIATE_TEST_SUITE_P(Types, LongRows,
                         testing::Combine(testing::Values(DType::f32, DType::f16, DType::bf16),
                                          testing::ValuesIn(targets_of_this_cpu())),
                         [](const auto& info) {
                           return concat(name(std::get<0>(info.param)), "_",
                                         hwy::TargetName(std::get<1>(info.param)));
                         });

bool same_bits(const Tensor& a, const Tensor& b) { return std::memcmp(a.raw(), b.raw(), a.bytes()) == 0; }

/// A log-sum-exp of n logits in [-r, r] has exponents with 2 roundings of at most 2r, exponentials with 2,
/// and sums of at most 1024 / 2 addends in f32, of one lane; as f32 it is rounded once more.
double log_sum_error(double r, std::size_t n) {
  const double addends = std::min(512.0, static_cast<double>(n));
  return u * (4 * r + 4 + addends + r + std::log(static_cast<double>(n)));
}

TEST_P(LongRows, Labels) {
  for (const std::size_t v : {std::size_t{1}, std::size_t{3}, std::size_t{50257}})
    for (const float smoothing : {0.0f, 0.1f}) {
      constexpr std::size_t n = 5;
      const LabelLoss how{.label_smoothing = smoothing};
      const Values x = random(n * v, 1, 8);
      const auto last = static_cast<std::int32_t>(v) - 1;
      const std::vector<std::int32_t> ids{0, -100, last, last / 2, last};
      const Tensor logits = in_dtype(x, {n, v}, dtype), targets = tokens_of(ids, {n});
      Outputs one(n), other(n);
      ops::label_loss(one.loss, one.sums, one.losses, one.log_sum, logits, targets, how, Stream());
      ops::label_loss(other.loss, other.sums, other.losses, other.log_sum, logits, targets, how, two);
      EXPECT_TRUE(same_bits(one.sums, other.sums) && same_bits(one.losses, other.losses) &&
                  same_bits(one.log_sum, other.log_sum));
      const double s = static_cast<double>(smoothing), share = s / static_cast<double>(v);
      const double error = log_sum_error(8, v);
      Values gradient(n * v, 0.0), size(n * v, 0.0);
      double total = 0;
      for (std::size_t r = 0; r < n; ++r) {
        if (ids[r] == -100) continue;
        const double l = log_sum(&x[r * v], v);
        double expected = l - (1 - s) * x[r * v + static_cast<std::size_t>(ids[r])];
        for (std::size_t i = 0; i < v; ++i) {
          expected -= share * x[r * v + i];
          const double p = std::exp(x[r * v + i] - l),
                       q = share + (i == static_cast<std::size_t>(ids[r]) ? 1 - s : 0);
          gradient[r * v + i] = 0.5 * (p - q), size[r * v + i] = std::max(p, q);
        }
        total += expected;
        EXPECT_NEAR(one.losses.data<float>()[r], expected, error + u * expected) << v;
      }
      EXPECT_NEAR(one.sums.data<double>()[0], total, n * error);
      EXPECT_EQ(one.sums.data<double>()[1], 4);
      const Tensor d = Tensor::empty({n, v}, dtype), e = Tensor::empty({n, v}, dtype),
                   half = tensor_of({0.5}, {});
      ops::label_loss_backward(d, logits, one.log_sum, targets, half, how, Stream());
      ops::label_loss_backward(e, logits, one.log_sum, targets, half, how, two);
      EXPECT_TRUE(same_bits(d, e));
      expect_gradient(d, gradient, size,
                      error + 8 * u);  // p has the error of its exponent, and few roundings
      ops::label_loss_backward(logits, logits, one.log_sum, targets, half, how, two);
      EXPECT_TRUE(same_bits(logits, d)) << "in place";
    }
}

TEST_P(LongRows, SoftTargets) {
  for (const std::size_t v : {std::size_t{1}, std::size_t{3}, std::size_t{50257}})
    for (const auto kind : {SoftLoss::probabilities, SoftLoss::logits})
      for (const bool divergence : {true, false}) {
        constexpr std::size_t n = 3;
        const SoftLoss how{kind, divergence, 2, 4};
        const Values x = random(n * v, 1, 8);
        Values y = random(n * v, 2, 8);
        if (kind == SoftLoss::probabilities) y = wide(in_dtype(reference::softmax(y, v), {n * v}, dtype));
        const Tensor logits = in_dtype(x, {n, v}, dtype), targets = in_dtype(y, {n, v}, dtype);
        Outputs one(n), other(n);
        ops::soft_loss(one.loss, one.sums, one.losses, one.statistics, logits, targets, how, Stream());
        ops::soft_loss(other.loss, other.sums, other.losses, other.statistics, logits, targets, how, two);
        EXPECT_TRUE(same_bits(one.sums, other.sums) && same_bits(one.losses, other.losses) &&
                    same_bits(one.statistics, other.statistics));
        const double error = log_sum_error(4, v);
        Values gradient(n * v), largest(n * v);
        for (std::size_t r = 0; r < n; ++r) {
          Values p(v), q(v);
          for (std::size_t i = 0; i < v; ++i) p[i] = x[r * v + i] / 2, q[i] = y[r * v + i] / 2;
          const double of_p = log_sum(p.data(), v), of_q = log_sum(q.data(), v);
          double expected = 0, mass = 0, size = 0;
          for (std::size_t i = 0; i < v; ++i) {
            const double share = kind == SoftLoss::logits ? std::exp(q[i] - of_q) : y[r * v + i];
            const double term = (divergence ? std::log(share) : 0) - p[i] + of_p;
            if (share > 0) expected += 4 * share * term;
            if (share > 0) size += 4 * share * std::abs(term);
            mass += q[i] = share;
          }
          for (std::size_t i = 0; i < v; ++i) {
            const double here = mass * std::exp(p[i] - of_p);
            gradient[r * v + i] = 0.5 * 4 / 2 * (here - q[i]), largest[r * v + i] = std::max(here, q[i]);
          }
          // log sums as above; weights have exponents with 2 roundings of at most 8, and 2 of their own
          EXPECT_NEAR(one.losses.data<float>()[r], expected,
                      8 * error + 20 * u * size + u * std::abs(expected));
        }
        const Tensor d = Tensor::empty({n, v}, dtype), e = Tensor::empty({n, v}, dtype),
                     half = tensor_of({0.5}, {});
        ops::soft_loss_backward(d, logits, targets, one.statistics, half, how, Stream());
        ops::soft_loss_backward(e, logits, targets, one.statistics, half, how, two);
        EXPECT_TRUE(same_bits(d, e));
        expect_gradient(d, gradient, largest, 2 * error + 8 * u);
      }
}

TEST_P(LongRows, Elements) {
  for (const ElementLoss how : {ElementLoss::squared_error, ElementLoss::binary_cross_entropy})
    for (const std::size_t n : {std::size_t{1}, std::size_t{3}, std::size_t{50257}}) {
      const Values x = random(n, 1, 9);
      Values y = random(n, 2, 1);
      for (double& e : y) e = std::abs(e);
      const Tensor a = in_dtype(x, {n}, dtype), b = in_dtype(y, {n}, dtype);
      Outputs one(1), other(1);
      ops::element_loss(one.loss, one.sums, a, b, how, Stream());
      ops::element_loss(other.loss, other.sums, a, b, how, two);
      EXPECT_TRUE(same_bits(one.sums, other.sums));
      double expected = 0;
      Values gradient(n), largest(n);
      for (std::size_t i = 0; i < n; ++i) {
        const double p = 1 / (1 + std::exp(-x[i]));
        const bool squares = how == ElementLoss::squared_error;
        expected += squares ? std::pow(x[i] - y[i], 2)
                            : std::max(x[i], 0.0) - x[i] * y[i] + std::log1p(std::exp(-std::abs(x[i])));
        gradient[i] = 0.5 * (squares ? 2 * (x[i] - y[i]) : p - y[i]);
        largest[i] = squares ? std::abs(x[i]) + y[i] : std::max(p, y[i]);
      }
      // squares are sums in double; the logarithm is f32, with a few roundings
      EXPECT_NEAR(one.sums.data<double>()[0], expected,
                  (how == ElementLoss::squared_error ? 1e-13 : 16 * u) * expected);
      const Tensor d = Tensor::empty({n}, dtype), e = Tensor::empty({n}, dtype), half = tensor_of({0.5}, {});
      ops::element_loss_backward(d, half, a, b, how, ops::Into::overwrite, Stream());
      ops::element_loss_backward(e, half, a, b, how, ops::Into::overwrite, two);
      EXPECT_TRUE(same_bits(d, e));
      expect_gradient(d, gradient, largest, 20 * u);
    }
}

// ---- extremes

TEST_P(LossExtremes, LogitsOfMinusInfinityHaveNoProbability) {
  const Values x{-inf, 1,    -inf, 2,    -inf, -inf, 0,    -inf, -inf,
                 -inf, -inf, -inf, -inf, -inf, -inf, -inf, -inf, 3};
  const std::size_t v = x.size();
  const Tensor logits = tensor_of(x, {1, v}), targets = tokens_of({3}, {1});
  Outputs out(1);
  ops::label_loss(out.loss, out.sums, out.losses, out.log_sum, logits, targets, {}, Stream());
  const double l = std::log(std::exp(1.0) + std::exp(2.0) + 1 + std::exp(3.0));
  EXPECT_NEAR(*out.loss.data<float>(), l - 2, 1e-6);
  const Tensor d = Tensor::empty({1, v});
  ops::label_loss_backward(d, logits, out.log_sum, targets, tensor_of({1}, {}), {}, Stream());
  EXPECT_EQ(d.data<float>()[0], 0);
  EXPECT_NEAR(d.data<float>()[3], std::exp(2 - l) - 1, 1e-6);

  const SoftLoss how{.targets = SoftLoss::logits};
  ops::soft_loss(out.loss, out.sums, out.losses, out.statistics, logits, logits, how, Stream());
  EXPECT_NEAR(*out.loss.data<float>(), 0, 1e-6);  // 0 log 0 is 0
  ops::soft_loss_backward(d, logits, logits, out.statistics, tensor_of({1}, {}), how, Stream());
  for (std::size_t i = 0; i < v; ++i) EXPECT_NEAR(d.data<float>()[i], 0, 1e-6);
  ops::soft_loss(out.loss, out.sums, out.losses, out.statistics, logits, tensor_of(Values(v, 0), {1, v}), how,
                 Stream());
  EXPECT_EQ(*out.loss.data<float>(), inf);  // the teacher gives weight to what is impossible
}

TEST_P(LossExtremes, LargeLogits) {
  const Values x{1e4, 1e4 - 1, -1e4, 0};
  const Tensor logits = tensor_of(x, {1, 4});
  const double l = 1e4 + std::log1p(std::exp(-1.0));
  Outputs out(1);
  ops::label_loss(out.loss, out.sums, out.losses, out.log_sum, logits, tokens_of({1}, {1}), {}, Stream());
  EXPECT_NEAR(out.sums.data<double>()[0], l - (1e4 - 1), 1e-6);
  const SoftLoss how{.targets = SoftLoss::logits};
  const Tensor teacher = tensor_of({1e4, -1e4, -1e4, 1e4}, {1, 4});
  ops::soft_loss(out.loss, out.sums, out.losses, out.statistics, logits, teacher, how, Stream());
  EXPECT_NEAR(out.sums.data<double>()[0], l - 0.5 * (1e4 + 0) - std::log(2.0), 1e-2 * u * 1e8);
}

TEST_P(LossExtremes, ProbabilitiesOfEverySize) {
  const Values q{0, 0x1p-149, 0x1p-127, 1e-30, 0.25, 0.70710678, 0.7071068, 1, 3};  // they need not sum to 1
  const std::size_t v = q.size();
  const Tensor targets = tensor_of(q, {1, v}), logits = tensor_of(Values(v, 0), {1, v});
  Outputs out(1);
  ops::soft_loss(out.loss, out.sums, out.losses, out.statistics, logits, targets, {}, Stream());
  double expected = 0;
  for (const double e : values_of(targets))
    if (e > 0) expected += e * (std::log(e) + std::log(static_cast<double>(v)));
  EXPECT_NEAR(out.sums.data<double>()[0], expected, 8 * u * expected);
  const Tensor wrong = tensor_of({-1}, {1, 1});
  ops::soft_loss(out.loss, out.sums, out.losses, out.statistics, tensor_of({0}, {1, 1}), wrong, {}, Stream());
  EXPECT_TRUE(std::isnan(*out.loss.data<float>()));
}

TEST_P(LossExtremes, NanIsVisible) {
  Values x(40, 1);
  x[37] = NAN;
  const Tensor logits = tensor_of(x, {1, 40}), y = tensor_of(Values(40, 0.5), {1, 40});
  Outputs out(1);
  ops::label_loss(out.loss, out.sums, out.losses, out.log_sum, logits, tokens_of({0}, {1}), {}, Stream());
  EXPECT_TRUE(std::isnan(*out.loss.data<float>()));
  ops::soft_loss(out.loss, out.sums, out.losses, out.statistics, logits, y, {}, Stream());
  EXPECT_TRUE(std::isnan(*out.loss.data<float>()));
  for (const ElementLoss how : {ElementLoss::squared_error, ElementLoss::binary_cross_entropy}) {
    ops::element_loss(out.loss, out.sums, logits, y, how, Stream());
    EXPECT_TRUE(std::isnan(*out.loss.data<float>()));
  }
}

}  // namespace
}  // namespace rz::test
