// Runs: ci operators

// Sums of squares on a device have the host's bits.

#include "sharding/optim/grad_norm.h"

#include <gtest/gtest.h>

#include <array>
#include <cmath>
#include <limits>
#include <random>

#include "tensor/kernels/device_ops.h"
#include "tests/gpu/on_device.h"
#include "tests/support/reference.h"

namespace rz::test {
namespace {

class DeviceNorm : public OnDevice {
 protected:
  /// Of all tensors, by the device; added to the contents of `sum`.
  void add_on_device(const Tensor& sum, const std::vector<Tensor>& all) const {
    std::vector<ops::Squared> list;
    for (const Tensor& t : all) list.push_back({t.raw(), t.dtype(), t.count()});
    ops::device_ops().optimizer.add_squares(sum.data<std::int64_t>(), list, stream);
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
  double sum_on_host(const std::vector<Tensor>& all) const {
    ExactSum sum;
    for (const Tensor& t : all) {
      const Values v = from_device(t, stream);
      const std::vector<float> x(v.begin(), v.end());
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
  EXPECT_EQ(value(sum), sum_on_host(all));
  add_on_device(sum, all);
  EXPECT_EQ(value(sum), 2 * sum_on_host(all));
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
  EXPECT_EQ(value(sum), sum_on_host(all));
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
  EXPECT_EQ(total.value(), sum_on_host({a, b}));
}

TEST_F(DeviceNorm, BlocksAreWhole) {
  const Tensor a = to_device(random_values(65, 1), {65}, DType::f32, stream);
  EXPECT_THROW(add_on_device(zeros(), {a}), Error);
}

}  // namespace
}  // namespace rz::test
