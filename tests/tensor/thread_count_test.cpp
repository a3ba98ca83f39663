// Runs: ci

// Products have the same bits for any number of threads, in f32 if the stream is reproducible for any. Rows
// of a product of a few have the same bits as alone.

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <random>
#include <vector>

#include "comm/core/math.h"
#include "tensor/ops.h"

namespace rz {
namespace {

struct Product {
  std::size_t m, n, k;
  bool transpose_a, transpose_b;
  bool accumulates;
};

std::vector<float> numbers(std::size_t count, std::mt19937& random) {
  std::uniform_real_distribution<float> distribution(-1, 1);
  std::vector<float> out(count);
  for (float& x : out) x = distribution(random);
  return out;
}

Tensor matrix(const std::vector<float>& values, std::size_t rows, std::size_t columns, DType dtype) {
  Tensor out = Tensor::empty({rows, columns}, dtype);
  ops::copy(out, Tensor::borrow(const_cast<float*>(values.data()), {rows, columns}), {});
  return out;
}

class Products {
 public:
  Products(const Product& p, DType dtype, std::mt19937& random)
      : p_(p),
        a_(matrix(numbers(p.m * p.k, random), p.transpose_a ? p.k : p.m, p.transpose_a ? p.m : p.k, dtype)),
        b_(matrix(numbers(p.k * p.n, random), p.transpose_b ? p.n : p.k, p.transpose_b ? p.k : p.n, dtype)),
        start_(numbers(p.m * p.n, random)) {}

  std::vector<float> compute(int threads) const {
    std::vector<float> out = start_;
    const Tensor c = Tensor::borrow(out.data(), {p_.m, p_.n});
    ops::matmul(c, a_, p_.transpose_a, b_, p_.transpose_b,
                p_.accumulates ? ops::Into::accumulate : ops::Into::overwrite,
                Stream::host(threads, Stream::Reproducible::for_any_threads));
    return out;
  }

