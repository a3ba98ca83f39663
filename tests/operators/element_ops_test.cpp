// Runs: ci host operators
// Not under sanitizers: Types/.*/f16$

// Element-wise operators in f32, f16 and bf16, on the host and on a device: against double, at sizes that no
// vector, pack, block or number of threads divides, and for every kind of broadcast.

#include "tensor/element_ops.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "comm/core/math.h"
#include "tensor/ops.h"
#include "tests/operators/operator.h"
#include "tests/support/error_of.h"

namespace rz::test {
namespace {

using ops::Binary;
using ops::Into;
using ops::Unary;
using ops::UnaryFunction;

constexpr double inf = std::numeric_limits<double>::infinity();

/// A function of one number, its inverse, and numbers where both are defined. A gradient that reads the
/// output is tested where there is an inverse.
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
    {Unary::tanh, [](double x) { return std::tanh(x); }, [](double y) { return std::atanh(y); }, -2, 2, 3.3},
    {Unary::tanh, [](double x) { return std::tanh(x); }, nullptr, -9, 9, 3.3},
    {Unary::tanh, [](double x) { return std::tanh(x); }, [](double y) { return std::atanh(y); }, -1e-2, 1e-2,
     3.3},
    {Unary::tanh, [](double x) { return std::tanh(x); }, [](double y) { return std::atanh(y); }, -1e-6, 1e-6,
     3.3},
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

class ElementOps : public Operators {
 protected:
  const double smallest = dtype == DType::f16 ? 0x1p-25 : dtype == DType::bf16 ? 0 : 0x1p-149;

