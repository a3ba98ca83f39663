// Runs: ci host operators

// Conversion between f32 and 16 bits as comm/core/math.h has it, by the vectors of every target of a CPU and
// on a device.

#include <cmath>
#include <limits>

#include "comm/core/math.h"
#include "tensor/ops.h"
#include "tests/operators/operator.h"

namespace rz::test {
namespace {

template <class T>
class Conversion : public OnDevice {
 protected:
  /// Copied to a tensor of type To, and its elements from there.
  template <class To, class From>
  std::vector<To> converted(const std::vector<From>& values) const {
    const Tensor in = empty_on(stream, {values.size()}, dtype_of<From>),
                 out = empty_on(stream, {values.size()}, dtype_of<To>);
    in.assign(std::span<const From>(values), stream);
    ops::copy(out, in, stream);
    const Tensor host = out.on_host(stream);
    return {host.data<To>(), host.data<To>() + host.count()};
  }
};
using Types = testing::Types<f16, bf16>;
TYPED_TEST_SUITE(Conversion, Types);

TYPED_TEST(Conversion, EveryNumberWidensExactlyAndComesBack) {
  using T = TypeParam;
  std::vector<T> narrow(1 << 16);
  for (std::size_t i = 0; i < narrow.size(); ++i) narrow[i] = {static_cast<std::uint16_t>(i)};
  each_target([&] {
    const std::vector<float> wide = this->template converted<float>(narrow);
    const std::vector<T> back = this->template converted<T>(wide);
    for (std::size_t i = 0; i < narrow.size(); ++i) {
      const float expected = to_f32(narrow[i]);
      if (std::isnan(expected)) {
        ASSERT_TRUE(std::isnan(wide[i])) << i;
        ASSERT_TRUE(std::isnan(to_f32(back[i]))) << i;
        continue;
      }
      ASSERT_EQ(wide[i], expected) << i;
      ASSERT_EQ(back[i].bits, i);
    }
  });
}

/// f32 around every 16-bit number: the number, its neighbours, the midpoints to the next and their
/// neighbours; and NaN of some bits, of which 0x7fffffff is a device's.
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
  for (const std::uint32_t nan : {0x7fffffffu, 0xffffffffu, 0x7f800001u, 0x7f80ffffu, 0x7fc00000u})
    values.insert(values.end(), 8, detail::float_of(nan));
  each_target([&] {
    const std::vector<T> narrow = this->template converted<T>(values);
    for (std::size_t i = 0; i < values.size(); ++i)
      if (std::isnan(values[i]))
        ASSERT_TRUE(std::isnan(to_f32(narrow[i]))) << i;
      else
        ASSERT_EQ(narrow[i].bits, from_f32<T>(values[i]).bits) << values[i];
  });
}

}  // namespace
}  // namespace rz::test
