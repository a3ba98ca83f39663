#include "sharding/optim/grad_norm.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <random>
#include <vector>

#include "tensor/ops.h"

namespace rz {
namespace {

double exact_sum(const std::vector<double>& values) {
  ExactSum sum;
  for (const double v : values) sum.add(v);
  return sum.value();
}

TEST(ExactSum, KeepsWhatOrdinaryAdditionLoses) {
  EXPECT_EQ(exact_sum({}), 0);
  EXPECT_EQ(exact_sum({1, 1e100, 1, -1e100}), 2);
  EXPECT_EQ(exact_sum({0x1p1023, -0x1p-1074, -0x1p1023}), -0x1p-1074);
  EXPECT_EQ(exact_sum({-3.5, 1.25}), -2.25);
  EXPECT_EQ(exact_sum(std::vector<double>(10, 0.1)),
            1.0);  // 10 · 0.1 rounds to 1, added one by one it does not
}

TEST(ExactSum, ValueIsRoundedToNearestEven) {
  EXPECT_EQ(exact_sum({1, 0x1p-53}), 1);                       // a tie goes to the even neighbour
  EXPECT_EQ(exact_sum({1 + 0x1p-52, 0x1p-53}), 1 + 0x1p-51);   // from here on upwards
  EXPECT_EQ(exact_sum({1, 0x1p-53, 0x1p-1074}), 1 + 0x1p-52);  // no tie: the smallest double decides
  EXPECT_EQ(exact_sum({-1, -0x1p-53, -0x1p-1074}), -1 - 0x1p-52);
  EXPECT_EQ(exact_sum({1 + 0x1p-52, 0x1p-53, -0x1p-1074}), 1 + 0x1p-52);
}

TEST(ExactSum, EveryMagnitudeComesBackAsItWas) {
  for (int exponent = -1074; exponent < 1024; ++exponent) {
    const double x = std::ldexp(1.0, exponent);
    ASSERT_EQ(exact_sum({x}), x);
    const double y = std::nextafter(x, 0);
    ASSERT_EQ(exact_sum({-y}), -y);
  }
  EXPECT_EQ(exact_sum({std::numeric_limits<double>::max()}), std::numeric_limits<double>::max());
  EXPECT_EQ(exact_sum({0x1p1023, 0x1p1023}), std::numeric_limits<double>::infinity());
}

TEST(ExactSum, InfinitiesAndNaNs) {
  const double inf = std::numeric_limits<double>::infinity();
  EXPECT_EQ(exact_sum({1, inf, 2}), inf);
  EXPECT_EQ(exact_sum({1, -inf, 2}), -inf);
  EXPECT_TRUE(std::isnan(exact_sum({inf, -inf})));
  EXPECT_TRUE(std::isnan(exact_sum({std::nan(""), 1})));
}

TEST(ExactSum, DoesNotDependOnOrderOrGrouping) {
  std::mt19937_64 random(7);
  std::uniform_int_distribution<int> exponent(-300, 300);
  std::uniform_real_distribution<double> mantissa(-1, 1);
  std::vector<double> values(3000);
  for (double& v : values) v = std::ldexp(mantissa(random), exponent(random));
  const double expected = exact_sum(values);
  for (int parts = 1; parts < 6; ++parts) {
    std::shuffle(values.begin(), values.end(), random);
    std::vector<ExactSum> partial(static_cast<std::size_t>(parts));
    for (std::size_t i = 0; i < values.size(); ++i) partial[i % partial.size()].add(values[i]);
    ExactSum total;
    for (const ExactSum& p : partial) total.add(p);
    EXPECT_EQ(total.value(), expected);
  }
}

TEST(AddSquares, SumsSquaresWhateverTheThreads) {
  std::vector<float> x(norm_block * 5001);
  for (std::size_t i = 0; i < x.size(); ++i) x[i] = static_cast<float>(static_cast<int>(i % 17) - 8);
  double expected = 0;
  for (const float v : x) expected += static_cast<double>(v) * v;
  for (const int threads : {1, 2, 3}) {
    ExactSum sum;
    add_squares(sum, x.data(), x.size(), Stream::host(threads));
    EXPECT_EQ(sum.value(), expected);
  }
  ExactSum none;
  add_squares(none, x.data(), 0, {});
  EXPECT_EQ(none.value(), 0);
}

/// The sum of 16-bit elements is that of their values in f32, for any number of threads.
TEST(SquareSumOf16Bits, IsExact) {
  const std::size_t count = 64 * 2500;
  for (const DType t : {DType::bf16, DType::f16}) {
    const Tensor narrow = Tensor::empty({count}, t), wide = Tensor::empty({count});
    for (std::size_t i = 0; i < count; ++i)
      wide.data<float>()[i] =
          std::ldexp(static_cast<float>(i * 7919 % 2003) - 1000, static_cast<int>(i % 17) - 8);
    ops::copy(narrow, wide, {});
    ops::copy(wide, narrow, {});
    Tensor none;
    SquareSum expected(Stream::host(1), none);
    expected.add(wide);
    for (const int threads : {1, 3}) {
      SquareSum sum(Stream::host(threads), none);
      sum.add(narrow);
      EXPECT_EQ(sum.read().value(), expected.read().value()) << name(t) << ", " << threads << " threads";
    }
  }
}

}  // namespace
}  // namespace rz
