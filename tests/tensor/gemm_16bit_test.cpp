// Runs: ci

// Products of 16-bit factors by every engine of this CPU.

#include "tensor/kernels/linear_algebra/gemm_16bit.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "comm/core/math.h"
#include "tests/support/reference.h"

namespace rz::test {
namespace {

using kernels::GemmEngine;
using kernels::Product16;

struct Size {
  std::size_t m, n, k;
};
// Around the sizes of tiles (16, 32), of packed blocks (128) and of blocks (512 columns and steps, 1024
// rows).
constexpr Size sizes[] = {{1, 1, 1},     {1, 70, 33},    {33, 17, 31},   {64, 64, 64},
                          {130, 34, 67}, {40, 515, 130}, {1030, 40, 65}, {19, 23, 1030}};
constexpr DType types[] = {DType::bf16, DType::f16};

std::vector<std::uint16_t> narrowed(const Values& values, DType t) {
  std::vector<std::uint16_t> bits;
  for (const double v : values) {
    const auto x = static_cast<float>(v);
    bits.push_back(t == DType::bf16 ? from_f32<bf16>(x).bits : from_f32<f16>(x).bits);
  }
  return bits;
}

double widened(std::uint16_t bits, DType t) {
  return static_cast<double>(t == DType::bf16 ? to_f32(bf16{bits}) : to_f32(f16{bits}));
}

Values widened(const std::vector<std::uint16_t>& bits, DType t) {
  Values values;
  for (const std::uint16_t b : bits) values.push_back(widened(b, t));
  return values;
}

/// Factors as stored, and their values as [m, k] and [k, n].
struct Factors {
  Factors(const Size& s, DType t, bool ta, bool tb, const Values& a_values, const Values& b_values)
      : size(s), type(t), transpose_a(ta), transpose_b(tb) {
    a = widened(narrowed(a_values, t), t), b = widened(narrowed(b_values, t), t);
    a_stored = narrowed(ta ? reference::transpose(a, s.m, s.k) : a, t);
    b_stored = narrowed(tb ? reference::transpose(b, s.k, s.n) : b, t);
  }
  Product16 product(void* c, DType result) const {
    return {.m = size.m,
            .n = size.n,
            .k = size.k,
            .factors = type,
            .a = {a_stored.data(), transpose_a ? size.m : size.k, transpose_a},
            .b = {b_stored.data(), transpose_b ? size.k : size.n, transpose_b},
            .c = c,
            .result = result,
            .c_stride = size.n};
  }
  Size size;
  DType type;
  bool transpose_a, transpose_b;
  Values a, b;
  std::vector<std::uint16_t> a_stored, b_stored;
};

template <class F>
void each_engine(const F& f) {
  for (const DType t : types)
    for (const GemmEngine* const engine : kernels::gemm_engines(t))
      if (engine) {
        SCOPED_TRACE(concat(name(t), " by ", engine->name));
        f(t, *engine);
      }
}

Values units(std::size_t n, unsigned seed) {
  Values values = random_values(n, seed, 1.5);
  for (double& v : values) v = std::round(v);
  return values;
}

TEST(Gemm16, ExactProductsOfEveryFormAndSize) {
  each_engine([](DType t, const GemmEngine& engine) {
    for (const Size& s : sizes)
      for (const bool ta : {false, true})
        for (const bool tb : {false, true}) {
          const Factors f(s, t, ta, tb, units(s.m * s.k, 1), units(s.k * s.n, 2));
          std::vector<float> c(s.m * s.n, std::numeric_limits<float>::quiet_NaN());
          kernels::gemm_16bit(f.product(c.data(), DType::f32), engine, Stream::host(2));
          const Values expected = reference::matmul(f.a, f.b, s.m, s.n, s.k);
          EXPECT_EQ(Values(c.begin(), c.end()), expected) << s.m << ' ' << s.n << ' ' << s.k << ta << tb;
        }
  });
}

/// A sum of k products in f32, in any order, is off by at most gamma · Σ|a b| with gamma = k u / (1 - k u)
/// and u = 2^-24 (Higham, Accuracy and Stability of Numerical Algorithms, 3.1; the products are exact in f32,
/// as each factor has at most 11 bits). AMX and AVX512-BF16 sum pairs, which does not enlarge it.
TEST(Gemm16, SumsAreOfF32) {
  each_engine([](DType t, const GemmEngine& engine) {
    for (const Size& s : sizes) {
      const Factors f(s, t, false, false, random_values(s.m * s.k, 1), random_values(s.k * s.n, 2));
      std::vector<float> c(s.m * s.n);
      kernels::gemm_16bit(f.product(c.data(), DType::f32), engine, Stream::host(2));
      const Values expected = reference::matmul(f.a, f.b, s.m, s.n, s.k);
      Values a = f.a, b = f.b;
      for (double& v : a) v = std::abs(v);
      for (double& v : b) v = std::abs(v);
      const Values bound = reference::matmul(a, b, s.m, s.n, s.k);
      const double ku = static_cast<double>(s.k) * 0x1p-24, gamma = ku / (1 - ku);
      for (std::size_t i = 0; i < c.size(); ++i)
        ASSERT_LE(std::abs(static_cast<double>(c[i]) - expected[i]), gamma * bound[i]) << i;
    }
  });
}

/// 16-bit results are the f32 results, rounded once: with a bias, and added to earlier values.
TEST(Gemm16, ResultsAreRoundedOnce) {
  each_engine([](DType t, const GemmEngine& engine) {
    const Size s{35, 50, 700};
    const Factors f(s, t, true, false, random_values(s.m * s.k, 1), random_values(s.k * s.n, 2));
    std::vector<float> wide(s.m * s.n);
    kernels::gemm_16bit(f.product(wide.data(), DType::f32), engine, {});
    const std::vector<std::uint16_t> bias = narrowed(random_values(s.n, 3), t),
                                     before = narrowed(random_values(s.m * s.n, 4), t);
    for (const bool accumulate : {false, true}) {
      std::vector<std::uint16_t> c = before;
      Product16 p = f.product(c.data(), t);
      p.accumulate = accumulate;
      if (!accumulate) p.bias = bias.data();
      kernels::gemm_16bit(p, engine, {});
      for (std::size_t i = 0; i < c.size(); ++i) {
        const auto added = static_cast<float>(widened(accumulate ? before[i] : bias[i % s.n], t));
        ASSERT_EQ(c[i], narrowed({static_cast<double>(wide[i] + added)}, t)[0]) << i;
      }
    }
  });
}

TEST(Gemm16, BitsDoNotDependOnTheThreads) {
  each_engine([](DType t, const GemmEngine& engine) {
    for (const Size& s : {Size{300, 40, 600}, Size{70, 1100, 90}}) {
      const Factors f(s, t, false, true, random_values(s.m * s.k, 1), random_values(s.k * s.n, 2));
      std::vector<float> first;
      for (const int threads : {1, 2, 3, 7}) {
        std::vector<float> c(s.m * s.n);
        kernels::gemm_16bit(f.product(c.data(), DType::f32), engine, Stream::host(threads));
        if (first.empty()) first = c;
        EXPECT_EQ(c, first) << threads;
      }
    }
  });
}

TEST(Gemm16, NothingToSumIsZero) {
  each_engine([](DType t, const GemmEngine& engine) {
    const Factors f({3, 5, 0}, t, false, false, {}, {});
    std::vector<float> c(15, 7);
    kernels::gemm_16bit(f.product(c.data(), DType::f32), engine, {});
    EXPECT_EQ(c, std::vector<float>(15, 0));
  });
}

/// Overflow must reach the loss scaler, from any place of a block.
TEST(Gemm16, InfinityAndNanSpread) {
  each_engine([](DType t, const GemmEngine& engine) {
    const Size s{34, 33, 37};
    Values a = units(s.m * s.k, 1);
    a[33 * s.k + 36] = std::numeric_limits<double>::infinity();
    a[2 * s.k + 5] = std::numeric_limits<double>::quiet_NaN();
    const Factors f(s, t, false, false, a, Values(s.k * s.n, 1.0));
    std::vector<float> c(s.m * s.n);
    kernels::gemm_16bit(f.product(c.data(), DType::f32), engine, {});
    for (std::size_t i = 0; i < c.size(); ++i) {
      const std::size_t row = i / s.n;
      EXPECT_EQ(std::isnan(c[i]), row == 2) << i;
      EXPECT_EQ(std::isinf(c[i]), row == 33) << i;
    }
  });
}

}  // namespace
}  // namespace rz::test