 private:
  Product p_;
  Tensor a_, b_;
  std::vector<float> start_;
};

bool same_bits(const std::vector<float>& a, const std::vector<float>& b) {
  return std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
}

/// Of many small extents, where a BLAS has kernels of its own, and some larger ones.
Product random_product(std::mt19937& random) {
  const auto below = [&](std::size_t n) { return 1 + random() % n; };
  const std::size_t limit = random() % 4 == 0 ? 500 : 140;
  return {below(limit),      below(limit),      below(random() % 8 == 0 ? 900 : limit),
          random() % 2 == 0, random() % 2 == 0, random() % 2 == 0};
}

int shapes() {
  const char* const given = std::getenv("RZ_PRODUCTS");
  return given ? std::atoi(given) : 400;
}

void expect_same_bits(DType dtype, int count) {
  std::mt19937 random(7);
  int different = 0;
  for (int i = 0; i < count; ++i) {
    const Product p = random_product(random);
    const Products products(p, dtype, random);
    const std::vector<float> one = products.compute(1);
    for (const int threads : {2, 3, 4, 8}) {
      const bool same = same_bits(one, products.compute(threads));
      if (!same && ++different <= 5)
        ADD_FAILURE() << threads << " threads: " << p.m << " x " << p.n << " x " << p.k
                      << (p.transpose_a ? ", a transposed" : "") << (p.transpose_b ? ", b transposed" : "")
                      << (p.accumulates ? ", accumulated" : "");
    }
  }
  EXPECT_EQ(different, 0) << "of " << 4 * count;
}

/// RZ_PRODUCTS: number of shapes.
TEST(ThreadCount, ProductsInF32HaveTheSameBits) { expect_same_bits(DType::f32, shapes()); }
TEST(ThreadCount, ProductsIn16BitsHaveTheSameBits) {
  expect_same_bits(DType::bf16, shapes() / 8);
  expect_same_bits(DType::f16, shapes() / 8);
}

// ---- a few rows

/// x[m, in] · weight + bias, with columns of wider matrices as operands; in f32.
std::vector<float> few_rows(const std::vector<float>& x, const std::vector<float>& weight,
                            const std::vector<float>& bias, std::size_t m, std::size_t in, std::size_t out,
                            ops::WeightLayout layout, DType dtype, int threads) {
  const auto columns = [&](const std::vector<float>& values, std::size_t rows) {
    const std::size_t n = values.size() / rows;
    const Tensor wide = Tensor::empty({rows, n + 3}, dtype), part = wide.columns(2, n);
    ops::fill(wide, 1e6f, {});
    ops::copy(part, matrix(values, rows, n, dtype), {});
    return part;
  };
  const bool in_out = layout == ops::WeightLayout::in_out;
  const Tensor y = Tensor::empty({m, out + 5}, dtype), f32 = Tensor::empty({m, out});
  ops::fill(y, 7, {});
  ops::linear(y.columns(1, out), columns(x, m), columns(weight, in_out ? in : out),
              bias.empty() ? Tensor() : matrix(bias, 1, out, dtype).reshape({out}), layout,
              Stream::host(threads));
  for (std::size_t r = 0; r < m; ++r) {  // nothing beside the result is written
    ops::copy(f32.view(0, {1}), y.view(r * (out + 5), {1}), {});
    EXPECT_EQ(f32.data<float>()[0], 7);
    ops::copy(f32.view(0, {4}), y.view(r * (out + 5) + 1 + out, {4}), {});
    for (int i = 0; i < 4; ++i) EXPECT_EQ(f32.data<float>()[i], 7);
  }
  ops::copy(f32, y.columns(1, out), {});
  return {f32.data<float>(), f32.data<float>() + f32.count()};
}

struct FewRows {
  std::size_t in, out;
};
/// With and without a rest of a vector, of four rows, and of a block of columns.
constexpr FewRows few_rows_sizes[] = {{64, 16}, {37, 70}, {10, 1100}, {3, 5}};

TEST(FewRows, ProductsOfSmallNumbersAreExact) {
  std::mt19937 random(5);
  const auto integers = [&](std::size_t n) {
    std::vector<float> v(n);
    for (float& x : v) x = static_cast<float>(random() % 5) - 2;
    return v;
  };
  for (const DType dtype : {DType::f32, DType::bf16, DType::f16})
    for (const auto& [in, out] : few_rows_sizes)
      for (const bool in_out : {false, true})
        for (const std::size_t m : {1, 2, 3, 5, 8, 9}) {
          const std::vector<float> x = integers(m * in), w = integers(in * out),
                                   b = m % 2 ? integers(out) : std::vector<float>();
          const std::vector<float> y = few_rows(
              x, w, b, m, in, out, in_out ? ops::WeightLayout::in_out : ops::WeightLayout::out_in, dtype, 2);
          int wrong = 0;
          for (std::size_t r = 0; r < m; ++r)
            for (std::size_t j = 0; j < out; ++j) {
              float sum = b.empty() ? 0 : b[j];  // below 2^24: exact in any order
              for (std::size_t i = 0; i < in; ++i)
                sum += x[r * in + i] * w[in_out ? i * out + j : j * in + i];
              const float rounded = dtype == DType::f32    ? sum
                                    : dtype == DType::bf16 ? to_f32(from_f32<bf16>(sum))
                                                           : to_f32(from_f32<f16>(sum));
              wrong += y[r * out + j] != rounded;
            }
          EXPECT_EQ(wrong, 0) << name(dtype) << ", " << m << " rows, " << in << " to " << out
                              << (in_out ? ", in_out" : "");
        }
}

TEST(FewRows, ARowHasTheBitsThatItHasAlone) {
  std::mt19937 random(6);
  for (const DType dtype : {DType::f32, DType::bf16})
    for (const auto& [in, out] : few_rows_sizes)
      for (const auto layout : {ops::WeightLayout::out_in, ops::WeightLayout::in_out}) {
        const std::vector<float> x = numbers(8 * in, random), w = numbers(in * out, random),
                                 b = numbers(out, random);
        const auto first = [&](std::size_t rows) {
          return std::vector<float>(x.begin(), x.begin() + static_cast<std::ptrdiff_t>(rows * in));
        };
        std::vector<float> alone;
        for (std::size_t r = 0; r < 8; ++r) {
          const auto row = x.begin() + static_cast<std::ptrdiff_t>(r * in);
          const auto y =
              few_rows({row, row + static_cast<std::ptrdiff_t>(in)}, w, b, 1, in, out, layout, dtype, 1);
          alone.insert(alone.end(), y.begin(), y.end());
        }
        for (const std::size_t m : {1, 2, 3, 8}) {
          const auto y = few_rows(first(m), w, b, m, in, out, layout, dtype, 3);
          EXPECT_TRUE(std::equal(y.begin(), y.end(), alone.begin()))
              << m << " rows, " << in << " to " << out << ", " << name(dtype);
        }
      }
}

}  // namespace
}  // namespace rz
