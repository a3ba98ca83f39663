// Runs: ci host operators
// Not under sanitizers: Types/.*/f16$

// The operators of tensor/element_ops.h, in f32, f16 and bf16, on the host and on a device: against double,
// at sizes that no vector, pack or block divides, and for every kind of broadcast.

#include "tensor/element_ops.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "comm/core/math.h"
#include "tensor/ops.h"
#include "tests/gpu/on_device.h"
#include "tests/support/error_of.h"
#include "tests/support/reference.h"

namespace rz::test {
namespace {

using ops::Binary;
using ops::Into;
using ops::Unary;
using ops::UnaryFunction;

constexpr double inf = std::numeric_limits<double>::infinity();

/// A function of one number, its inverse, and numbers where both are defined.
struct UnaryCase {
  UnaryFunction f;
  double (*value)(double);
  double (*inverse)(double);
  double low, high;
  double ulps = 4;
};
const UnaryCase unary_cases[] = {
    {Unary::exp, [](double x) { return std::exp(x); }, [](double y) { return std::log(y); }, -5, 5},
    {Unary::log, [](double x) { return std::log(x); }, nullptr, 0.01, 30},
    {Unary::sqrt, [](double x) { return std::sqrt(x); }, [](double y) { return y * y; }, 0.01, 30},
    {Unary::rsqrt, [](double x) { return 1 / std::sqrt(x); }, [](double y) { return 1 / (y * y); }, 0.05, 30},
    {Unary::reciprocal, [](double x) { return 1 / x; }, [](double y) { return 1 / y; }, 0.05, 30},
    {Unary::abs, [](double x) { return std::abs(x); }, nullptr, -3, 3},
    {Unary::relu, [](double x) { return x > 0 ? x : 0; }, nullptr, -3, 3},
    {Unary::sigmoid, [](double x) { return 1 / (1 + std::exp(-x)); },
     [](double y) { return std::log(y / (1 - y)); }, -3, 3},
    {Unary::silu, [](double x) { return x / (1 + std::exp(-x)); }, nullptr, -9, 9},
    {Unary::tanh, [](double x) { return std::tanh(x); }, [](double y) { return std::atanh(y); }, -2, 2},
    {Unary::sin, [](double x) { return std::sin(x); }, nullptr, -20, 20},
    {Unary::cos, [](double x) { return std::cos(x); }, nullptr, -20, 20},
    {Unary::softplus, [](double x) { return std::log1p(std::exp(x)); }, nullptr, -40, 19.9},
    // erfc of CUDA is within 4 ulp
    {Unary::gelu_erf, [](double x) { return x / 2 * std::erfc(-x / std::sqrt(2)); }, nullptr, -6, 6, 8},
    {{Unary::elu, 1.5f}, [](double x) { return x > 0 ? x : 1.5 * std::expm1(x); }, nullptr, -9, 3},
    {{Unary::leaky_relu, 0.25f}, [](double x) { return x > 0 ? x : x / 4; }, nullptr, -9, 9},
    {{Unary::pow, 2.5f}, [](double x) { return std::pow(x, 2.5); }, nullptr, 0.05, 30},
    {{Unary::pow, -1.5f}, [](double x) { return std::pow(x, -1.5); }, nullptr, 0.05, 30},
    {{Unary::pow, 5}, [](double x) { return std::pow(x, 5); }, nullptr, -6, 6},
    {{Unary::pow, 3}, [](double x) { return x * x * x; }, nullptr, -9, 9},
    {{Unary::pow, 2}, [](double x) { return x * x; }, nullptr, -9, 9},
    {{Unary::pow, 1}, [](double x) { return x; }, nullptr, -9, 9},
    {{Unary::pow, 0.5f}, [](double x) { return std::sqrt(x); }, nullptr, 0.05, 30},
    {{Unary::pow, -0.5f}, [](double x) { return 1 / std::sqrt(x); }, nullptr, 0.05, 30},
    {{Unary::pow, -1}, [](double x) { return 1 / x; }, nullptr, 0.05, 30},
};

double apply(Binary op, double x, double y) {
  switch (op) {
    case Binary::add:
      return x + y;
    case Binary::sub:
      return x - y;
    case Binary::mul:
      return x * y;
    case Binary::div:
      return x / y;
    case Binary::minimum:
      return std::min(x, y);
    case Binary::maximum:
      return std::max(x, y);
    case Binary::pow:
      return std::pow(x, y);
    case Binary::eq:
      return x == y;
    case Binary::ne:
      return x != y;
    case Binary::lt:
      return x < y;
    case Binary::le:
      return x <= y;
    case Binary::gt:
      return x > y;
    case Binary::ge:
      return x >= y;
  }
  return 0;
}
constexpr Binary arithmetic[] = {Binary::add, Binary::sub,     Binary::mul,
                                 Binary::div, Binary::minimum, Binary::maximum};
constexpr Binary comparisons[] = {Binary::eq, Binary::ne, Binary::lt, Binary::le, Binary::gt, Binary::ge};

std::vector<std::size_t> extents_of(const Shape& s) {
  std::vector<std::size_t> all(4, 1);
  for (int d = 1; d <= s.dims(); ++d) all[static_cast<std::size_t>(4 - d)] = s[-d];
  return all;
}

/// For each element of `to`, the element of `from` that is broadcast there.
std::vector<std::size_t> sources(const Shape& from, const Shape& to) {
  const auto f = extents_of(from), t = extents_of(to);
  std::vector<std::size_t> all;
  for (std::size_t a = 0; a < t[0]; ++a)
    for (std::size_t b = 0; b < t[1]; ++b)
      for (std::size_t c = 0; c < t[2]; ++c)
        for (std::size_t d = 0; d < t[3]; ++d)
          all.push_back(((a % f[0] * f[1] + b % f[1]) * f[2] + c % f[2]) * f[3] + d % f[3]);
  return all;
}

/// Shapes that are broadcast to the last: each pattern of repeated extents, and rows longer than a tile.
struct Broadcast {
  Shape a, b, out;
};
const Broadcast broadcasts[] = {
    {{}, {}, {}},
    {{5}, {}, {5}},
    {{}, {3, 4}, {3, 4}},
    {{1}, {1, 1}, {1, 1}},
    {{3, 1}, {1, 5}, {3, 5}},
    {{4, 7}, {7}, {4, 7}},
    {{4, 7}, {4, 1}, {4, 7}},
    {{2, 1, 3, 1}, {4, 1, 5}, {2, 4, 3, 5}},
    {{2, 3, 4, 5}, {3, 1, 5}, {2, 3, 4, 5}},
    {{1, 3, 1, 5}, {2, 1, 4, 1}, {2, 3, 4, 5}},
    {{2, 3, 1, 1}, {1, 1, 4, 5}, {2, 3, 4, 5}},
    {{0, 3}, {1, 3}, {0, 3}},
    {{5, 0}, {5, 1}, {5, 0}},
    {{37, 131}, {131}, {37, 131}},
    {{3, 2100}, {3, 1}, {3, 2100}},
    {{3, 1}, {3, 2100}, {3, 2100}},
    {{2, 1, 2100}, {2, 1}, {2, 2, 2100}},
};

class ElementOps : public OnDevice, public testing::WithParamInterface<DType> {
 protected:
  const DType dtype = GetParam();
  const double rounding = dtype == DType::f16 ? 0x1p-11 : dtype == DType::bf16 ? 0x1p-8 : 0;
  const double smallest = dtype == DType::f16 ? 0x1p-25 : dtype == DType::bf16 ? 0 : 0x1p-149;

