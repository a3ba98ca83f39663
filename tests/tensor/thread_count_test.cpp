// Products have the same bits for any number of threads, in f32 if the stream is reproducible for any.

#include <gtest/gtest.h>

#include <cstdlib>
#include <cstring>
#include <random>
#include <vector>

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

}  // namespace
}  // namespace rz