  using Operators::random;
  Values random(std::size_t n, unsigned seed, double low, double high) const {
    Values values = random_values(n, seed, 1);
    for (double& v : values) v = low + (v + 1) / 2 * (high - low);
    return rounded(values);
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
INSTANTIATE_TEST_SUITE_P(Types, ElementOps, float_types, type_name);

// Derived bounds: e^x, tanh and log are within 2 ulp in f32, a product, quotient or sum adds half an ulp
// each.
TEST_P(ElementOps, Unary) {
  for (const UnaryCase& c : unary_cases)
    for (const std::size_t n : {0, 1, 13, 2051}) {
      Operator op{.name = concat(name_of(c.f.op), " of ", n),
                  .in = {{random(n, 3, c.low, c.high), {n}}},
                  .out = {n},
                  .forward = [&](const Operands& o) { ops::unary(o.out, o.in[0], c.f, o.stream); },
                  .value =
                      [&](const std::vector<Values>& in) {
                        Values out;
                        for (const double x : in[0]) out.push_back(c.value(x));
                        return out;
                      },
                  .bound = {0, c.ulps * 0x1p-23, smallest},
                  .in_place = true};
      const bool of_output = ops::saved_by(c.f.op) == ops::Saved::output;
      Gradient g{.of = 0,
                 .backward =
                     [&](const Operands& o, const Tensor& d, Into into) {
                       ops::unary_backward(d, o.d_out, of_output ? o.out : o.in[0], c.f, into, o.stream);
                     },
                 .reach = its_own(),
                 .alias = Alias::d_out,
                 .bound = {0, 2e-6, 1e-7}};
      if (of_output)  // at the number whose value is the output, which was rounded
        g.formula = [&](const std::vector<Values>&, const Values& out, const Values& d_out) {
          Values d;
          for (std::size_t i = 0; i < out.size(); ++i) {
            if (!c.inverse) {  // tanh where it is nearly 1
              d.push_back((1 - out[i] * out[i]) * d_out[i]);
              continue;
            }
            const double at = c.inverse(out[i]), step = 1e-5 * std::max(std::abs(at), 0.1);
            d.push_back((c.value(at + step) - c.value(at - step)) / (2 * step) * d_out[i]);
          }
          return d;
        };
      if (n > 0 && (!of_output || c.inverse || c.f.op == Unary::tanh)) op.gradients = {g};
      expect_right(op);
      if (HasFatalFailure()) return;
    }
}

TEST_P(ElementOps, Gelu) {
  for (const std::size_t n : {1, 13, 2051, 20011})
    expect_right({.name = concat("gelu of ", n),
                  .in = {{random_values(n, 3, 5), {n}}},
                  .out = {n},
                  .forward = [](const Operands& o) { ops::gelu(o.out, o.in[0], o.stream); },
                  .value = [](const std::vector<Values>& in) { return reference::gelu(in[0]); },
                  .gradients = {{.of = 0,
                                 .backward =
                                     [](const Operands& o, const Tensor& d, Into into) {
                                       ops::gelu_backward(d, o.d_out, o.in[0], into, o.stream);
                                     },
                                 .reach = its_own(),
                                 .alias = Alias::d_out,
                                 .bound = {1e-6}}},
                  .bound = {2e-7},
                  .in_place = true});
}

/// Of integers. Rows may have a stride; an input may be the output.
TEST_P(ElementOps, ArithmeticIsExact) {
  struct Case {
    const char* name;
    std::function<void(const Operands&)> forward;
    double (*f)(double, double);
    bool in_place = false;
  };
  const Case cases[] = {
      {"add", [](const Operands& o) { ops::add(o.out, o.in[0], o.in[1], o.stream); },
       [](double x, double y) { return x + y; }, true},
      {"mul", [](const Operands& o) { ops::binary(o.out, o.in[0], o.in[1], Binary::mul, o.stream); },
       [](double x, double y) { return x * y; }, true},
      {"scale", [](const Operands& o) { ops::scale(o.out, o.in[0], 0.5f, o.stream); },
       [](double x, double) { return x * 0.5; }, true},
      {"add_scaled",
       [](const Operands& o) {
         ops::copy(o.out, o.in[0], o.stream);
         ops::add_scaled(o.out, o.in[1], 2, o.stream);
       },
       [](double x, double y) { return x + 2 * y; }},
      {"copy", [](const Operands& o) { ops::copy(o.out, o.in[1], o.stream); },
       [](double, double y) { return y; }},
      {"fill", [](const Operands& o) { ops::fill(o.out, -2, o.stream); },
       [](double, double) { return -2.; }}};
  for (const Case& c : cases)
    for (const Shape& shape : {Shape{1}, Shape{7}, Shape{5, 11}, Shape{4099}, Shape{29, 691}}) {
      const std::size_t n = shape.count();
      Values a(n), b(n);
      for (std::size_t i = 0; i < n; ++i)
        a[i] = static_cast<double>(i % 40), b[i] = static_cast<double>(i % 7) - 3;
      expect_right({.name = concat(c.name, " of ", name(shape)),
                    .in = {{a, shape}, {b, shape}},
                    .out = shape,
                    .forward = c.forward,
                    .value =
                        [&](const std::vector<Values>& in) {
                          Values out;
                          for (std::size_t i = 0; i < n; ++i) out.push_back(c.f(in[0][i], in[1][i]));
                          return out;
                        },
                    .bound = {0},
                    .in_place = c.in_place,
                    .strides = true,
                    .bits_of_threads = true});
    }
}

TEST_P(ElementOps, CopyConverts) {
  const Values values = random_values(1003, 1, 1000);
  for (const DType to : {DType::f32, DType::f16, DType::bf16})
    for (const std::size_t shift : {std::size_t{0}, std::size_t{1}, std::size_t{4}}) {
      const Tensor in = place(values, {1003}, shift), out = place(Values(1003, NAN), {1003}, to, shift);
      ops::copy(out, in, stream);
      EXPECT_EQ(get(out), get(to_device(get(in), {1003}, to, stream)));
    }
  const Tensor rows = place(values, {59, 17}), wide = statistics({59, 5});
  ops::copy(wide, rows.columns(7, 5), stream);
  const Values got = get(wide), all = get(rows);
  for (std::size_t i = 0; i < got.size(); ++i) EXPECT_EQ(got[i], all[i / 5 * 17 + 7 + i % 5]);
}

/// Philox4x32-10 as its paper states it.
std::uint32_t philox(std::uint64_t index, std::uint64_t seed) {
  std::uint32_t c[4] = {static_cast<std::uint32_t>(index / 4), static_cast<std::uint32_t>(index / 4 >> 32), 0,
                        0};
  std::uint32_t k[2] = {static_cast<std::uint32_t>(seed), static_cast<std::uint32_t>(seed >> 32)};
  for (int i = 0; i < 10; ++i, k[0] += 0x9E3779B9, k[1] += 0xBB67AE85) {
    const std::uint64_t p = 0xD2511F53ull * c[0], q = 0xCD9E8D57ull * c[2];
    const std::uint32_t next[4] = {
        static_cast<std::uint32_t>(q >> 32) ^ c[1] ^ k[0], static_cast<std::uint32_t>(q),
        static_cast<std::uint32_t>(p >> 32) ^ c[3] ^ k[1], static_cast<std::uint32_t>(p)};
    std::copy(next, next + 4, c);
  }
  return c[index % 4];
}

TEST_P(ElementOps, DropoutDecidesByElementAndSeedAlone) {
  EXPECT_EQ(philox(0, 0), 0x6627e8d5u);  // the known answer of Random123 for counter 0 and key 0
  for (const std::size_t n : {1, 5003, 20011})
    for (const std::uint64_t skip : {0, 1, 2, 3})
      for (const float p : {0.0f, 0.25f}) {
        if (n != 5003 && skip > 0) continue;
        const ops::DropoutMask mask{p, 0x123456789abcdefull, (1ull << 34) - 776 + skip};
        expect_right({.name = concat("dropout of ", n, " from ", skip),
                      .in = {{random_values(n, 5), {n}}},
                      .out = {n},
                      .forward = [&](const Operands& o) { ops::dropout(o.out, o.in[0], mask, o.stream); },
                      .value =
                          [&](const std::vector<Values>& in) {
                            Values out;
                            for (std::size_t i = 0; i < n; ++i) {
                              const bool drops = p > 0 && philox(mask.offset + i, mask.seed) < 1u << 30;
                              out.push_back(drops ? 0 : static_cast<float>(in[0][i]) * (1 / (1 - p)));
                            }
                            return out;
                          },
                      .bound = {0},
                      .in_place = true});
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

TEST_P(ElementOps, DropoutOfAPartIsThatOfTheWhole) {
  constexpr std::size_t run = 5, parts = 3, rows = 41;
  const Values x = random(run * parts * rows, 5);
  const Tensor whole = empty({rows, parts, run}), part = empty({rows, run});
  ops::dropout(whole, place(x, whole.shape()), {.p = 0.25f, .seed = 3, .offset = 7}, stream);
  const Values all = get(whole);
  for (std::size_t p = 0; p < parts; ++p) {
    Values in, expected;
    for (std::size_t i = 0; i < rows * run; ++i) {
      const std::size_t at = (i / run * parts + p) * run + i % run;
      in.push_back(x[at]), expected.push_back(all[at]);
    }
    ops::dropout(part, place(in, part.shape()),
                 {.p = 0.25f, .seed = 3, .offset = 7 + p * run, .run = run, .stride = parts * run}, stream);
    EXPECT_EQ(get(part), expected);
  }
}

/// The seed is read when the kernel runs, not when it is put into its stream.
TEST_P(ElementOps, DropoutReadsItsSeedLate) {
  const std::size_t n = 1000;
  const auto seed = std::reinterpret_pointer_cast<std::uint64_t>(allocate_on(stream.device(), 8));
  const Tensor in = place(random(n, 5), {n}), late = empty({n}), early = empty({n});
  std::vector<Values> all;
  for (const std::uint64_t s : {7, 8}) {
    memcpy_async(seed.get(), &s, sizeof s, stream);
    ops::dropout(late, in, {.p = 0.25f, .seed = 1, .offset = 3, .seed_at = seed.get()}, stream);
    ops::dropout(early, in, {.p = 0.25f, .seed = s, .offset = 3}, stream);
    all.push_back(get(late));
    EXPECT_EQ(all.back(), get(early));
  }
  EXPECT_NE(all[0], all[1]);
}

TEST_P(ElementOps, ActivationsOfExtremes) {
  const double large = dtype == DType::f16 ? 6e4 : 1e30;
  const Tensor in = place({-inf, -large, -100, -30, 0, 100, large, inf, NAN}, {9}), out = empty({9});
  const auto values = [&] { return get(out); };
  ops::unary(out, in, ops::Unary::tanh, stream);
  for (std::size_t i = 0; i < 8; ++i) EXPECT_EQ(values()[i], i < 4 ? -1 : i == 4 ? 0 : 1) << i;
  EXPECT_TRUE(std::isnan(values()[8]));
  ops::gelu(out, in, stream);
  for (std::size_t i = 1; i < 5; ++i) EXPECT_NEAR(values()[i], 0, 1e-7) << i;
  EXPECT_EQ(values()[5], 100);
  EXPECT_TRUE(std::isnan(values()[8]));
  ops::gelu_backward(out, place(Values(9, 1.0), {9}), in, Into::overwrite, stream);
  for (std::size_t i = 1; i < 7; ++i) EXPECT_NEAR(values()[i], i < 4 ? 0 : i == 4 ? 0.5 : 1, 1e-7) << i;
  for (const std::size_t i : {0, 7, 8}) EXPECT_TRUE(std::isnan(values()[i])) << i << ": as in PyTorch";
  ops::unary(out, in, ops::Unary::relu, stream);
  EXPECT_TRUE(std::isnan(values()[8]));
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
      {Unary::relu, {0, 0, -0.0, 0, 1, inf, nan}, {0, 0, 0, 0, 3, 3, 3}},
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