  /// Not aligned to more than an element if `shift` is odd.
  Tensor place(const Values& values, const Shape& shape, std::size_t shift = 0) const {
    Values shifted(shift, NAN);
    shifted.insert(shifted.end(), values.begin(), values.end());
    return to_device(shifted, {shifted.size()}, dtype, stream).view(shift, shape);
  }
  Tensor empty(const Shape& shape) const { return empty_on(stream, shape, dtype); }
  Values get(const Tensor& t) const { return from_device(t, stream); }
  Values random(std::size_t n, unsigned seed, double low, double high) const {
    Values values = random_values(n, seed, 1);
    for (double& v : values) v = low + (v + 1) / 2 * (high - low);
    return get(place(values, {n}));
  }
  /// The operators compute in f32 and round the result once more.
  Values rounded(Values values) const {
    for (double& v : values) v = static_cast<float>(v);
    return get(place(values, {values.size()}));
  }

  /// Every number of the dtype, NaN among them, if it has 16 bits.
  Values all_of_16_bits() const {
    Values all;
    for (std::uint32_t bits = 0; dtype != DType::f32 && bits < 1u << 16; ++bits) {
      const auto word = static_cast<std::uint16_t>(bits);
      all.push_back(double{dtype == DType::f16 ? to_f32(f16{word}) : to_f32(bf16{word})});
    }
    return all;
  }

