// Runs: ci

// Conversion between f32 and 16 bits by the vectors of every target of this CPU, as comm/core/math.h has it.

#include <gtest/gtest.h>
#include <hwy/targets.h>

#include <cmath>
#include <functional>
#include <limits>

#include "comm/core/math.h"
#include "tensor/ops.h"

namespace rz::test {
namespace {

/// Runs f with the kernels of each target.
void each_target(const std::function<void()>& f) {
  const std::int64_t all = hwy::SupportedTargets();
  for (std::int64_t rest = all; rest != 0; rest &= rest - 1) {
    const std::int64_t target = rest & -rest;
    SCOPED_TRACE(hwy::TargetName(target));
    hwy::SetSupportedTargetsForTest(target);
    hwy::GetChosenTarget().Update(hwy::SupportedTargets());
    f();
  }
  hwy::SetSupportedTargetsForTest(0);
  hwy::GetChosenTarget().Update(hwy::SupportedTargets());
}

template <class T>
class Conversion : public testing::Test {};
using Types = testing::Types<f16, bf16>;
TYPED_TEST_SUITE(Conversion, Types);

TYPED_TEST(Conversion, EveryNumberWidensExactlyAndComesBack) {
  using T = TypeParam;
  constexpr std::size_t n = 1 << 16;
  const Tensor narrow = Tensor::empty({n}, dtype_of<T>), wide = Tensor::empty({n}),
               back = Tensor::empty({n}, dtype_of<T>);
  for (std::size_t i = 0; i < n; ++i) narrow.data<T>()[i] = {static_cast<std::uint16_t>(i)};
  each_target([&] {
    ops::copy(wide, narrow, {});
    ops::copy(back, wide, {});
    for (std::size_t i = 0; i < n; ++i) {
      const float expected = to_f32(narrow.data<T>()[i]), got = wide.data<float>()[i];
      if (std::isnan(expected)) {
        ASSERT_TRUE(std::isnan(got)) << i;
        ASSERT_TRUE(std::isnan(to_f32(back.data<T>()[i]))) << i;
        continue;
      }
      ASSERT_EQ(got, expected) << i;
      ASSERT_EQ(back.data<T>()[i].bits, i);
    }
  });
}

/// f32 around every 16-bit number: the number, its neighbours, the midpoints to the next and their
/// neighbours.
TYPED_TEST(Conversion, RoundsToNearestTiesToEven) {
  using T = TypeParam;
  std::vector<float> values;
  for (std::uint32_t i = 0; i < (1u << 16); ++i) {
    const float x = to_f32(T{static_cast<std::uint16_t>(i)}),
                next = to_f32(T{static_cast<std::uint16_t>(i + 1)});
    if (std::isnan(x)) continue;
    const float middle = std::isfinite(next) && std::isfinite(x) ? x / 2 + next / 2 : x;
    for (const float v : {x, middle})
      for (const float direction : {-INFINITY, INFINITY}) {
        values.push_back(v);
        values.push_back(std::nextafterf(v, direction));
      }
  }
  values.push_back(std::numeric_limits<float>::max());
  values.push_back(-std::numeric_limits<float>::quiet_NaN());
  const Tensor wide = Tensor::borrow(values.data(), {values.size()}),
               narrow = Tensor::empty({values.size()}, dtype_of<T>);
  each_target([&] {
    ops::copy(narrow, wide, {});
    for (std::size_t i = 0; i < values.size(); ++i) {
      const T expected = from_f32<T>(values[i]), got = narrow.data<T>()[i];
      if (std::isnan(values[i]))
        ASSERT_TRUE(std::isnan(to_f32(got)));
      else
        ASSERT_EQ(got.bits, expected.bits) << values[i];
    }
  });
}

}  // namespace
}  // namespace rz::test