  /// `ulps` of f32 beside the rounding to the dtype.
  void expect_near(const Values& got, const Values& expected, double ulps, const char* what) const {
    ASSERT_EQ(got.size(), expected.size()) << what;
    for (std::size_t i = 0; i < got.size(); ++i)
      ASSERT_NEAR(got[i], expected[i], (ulps * 0x1p-23 + rounding) * std::abs(expected[i]) + smallest)
          << what << " of " << name(dtype) << ", element " << i;
  }
};
INSTANTIATE_TEST_SUITE_P(Types, ElementOps, testing::Values(DType::f32, DType::f16, DType::bf16),
                         [](const auto& info) { return std::string(name(info.param)); });

// Derived bounds: e^x, tanh and log are within 2 ulp in f32, a product, quotient or sum adds half an ulp
// each.
TEST_P(ElementOps, UnaryValues) {
  for (const UnaryCase& c : unary_cases)
    for (const std::size_t n : {0, 1, 13, 2051})
      for (const std::size_t shift : {std::size_t{0}, std::size_t{1}}) {
        const Values x = random(n, 3, c.low, c.high);
        const Tensor in = place(x, {n}, shift), out = empty({n});
        Values expected;
        for (const double v : x) expected.push_back(c.value(v));
        ops::unary(out, in, c.f, stream);
        expect_near(get(out), expected, c.ulps, name_of(c.f.op));
        ops::unary(in, in, c.f, stream);  // in place
        EXPECT_EQ(get(in), get(out)) << name_of(c.f.op);
      }
}

/// The host computes these from the bits.
TEST_P(ElementOps, AbsAndReluOfAllNumbers) {
  const Values x = all_of_16_bits();
  if (x.empty()) GTEST_SKIP() << "too many";
  const Tensor in = place(x, {x.size()}), out = empty({x.size()});
  for (const Unary op : {Unary::abs, Unary::relu}) {
    ops::unary(out, in, op, stream);
    const Values got = get(out);
    for (std::size_t i = 0; i < x.size(); ++i) {
      const double expected = op == Unary::abs ? std::abs(x[i]) : x[i] < 0 ? 0 : x[i];
      if (std::isnan(x[i])) {
        ASSERT_TRUE(std::isnan(got[i])) << name_of(op) << ' ' << i;
      } else {
        ASSERT_EQ(got[i], expected) << name_of(op) << ' ' << i;
        ASSERT_EQ(std::signbit(got[i]), std::signbit(expected)) << name_of(op) << ' ' << i;
      }
    }
  }
}

TEST_P(ElementOps, UnaryGradients) {
  for (const UnaryCase& c : unary_cases)
    for (const std::size_t n : {1, 13, 1027}) {
      const Values x = random(n, 3, c.low, c.high), dy = random(n, 4, -1, 1);
      const Tensor in = place(x, {n}), d_out = place(dy, {n}), out = empty({n});
      ops::unary(out, in, c.f, stream);
      // The gradient at the number whose value is the output, which was rounded.
      const bool of_output = ops::saved_by(c.f.op) == ops::Saved::output;
      const Values y = get(out);
      Values expected;
      for (std::size_t i = 0; i < n; ++i) {
        const double at = of_output ? c.inverse(y[i]) : x[i], step = 1e-5 * std::max(std::abs(at), 0.1);
        expected.push_back((c.value(at + step) - c.value(at - step)) / (2 * step) * dy[i]);
      }
      const Tensor d_in = place(Values(n, NAN), {n}), added = place(Values(n, 2), {n});
      ops::unary_backward(d_in, d_out, of_output ? out : in, c.f, Into::overwrite, stream);
      const Values got = get(d_in);
      for (std::size_t i = 0; i < n; ++i)
        ASSERT_NEAR(got[i], expected[i], (2e-6 + rounding) * std::abs(expected[i]) + 1e-7 + smallest)
            << name_of(c.f.op) << " at " << x[i];
      ops::unary_backward(added, d_out, of_output ? out : in, c.f, Into::accumulate, stream);
      const Values sums = get(added);
      for (std::size_t i = 0; i < n; ++i)
        ASSERT_NEAR(sums[i], 2 + expected[i], (2e-6 + rounding) * (2 + std::abs(expected[i])))
            << name_of(c.f.op);
    }
}

TEST_P(ElementOps, UnarySpecialValues) {
  const double nan = std::numeric_limits<double>::quiet_NaN();
  struct Case {
    Unary op;
    Values expected;  // of -∞, -1, -0, 0, 1, ∞, NaN; NaN where 99
  };
  for (const Case& c :
       {Case{Unary::exp, {0, 99, 1, 1, 99, inf, 99}}, Case{Unary::log, {99, 99, -inf, -inf, 0, inf, 99}},
        Case{Unary::sqrt, {99, 99, -0.0, 0, 1, inf, 99}}, Case{Unary::rsqrt, {99, 99, -inf, inf, 1, 0, 99}},
        Case{Unary::reciprocal, {-0.0, -1, -inf, inf, 1, 0, 99}},
        Case{Unary::abs, {inf, 1, 0, 0, 1, inf, 99}}, Case{Unary::relu, {0, 0, -0.0, 0, 1, inf, 99}},
        Case{Unary::sigmoid, {0, 99, 0.5, 0.5, 99, 1, 99}}, Case{Unary::silu, {99, 99, -0.0, 0, 99, inf, 99}},
        Case{Unary::tanh, {-1, 99, -0.0, 0, 99, 1, 99}}}) {
    const Tensor in = place({-inf, -1, -0.0, 0, 1, inf, nan}, {7}), out = empty({7});
    ops::unary(out, in, c.op, stream);
    const Values got = get(out);
    for (std::size_t i = 0; i < 7; ++i) {
      if (c.expected[i] != 99) {
        EXPECT_EQ(got[i], c.expected[i]) << name_of(c.op) << " " << i;
        EXPECT_EQ(std::signbit(got[i]), std::signbit(c.expected[i])) << name_of(c.op) << " " << i;
      }
    }
    EXPECT_TRUE(std::isnan(got[6])) << name_of(c.op);
    if (c.op == Unary::log || c.op == Unary::sqrt || c.op == Unary::rsqrt) {
      EXPECT_TRUE(std::isnan(got[0]) && std::isnan(got[1])) << name_of(c.op);
    }
  }
}

/// Of PyTorch 1.13, at -∞, -1, -0, 0, 1, ∞, NaN: values, and gradients where that of the result is 3.
struct SpecialCase {
  UnaryFunction f;
  Values values, gradients;
};
std::vector<SpecialCase> special_cases() {
  const double nan = NAN;
  return {
      {Unary::sin,
       {nan, -0.84147098, -0.0, 0, 0.84147098, nan, nan},
       {nan, 1.6209069, 3, 3, 1.6209069, nan, nan}},
      {Unary::cos,
       {nan, 0.54030231, 1, 1, 0.54030231, nan, nan},
       {nan, 2.5244130, 0, 0, -2.5244130, nan, nan}},
      {Unary::softplus,
       {0, 0.31326169, 0.69314718, 0.69314718, 1.3132617, inf, nan},
       {0, 0.80682426, 1.5, 1.5, 2.1931757, 3, nan}},
      {Unary::gelu_erf,
       {nan, -0.15865525, -0.0, 0, 0.84134475, inf, nan},
       {nan, -0.24994637, 1.5, 1.5, 3.2499464, nan, nan}},
      {{Unary::elu, 2}, {-2, -1.2642411, -0.0, 0, 1, inf, nan}, {0, 2.2072766, 6, 6, 3, 3, 3}},
      {{Unary::leaky_relu, 0.25f}, {-inf, -0.25, -0.0, 0, 1, inf, nan}, {0.75, 0.75, 0.75, 0.75, 3, 3, 0.75}},
      {{Unary::leaky_relu, 0}, {nan, -0.0, -0.0, 0, 1, inf, nan}, {0, 0, 0, 0, 3, 3, 0}},
      {{Unary::pow, 0}, {1, 1, 1, 1, 1, 1, 1}, {0, 0, 0, 0, 0, 0, 0}},
      {{Unary::pow, 1}, {-inf, -1, -0.0, 0, 1, inf, nan}, {3, 3, 3, 3, 3, 3, 3}},
      {{Unary::pow, 2}, {inf, 1, 0, 0, 1, inf, nan}, {-inf, -6, 0, 0, 6, inf, nan}},
      {{Unary::pow, 3}, {-inf, -1, -0.0, 0, 1, inf, nan}, {inf, 9, 0, 0, 9, inf, nan}},
      {{Unary::pow, 4}, {inf, 1, 0, 0, 1, inf, nan}, {-inf, -12, 0, 0, 12, inf, nan}},
      {{Unary::pow, -1}, {-0.0, -1, -inf, inf, 1, 0, nan}, {0, -3, -inf, -inf, -3, 0, nan}},
      {{Unary::pow, -2}, {0, 1, inf, inf, 1, 0, nan}, {0, 6, inf, -inf, -6, 0, nan}},
      {{Unary::pow, 0.5f}, {nan, nan, -0.0, 0, 1, inf, nan}, {nan, nan, -inf, inf, 1.5, 0, nan}},
      {{Unary::pow, -0.5f}, {nan, nan, -inf, inf, 1, 0, nan}, {0, nan, -inf, -inf, -1.5, 0, nan}},
      {{Unary::pow, 1.5f}, {inf, nan, 0, 0, 1, inf, nan}, {nan, nan, 0, 0, 4.5, inf, nan}},
      {{Unary::pow, 2.5f}, {inf, nan, 0, 0, 1, inf, nan}, {inf, nan, 0, 0, 7.5, inf, nan}},
      {{Unary::pow, float(inf)}, {inf, 1, 0, 0, 1, inf, nan}, {inf, inf, nan, nan, inf, inf, nan}},
      {{Unary::pow, float(-inf)}, {0, 1, inf, inf, 1, 0, nan}, {nan, -inf, -inf, -inf, -inf, nan, nan}},
      {{Unary::pow, float(nan)}, {nan, nan, nan, nan, 1, nan, nan}, Values(7, nan)}};
}

TEST_P(ElementOps, SpecialValuesAndGradientsAreThoseOfPyTorch) {
  const double nan = NAN;
  const std::vector<SpecialCase> cases = special_cases();
  // Vectors that are full, and one that is not.
  for (const std::size_t copies : {1, 5})
    for (const SpecialCase& c : cases) {
      Values x;
      for (std::size_t i = 0; i < copies; ++i) x.insert(x.end(), {-inf, -1, -0.0, 0, 1, inf, nan});
      const Tensor in = place(x, {x.size()}), out = empty({x.size()}),
                   d = place(Values(x.size(), 3), {x.size()});
      const auto expect = [&](const Values& expected, bool signs, const char* what) {
        const Values got = get(out);
        for (std::size_t i = 0; i < got.size(); ++i) {
          const double e = expected[i % 7];
          if (std::isnan(e) || std::isinf(e) || e == 0) {
            EXPECT_TRUE(std::isnan(e) ? std::isnan(got[i]) : got[i] == e) << got[i] << " is not " << e;
          } else {
            EXPECT_NEAR(got[i], e, (1e-6 + rounding) * std::abs(e));
          }
          if (signs && !std::isnan(e)) {
            EXPECT_EQ(std::signbit(got[i]), std::signbit(e));
          }
          if (HasFailure()) FAIL() << what << name_of(c.f.op) << " " << c.f.parameter << " at " << x[i];
        }
      };
      ops::unary(out, in, c.f, stream);
      expect(c.values, true, "");
      ops::unary_backward(out, d, in, c.f, Into::overwrite, stream);
      expect(c.gradients, false, "gradient of ");
    }
}

/// Every pair, as in C.
TEST_P(ElementOps, PowersOfSpecialNumbers) {
  const double nan = NAN;
  const Values bases = {-inf, -2, -1.5, -1, -0.25, -0.0, 0, 0.25, 1, 1.5, 2, inf, nan};
  Values exponents = {-inf, -3, -2, -0.75, -0.0, 0, 0.75, 1, 2, 3, 1024, inf, nan};
  if (dtype == DType::f32) exponents.insert(exponents.end(), {16777215, 16777216, -16777215, 1e30, 1e-30});
  const Shape column{bases.size(), 1}, row{exponents.size()}, both{bases.size(), exponents.size()};
  const Tensor a = place(bases, column), b = place(exponents, row), out = empty(both), d = empty(both);
  ops::binary(out, a, b, Binary::pow, stream);
  const Values got = get(out), ones(both.count(), 1);
  Values slopes[2];
  for (const int operand : {0, 1}) {
    ops::binary_backward(d, place(ones, both), a, b, Binary::pow, operand, stream);
    slopes[operand] = get(d);
  }
  const auto expect = [&](double value, double expected, const char* what, double x, double y) {
    const double wanted = rounded({expected})[0];
    if (std::isnan(wanted) || std::isinf(wanted) || wanted == 0) {
      EXPECT_TRUE(std::isnan(wanted) ? std::isnan(value) : value == wanted) << value << " is not " << wanted;
    } else {
      EXPECT_NEAR(value, expected, (6 * 0x1p-23 + rounding) * std::abs(expected) + smallest);
    }
    if (HasFailure()) FAIL() << what << x << "^" << y;
  };
  for (std::size_t i = 0; i < got.size(); ++i) {
    const double x = bases[i / exponents.size()], y = exponents[i % exponents.size()];
    expect(got[i], std::pow(x, y), "", x, y);
    if (!std::isnan(got[i])) {
      EXPECT_EQ(std::signbit(got[i]), std::signbit(std::pow(x, y))) << x << "^" << y;
    }
    if (std::abs(y) > 2000 && !std::isinf(y)) continue;  // y - 1 is rounded
    expect(slopes[0][i], y == 0 ? 0 : y * std::pow(x, y - 1), "slope by the base of ", x, y);
    expect(slopes[1][i], x == 0 && y >= 0 ? 0 : std::pow(x, y) * std::log(x), "slope by the exponent of ", x,
           y);
  }
}

TEST_P(ElementOps, PowersOfAllMagnitudes) {
  if (dtype != DType::f32) GTEST_SKIP() << "16-bit numbers are numbers of f32";
  const std::size_t n = 20000;
  Values x = random(n, 1, -120, 120), y = random(n, 2, -100, 100);
  for (std::size_t i = 0; i < n; ++i) {
    x[i] = static_cast<float>(std::exp2(x[i]));
    y[i] = static_cast<float>(y[i] / std::log2(x[i]));  // powers from 2^-100 to 2^100
  }
  Values expected;
  for (std::size_t i = 0; i < n; ++i) expected.push_back(std::pow(x[i], y[i]));
  const Tensor a = place(x, {n}), b = place(y, {n}), out = empty({n});
  ops::binary(out, a, b, Binary::pow, stream);
  expect_near(get(out), expected, on_host() ? 1 : 4, "pow");  // CUDA's powf is within 4 ulp
  // Results that are subnormal, and those that overflow.
  const Values tiny = {0x1p-70, 0x1.4p-74, 1.5, 0x1p64, 0x1p-75};
  ops::binary(out.view(0, {5}), place(tiny, {5}), place({2, 2, 400, 2, 2}, {5}), Binary::pow, stream);
  const Values got = get(out.view(0, {5}));
  EXPECT_EQ(got, (Values{0x1p-140, 0x1.8p-148, inf, inf, 0}));
}

/// The argument is reduced exactly: also of 16367173 · 2^72, the number of f32 that is nearest to a multiple
/// of π/2 (Muller, Elementary Functions).
TEST_P(ElementOps, SineAndCosineOfAllMagnitudes) {
  Values x = {std::ldexp(16367173.0, 72), -std::ldexp(16367173.0, 72), 0x1p20, -0x1.000002p20,
              dtype == DType::f32 ? 0x1.fffffep127 : 0x1.fep127};
  for (int e = -148; e <= 127; ++e)
    for (const double m : {1.0, 1.375, -1.8}) x.push_back(std::ldexp(m, e));
  for (int k = -3000; k <= 3000; ++k) x.push_back(k * std::acos(0.0)), x.push_back(k * 1001 * std::acos(0.0));
  for (double& v : x)
    if (dtype == DType::f16 && std::abs(v) > 60000) v = 1;
  for (const double v : all_of_16_bits())
    if (std::isfinite(v)) x.push_back(v);
  x = get(place(x, {x.size()}));
  const Tensor in = place(x, {x.size()}), out = empty({x.size()});
  for (const auto& [op, f] :
       {std::pair<Unary, double (*)(double)>{Unary::sin, std::sin}, {Unary::cos, std::cos}}) {
    Values expected;
    for (const double v : x) expected.push_back(f(v));
    ops::unary(out, in, op, stream);
    expect_near(get(out), expected, on_host() ? 1 : 2, name_of(op));
  }
}

/// As far as the normal distribution is no subnormal number. The errors of the gradient are those of its
/// terms, which cancel near -0.75.
TEST_P(ElementOps, GeluErfIsAccurateEverywhere) {
  Values x;
  for (int i = 0; i <= 8256; ++i) x.push_back(-12.9 + i / 320.0), x.push_back(std::ldexp(x.back(), -12));
  x = get(place(x, {x.size()}));
  Values expected, slopes;
  for (const double v : x) {
    const double distribution = std::erfc(-v / std::sqrt(2)) / 2;
    expected.push_back(v * distribution);
    slopes.push_back(distribution + v * std::exp(-v * v / 2) / std::sqrt(2 * std::acos(-1)));
  }
  const Tensor in = place(x, {x.size()}), out = empty({x.size()});
  ops::unary(out, in, Unary::gelu_erf, stream);
  expect_near(get(out), expected, on_host() ? 5 : 8, "gelu_erf");
  ops::unary_backward(out, place(Values(x.size(), 1), {x.size()}), in, Unary::gelu_erf, Into::overwrite,
                      stream);
  const Values got = get(out);
  const double error = (on_host() ? 5 : 16) * 0x1p-24;
  for (std::size_t i = 0; i < x.size(); ++i)
    ASSERT_NEAR(got[i], slopes[i], error + (std::abs(slopes[i]) + error) * rounding + smallest) << x[i];
}

TEST_P(ElementOps, SoftplusIsTheIdentityAbove20) {
  const Tensor in = place({19.875, 20, 20.125, 100, -80}, {5}), out = empty({5});
  ops::unary(out, in, Unary::softplus, stream);
  expect_near(get(out), {std::log1p(std::exp(19.875)), std::log1p(std::exp(20)), 20.125, 100, std::exp(-80)},
              4, "softplus");
}

TEST_P(ElementOps, ComparisonsFollowIeee754) {
  const double nan = NAN;
  const Values x = {1, 2, 1, -0.0, nan, nan, 1, inf, -inf, inf, -1};
  const Values y = {1, 1, 2, 0.0, nan, 1, nan, inf, inf, 1, -2};
  const Tensor a = place(x, {x.size()}), b = place(y, {x.size()}), out = empty({x.size()});
  for (const Binary op : comparisons) {
    EXPECT_TRUE(ops::is_comparison(op));
    Values expected;
    for (std::size_t i = 0; i < x.size(); ++i) expected.push_back(apply(op, x[i], y[i]));
    ops::binary(out, a, b, op, stream);
    EXPECT_EQ(get(out), expected) << name_of(op);
    for (const int operand : {0, 1}) {
      ops::binary_backward(out, place(Values(x.size(), 3), {x.size()}), a, b, op, operand, stream);
      EXPECT_EQ(get(out), Values(x.size(), 0)) << name_of(op);
    }
  }
  EXPECT_FALSE(ops::is_comparison(Binary::pow));
}

TEST_P(ElementOps, WhereSelects) {
  struct Case {
    Shape condition, a, b, out;
  };
  const Case cases[] = {{{}, {}, {}, {}},
                        {{7}, {7}, {7}, {7}},
                        {{5, 1}, {}, {3}, {5, 3}},
                        {{3}, {5, 1}, {5, 3}, {5, 3}},
                        {{2, 1, 3, 1}, {4, 1, 5}, {2, 4, 3, 5}, {2, 4, 3, 5}},
                        {{37, 131}, {131}, {}, {37, 131}},
                        {{3, 1}, {3, 2100}, {2100}, {3, 2100}},
                        {{2100}, {3, 2100}, {3, 2100}, {3, 2100}},
                        {{0, 3}, {1, 3}, {}, {0, 3}}};
  const double nan = NAN;
  for (const Case& c : cases) {
    Values condition(c.condition.count()), a = random(c.a.count(), 1, -4, 4),
                                           b = random(c.b.count(), 2, -4, 4);
    for (std::size_t i = 0; i < condition.size(); ++i)
      condition[i] = std::array<double, 7>{0, 1, -0.0, nan, -3, inf, 0}[i * i % 7];
    const auto of_c = sources(c.condition, c.out), of_a = sources(c.a, c.out), of_b = sources(c.b, c.out);
    Values expected;
    for (std::size_t i = 0; i < c.out.count(); ++i)
      expected.push_back(condition[of_c[i]] != 0 ? a[of_a[i]] : b[of_b[i]]);
    const Tensor out = empty(c.out);
    ops::where(out, place(condition, c.condition, 1), place(a, c.a), place(b, c.b, 1), stream);
    ASSERT_EQ(get(out), expected) << name(c.condition) << " " << name(c.a) << " " << name(c.b);
  }
  // What is not selected has no effect.
  const Tensor out = empty({2});
  ops::where(out, place({1, 0}, {2}), place({2, nan}, {2}), place({nan, 3}, {2}), stream);
  EXPECT_EQ(get(out), (Values{2, 3}));
}

TEST_P(ElementOps, ExponentsAndLogarithmsOfAllMagnitudes) {
  Values x, powers;
  const int low = dtype == DType::f16    ? -20
                  : dtype == DType::bf16 ? -130
                                         : -140,
            high = dtype == DType::f16 ? 15 : 127;
  for (int e = low; e <= high; ++e) x.push_back(std::ldexp(1.375, e)), powers.push_back(e * 0.69);
  x = get(place(x, {x.size()})), powers = get(place(powers, {x.size()}));
  const Tensor out = empty({x.size()});
  const auto expect = [&](const Values& in, Unary op, double (*f)(double)) {
    Values expected;
    for (const double v : in) expected.push_back(f(v));
    ops::unary(out, place(in, {in.size()}), op, stream);
    expect_near(get(out), expected, 2, name_of(op));
  };
  expect(x, Unary::log, [](double v) { return std::log(v); });
  if (dtype == DType::f32) expect(powers, Unary::exp, [](double v) { return std::exp(v); });
  // Near 1, where the logarithm is small.
  Values near;
  for (int i = -100; i <= 100; ++i) near.push_back(1 + i * (dtype == DType::f32 ? 0x1p-22 : 0x1p-7));
  near.resize(x.size(), 2);
  expect(get(place(near, {near.size()})), Unary::log, [](double v) { return std::log(v); });
}

TEST_P(ElementOps, SigmoidAndSiluOfLargeNumbers) {
  const Tensor in = place({-200, -50, 50, 200}, {4}), out = empty({4}), ones = place({1, 1, 1, 1}, {4});
  ops::unary_backward(out, ones, in, Unary::silu, Into::overwrite, stream);
  EXPECT_NEAR(get(out)[0], 0, 1e-15);
  EXPECT_NEAR(get(out)[1], 0, 1e-15);
  EXPECT_EQ(get(out)[2], 1);
  EXPECT_EQ(get(out)[3], 1);
  ops::unary(out, in, Unary::sigmoid, stream);
  EXPECT_NEAR(get(out)[1], rounded({1 / (1 + std::exp(50))})[0], 1e-27);
  EXPECT_EQ(get(out)[3], 1);
}

/// The bits of silu and mul, of whole packs and of what is left, at addresses that packs divide and that they
/// do not; each gradient alone, and both.
TEST_P(ElementOps, SwigluHasTheBitsOfItsParts) {
  for (const std::size_t n : {1, 31, 1003, 4096})
    for (const std::size_t offset : {0, 1}) {
      const Shape shape{n};
      const Tensor gate = place(random(n, 1, -9, 9), shape, offset),
                   up = place(random(n, 2, -4, 4), shape, offset),
                   dy = place(random(n, 3, -2, 2), shape, offset);
      const Tensor act = empty(shape), out = empty(shape), expected = empty(shape);
      ops::unary(act, gate, Unary::silu, stream);
      ops::binary(expected, act, up, Binary::mul, stream);
      ops::swiglu(out, gate, up, stream);
      EXPECT_EQ(get(out), get(expected)) << n;
      const Tensor d_act = empty(shape), d_gate = empty(shape), d_up = empty(shape);
      ops::binary(d_up, dy, act, Binary::mul, stream);
      ops::binary(d_act, dy, up, Binary::mul, stream);
      ops::unary_backward(d_gate, d_act, gate, Unary::silu, Into::overwrite, stream);
      const Tensor to_gate = empty(shape), to_up = empty(shape), alone = empty(shape), other = empty(shape);
      ops::swiglu_backward(to_gate, to_up, dy, gate, up, Into::overwrite, Into::overwrite, stream);
      ops::swiglu_backward(alone, {}, dy, gate, up, Into::overwrite, Into::overwrite, stream);
      ops::swiglu_backward({}, other, dy, gate, up, Into::overwrite, Into::overwrite, stream);
      for (const auto& [ours, theirs] :
           {std::pair(to_gate, d_gate), {to_up, d_up}, {alone, d_gate}, {other, d_up}})
        EXPECT_EQ(get(ours), get(theirs)) << n;
    }
}

/// Where silu(x) is x, gradients of integers are exact.
TEST_P(ElementOps, SwigluAccumulatesEachGradient) {
  const Shape shape{19};
  Values gate, up, dy, before, of_gate, of_up;
  for (int i = 0; i < 19; ++i) {
    gate.push_back(100 + i % 3), up.push_back(i % 5 - 2), dy.push_back(i % 4 - 1), before.push_back(i % 7);
    of_gate.push_back(dy.back() * up.back()), of_up.push_back(dy.back() * gate.back());
  }
  for (const bool add_gate : {false, true})
    for (const bool add_up : {false, true}) {
      const Tensor d_gate = place(before, shape), d_up = place(before, shape);
      const auto into = [](bool add) { return add ? Into::accumulate : Into::overwrite; };
      ops::swiglu_backward(d_gate, d_up, place(dy, shape), place(gate, shape), place(up, shape),
                           into(add_gate), into(add_up), stream);
      const std::vector<double> gates = get(d_gate), ups = get(d_up);
      for (std::size_t i = 0; i < 19; ++i) {
        EXPECT_EQ(gates[i], of_gate[i] + (add_gate ? before[i] : 0)) << i;
        EXPECT_EQ(ups[i], rounded({of_up[i] + (add_up ? before[i] : 0)})[0]) << i;
      }
    }
}

TEST_P(ElementOps, BinaryValuesAreRoundedOnce) {
  std::vector<Binary> all(std::begin(arithmetic), std::end(arithmetic));
  all.insert(all.end(), std::begin(comparisons), std::end(comparisons));
  for (const Binary op : all)
    for (const Broadcast& c : broadcasts) {
      const Values x = random(c.a.count(), 1, -4, 4), y = random(c.b.count(), 2, 0.5, 4);
      const auto of_a = sources(c.a, c.out), of_b = sources(c.b, c.out);
      Values expected;
      for (std::size_t i = 0; i < c.out.count(); ++i) expected.push_back(apply(op, x[of_a[i]], y[of_b[i]]));
      const Tensor a = place(x, c.a, 1), b = place(y, c.b), out = empty(c.out);
      EXPECT_EQ(ops::broadcast_shapes("test", c.a, c.b), c.out);
      ops::binary(out, a, b, op, stream);
      ASSERT_EQ(get(out), rounded(expected)) << name_of(op) << " " << name(c.a) << " " << name(c.b);
      ops::binary(out, b, a, op, stream);
      expected.clear();
      for (std::size_t i = 0; i < c.out.count(); ++i) expected.push_back(apply(op, y[of_b[i]], x[of_a[i]]));
      if (op != Binary::div) {
        ASSERT_EQ(get(out), rounded(expected)) << name_of(op);
      }
      if (c.b != c.out) continue;
      ops::binary(b, b, a, op, stream);  // in place
      ASSERT_EQ(get(b), get(out)) << name_of(op);
    }
}

TEST_P(ElementOps, BinaryGradients) {
  for (const Binary op : arithmetic)
    for (const Broadcast& c : broadcasts)
      for (const int operand : {0, 1}) {
        const Values x = random(c.a.count(), 1, -4, 4), y = random(c.b.count(), 2, 0.5, 4),
                     dy = random(c.out.count(), 3, -1, 1);
        const auto of_a = sources(c.a, c.out), of_b = sources(c.b, c.out);
        const Tensor d = empty(c.out);
        ops::binary_backward(d, place(dy, c.out), place(x, c.a), place(y, c.b), op, operand, stream);
        const Values got = get(d);
        for (std::size_t i = 0; i < got.size(); ++i) {
          const double u = x[of_a[i]], v = y[of_b[i]], step = 1e-6;
          const double change = operand == 0 ? apply(op, u + step, v) - apply(op, u - step, v)
                                             : apply(op, u, v + step) - apply(op, u, v - step);
          const double expected = change / (2 * step) * dy[i];
          ASSERT_NEAR(got[i], expected, (1e-6 + rounding) * std::abs(expected) + 1e-8 + smallest)
              << name_of(op) << " " << name(c.a) << " " << name(c.b) << " operand " << operand;
        }
      }
}

TEST_P(ElementOps, MinimumAndMaximumOfEqualNumbersAndNaN) {
  const Tensor a = place({1, NAN, 2, -inf}, {4}), b = place({1, 3, NAN, inf}, {4}), out = empty({4});
  for (const Binary op : {Binary::minimum, Binary::maximum}) {
    ops::binary(out, a, b, op, stream);
    EXPECT_EQ(get(out)[0], 1);
    EXPECT_TRUE(std::isnan(get(out)[1]) && std::isnan(get(out)[2]));
    EXPECT_EQ(get(out)[3], op == Binary::minimum ? -inf : inf);
    ops::binary_backward(out, place({8, 8, 8, 8}, {4}), a, b, op, 0, stream);
    EXPECT_EQ(get(out), (Values{4, 8, 8, op == Binary::minimum ? 8. : 0.}));  // equal: half each
    ops::binary_backward(out, place({8, 8, 8, 8}, {4}), a, b, op, 1, stream);
    EXPECT_EQ(get(out), (Values{4, 8, 8, op == Binary::minimum ? 0. : 8.}));
  }
}

/// A NaN of the forward pass is not hidden from the parameters before it.
TEST_P(ElementOps, ReluPassesTheGradientOfNaN) {
  const Tensor x = place({NAN, -0.0, 0, 2, -2, inf, -inf}, {7}), out = empty({7}),
               d = place(Values(7, 3), {7});
  ops::unary_backward(out, d, x, Unary::relu, Into::overwrite, stream);
  EXPECT_EQ(get(out), (Values{3, 0, 0, 3, 0, 3, 0}));
}

TEST_P(ElementOps, GeluHasNoGradientAtInfinity) {
  const Tensor x = place({inf, -inf, NAN, 20, 0}, {5}), out = empty({5}), d = place(Values(5, 2), {5});
  ops::gelu_backward(out, d, x, Into::overwrite, stream);
  const Values got = get(out);
  for (int i : {0, 1, 2})
    EXPECT_TRUE(std::isnan(got[static_cast<std::size_t>(i)]))
        << i << ": " << got[static_cast<std::size_t>(i)];
  EXPECT_EQ(Values(got.begin() + 3, got.end()), (Values{2, 1}));
}

TEST_P(ElementOps, AffineAndClamp) {
  const Tensor x = place({-0.0, -3, -1, 0.5, 2, 7, NAN}, {7}), out = empty({7}), d = place(Values(7, 3), {7});
  const auto expect = [&](const Values& expected) {
    const Values got = get(out);
    for (std::size_t i = 0; i < 6; ++i) EXPECT_EQ(got[i], expected[i]) << i;
    EXPECT_TRUE(std::isnan(got[6]));
  };
  ops::affine(out, x, -1, 4, stream);
  expect({4, 7, 5, 3.5, 2, -3});
  ops::affine(out, x, 2, -0.0f, stream);
  expect({-0.0, -6, -2, 1, 4, 14});
  EXPECT_TRUE(std::signbit(get(out)[0]));
  ops::clamp(out, x, -1, 2, stream);
  expect({-0.0, -1, -1, 0.5, 2, 2});
  ops::clamp_backward(out, d, x, -1, 2, Into::overwrite, stream);
  EXPECT_EQ(get(out), (Values{3, 0, 0, 3, 0, 0, 0}));
  ops::clamp_backward(out, d, x, -1, 2, Into::accumulate, stream);
  EXPECT_EQ(get(out), (Values{6, 0, 0, 6, 0, 0, 0}));
}

TEST_P(ElementOps, SumsOfIntegersAreExact) {
  for (const Broadcast& c : broadcasts)
    for (const Shape& small : {c.a, c.b, Shape{}}) {
      Values x(c.out.count()), sums(small.count());
      const auto to = sources(small, c.out);
      for (std::size_t i = 0; i < x.size(); ++i) sums[to[i]] += x[i] = static_cast<double>(i * 7 % 11) - 5;
      const Tensor in = place(x, c.out, 1), out = place(Values(small.count(), NAN), small);
      ops::sum_to_size(out, in, 1, Into::overwrite, stream);
      ASSERT_EQ(get(out), rounded(sums)) << name(c.out) << " to " << name(small);
      const Tensor added = place(Values(small.count(), 3), small);
      ops::sum_to_size(added, in, 2, Into::accumulate, stream);
      for (double& s : sums) s = s / 2 + 3;
      ASSERT_EQ(get(added), rounded(sums)) << name(c.out) << " to " << name(small);
      const Tensor wide = empty(c.out);
      ops::expand(wide, added, 2, Into::overwrite, stream);
      const Values narrow = get(added);
      Values expected;
      for (const std::size_t i : to) expected.push_back(2 * narrow[i]);
      ASSERT_EQ(get(wide), rounded(expected));
      ops::expand(wide, added, -1, Into::accumulate, stream);
      for (double& e : expected) e /= 2;
      ASSERT_EQ(get(wide), rounded(expected));
    }
}

TEST_P(ElementOps, SumsHaveTheSameBitsInEverySchedule) {
  const Shape shape{7, 331, 5};
  const auto sums = [&] {
    const Tensor in = place(random(shape.count(), 5, -1, 1), shape);
    Values all;
    for (const Shape& to :
         {Shape{}, Shape{5}, Shape{331, 1}, Shape{7, 1, 1}, Shape{7, 1, 5}, Shape{1, 331, 5}}) {
      const Tensor out = empty(to);
      ops::sum_to_size(out, in, 1, Into::overwrite, stream);
      for (const double v : get(out)) all.push_back(v);
    }
    return all;
  };
  const Values first = sums();
  for (std::uint64_t seed = 1; seed < 6; ++seed) {
    reschedule(seed);
    EXPECT_EQ(sums(), first);
  }
}

TEST_P(ElementOps, SumsAreInDouble) {
  Values x(4001, 1);
  x[0] = 16384, x[4000] = -16384;  // in f32 or less, and in order, the ones would be rounded
  const Tensor out = empty({});
  ops::sum_to_size(out, place(x, {4001}), 3999, Into::overwrite, stream);
  EXPECT_EQ(get(out)[0], 1);
}

TEST_P(ElementOps, LogSoftmax) {
  for (const auto& [n, c] : {std::array<std::size_t, 2>{1, 1}, {5, 33}, {3, 2001}}) {
    const Values x = random(n * c, 1, -3, 3), dy = random(n * c, 2, -1, 1);
    const auto reference = [c = c](const Values& v) {
      Values out = reference::softmax(v, c);
      for (double& o : out) o = std::log(o);
      return out;
    };
    const Tensor in = place(x, {n, c}, c % 2), d_out = place(dy, {n, c}), out = empty({n, c});
    ops::log_softmax(out, in, stream);
    const Values expected = reference(x), y = get(out);
    for (std::size_t i = 0; i < y.size(); ++i)
      ASSERT_NEAR(y[i], expected[i], 2e-6 + rounding * std::abs(expected[i]));
    Values d(n * c);
    for (std::size_t r = 0; r < n; ++r) {
      double total = 0;
      for (std::size_t j = 0; j < c; ++j) total += dy[r * c + j];
      for (std::size_t j = 0; j < c; ++j) d[r * c + j] = dy[r * c + j] - std::exp(y[r * c + j]) * total;
    }
    if (n * c < 1000 && dtype == DType::f32) {
      const Values numeric = numeric_gradient(reference, x, dy);
      for (std::size_t i = 0; i < d.size(); ++i) ASSERT_NEAR(d[i], numeric[i], 1e-5);
    }
    const Tensor d_in = empty({n, c}), added = place(Values(n * c, 1), {n, c});
    ops::log_softmax_backward(d_in, d_out, out, Into::overwrite, stream);
    ops::log_softmax_backward(added, d_out, out, Into::accumulate, stream);
    const Values got = get(d_in), sums = get(added);
    for (std::size_t i = 0; i < d.size(); ++i) {
      ASSERT_NEAR(got[i], d[i], 2e-5 + rounding * std::abs(d[i]));
      ASSERT_NEAR(sums[i], 1 + d[i], 2e-5 + rounding * (1 + std::abs(d[i])));
    }
  }
}

TEST_P(ElementOps, LogSoftmaxOfExtremes) {
  const Tensor out = empty({3, 3});
  ops::log_softmax(out, place({1000, 1000, -inf, 0, -1000, 0, 1, NAN, 1}, {3, 3}), stream);
  const Values got = get(out);
  EXPECT_EQ(got[0], rounded({-std::log(2.0)})[0]);
  EXPECT_EQ(got[2], -inf);
  EXPECT_EQ(got[4], rounded({-1000 - std::log(2.0)})[0]);
  for (int i = 6; i < 9; ++i) EXPECT_TRUE(std::isnan(got[static_cast<std::size_t>(i)]));
}

TEST_P(ElementOps, RefuseShapesThatDoNotBroadcast) {
  const auto message = [](const auto& call) {
    const Error e = error_of(call);
    EXPECT_EQ(e.code(), Errc::invalid_argument);
    return std::string(e.what());
  };
  const std::string shapes = message([] { ops::broadcast_shapes("div", {2, 3}, {4, 3}); });
  EXPECT_NE(shapes.find("div: the shapes [2, 3] and [4, 3] do not broadcast"), std::string::npos) << shapes;
  const Tensor a = empty({2, 3}), b = empty({4, 3}), out = empty({4, 3});
  const std::string both = message([&] { ops::binary(out, a, b, Binary::sub, stream); });
  for (const char* part : {"sub", "[2, 3]", "[4, 3]"}) EXPECT_NE(both.find(part), std::string::npos) << both;
  const Tensor row = empty({3});
  message([&] { ops::binary(row, a, row, Binary::add, stream); });    // out is too small
  message([&] { ops::binary(out, row, row, Binary::add, stream); });  // out is larger than both
  message([&] { ops::sum_to_size(empty({2}), a, 1, Into::overwrite, stream); });
  message([&] { ops::expand(out, a, 1, Into::overwrite, stream); });
  const std::string three = message([&] { ops::where(a, a, b, row, stream); });
  for (const char* part : {"where", "condition [2, 3]", "a [4, 3]", "b [3]"})
    EXPECT_NE(three.find(part), std::string::npos) << three;
  message([&] { ops::where(a, row, row, row, stream); });  // out is larger than all
  const Tensor other = empty_on(stream, {2, 3}, dtype == DType::f32 ? DType::bf16 : DType::f32);
  if (on_host()) message([&] { ops::binary(a, a, other, Binary::mul, stream); });
  if (on_host()) message([&] { ops::where(a, other, a, a, stream); });
}

}  // namespace
}  // namespace rz::test
