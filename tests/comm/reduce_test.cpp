// Runs: ci pure computes

#include "comm/reduce/reduce.h"

#include <gtest/gtest.h>
#include <hwy/targets.h>

#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <numeric>
#include <random>
#include <type_traits>
#include <vector>

#include "comm/core/error.h"
#include "comm/core/math.h"
#include "tests/support/elements.h"

namespace rz {
namespace {

constexpr ReduceOp::Kind ops[] = {ReduceOp::sum, ReduceOp::avg, ReduceOp::prod,
                                  ReduceOp::min, ReduceOp::max, ReduceOp::premul_sum};

template <class T>
T element(double x) {
  if constexpr (std::is_arithmetic_v<T>)
    return std::is_integral_v<T> ? static_cast<T>(static_cast<std::int64_t>(x)) : static_cast<T>(x);
  else
    return from_f32<T>(static_cast<float>(x));
}

double fold(ReduceOp::Kind op, double a, double b) {
  switch (op) {
    case ReduceOp::prod:
      return a * b;
    case ReduceOp::min:
      return std::isnan(a) || std::isnan(b) ? NAN : std::min(a, b);
    case ReduceOp::max:
      return std::isnan(a) || std::isnan(b) ? NAN : std::max(a, b);
    default:
      return a + b;
  }
}

/// In double, which is exact for the small whole numbers of these tests, except for one rounding at the end.
template <class T>
T expected(ReduceOp::Kind op, const std::vector<std::vector<T>>& sources, std::size_t i, int divide) {
  double sum = test::widened(sources[0][i]);
  for (std::size_t s = 1; s < sources.size(); ++s) sum = fold(op, sum, test::widened(sources[s][i]));
  if (op != ReduceOp::avg) return element<T>(sum);
  return element<T>(std::is_integral_v<T> ? std::trunc(sum / divide) : sum / divide);
}

/// Whole numbers of magnitude 1 to 3, without zero, so that products depend on every factor.
template <class T>
std::vector<std::vector<T>> small_numbers(int sources, std::size_t count) {
  std::vector<std::vector<T>> all(static_cast<std::size_t>(sources));
  std::size_t n = 0;
  for (auto& source : all)
    for (std::size_t i = 0; i < count; ++i, ++n) {
      const double magnitude = 1 + static_cast<double>((n * 7 + i / 5) % 3);
      source.push_back(element<T>(!std::is_unsigned_v<T> && n % 2 ? -magnitude : magnitude));
    }
  return all;
}

template <class T>
std::vector<const void*> pointers(const std::vector<std::vector<T>>& sources) {
  std::vector<const void*> all;
  for (const auto& source : sources) all.push_back(source.data());
  return all;
}

template <class T>
class Reduce : public testing::Test {};
using Types = testing::Types<float, double, f16, bf16, f8e4m3, f8e5m2, std::int8_t, std::uint8_t,
                             std::int32_t, std::uint32_t, std::int64_t, std::uint64_t>;
TYPED_TEST_SUITE(Reduce, Types);

/// dst = -1: separate memory; otherwise that source.
template <class T>
void check(ReduceOp::Kind op, std::size_t count, int sources, int dst, int divide) {
  std::vector<T> want;
  for (const bool twice : {false, true}) {
    auto in = small_numbers<T>(sources, count);
    std::vector<T> own(count), too(count);
    want.clear();
    for (std::size_t i = 0; i < count; ++i) want.push_back(expected(op, in, i, divide));
    std::vector<T>& out = dst < 0 ? own : in[static_cast<std::size_t>(dst)];
    if (twice)
      reduce_to_both(out.data(), too.data(), pointers(in), count, dtype_of<T>, op, divide);
    else
      reduce(out.data(), pointers(in), count, dtype_of<T>, op, divide);
    ASSERT_EQ(out, want) << name(ReduceOp(op)) << " count " << count << " sources " << sources << " dst "
                         << dst << " twice " << twice;
    ASSERT_EQ(too, twice ? want : std::vector<T>(count))
        << name(ReduceOp(op)) << " count " << count << " sources " << sources;
  }
}

TYPED_TEST(Reduce, MatchesADoubleReference) {
  for (ReduceOp::Kind op : ops)
    for (std::size_t count : {0, 1, 3, 7, 8, 63, 64, 65, 1000, 9001})
      for (int sources : {1, 2, 3, 5})
        for (int dst = -1; dst < sources; ++dst) {
          check<TypeParam>(op, count, sources, dst, 1);
          check<TypeParam>(op, count, sources, dst, 3);
        }
}

TYPED_TEST(Reduce, TouchesNothingBeyondItsElements) {
  auto in = small_numbers<TypeParam>(2, 40);
  for (std::size_t offset = 0; offset < 4; ++offset)
    for (std::size_t count : {1, 5, 17, 33}) {
      std::vector<TypeParam> out(40, element<TypeParam>(7)), want = out;
      for (std::size_t i = 0; i < count; ++i)
        want[offset + i] =
            element<TypeParam>(test::widened(in[0][offset + i]) + test::widened(in[1][offset + i]));
      const void* sources[] = {in[0].data() + offset, in[1].data() + offset};
      reduce(out.data() + offset, sources, count, dtype_of<TypeParam>, ReduceOp::sum);
      ASSERT_EQ(out, want);
    }
}

TYPED_TEST(Reduce, ScaleMultiplies) {
  auto in = small_numbers<TypeParam>(1, 100)[0];
  const double factor = 2.5;
  std::vector<TypeParam> out(100), want;
  for (TypeParam x : in) {
    const double product = test::widened(x) * factor;
    want.push_back(element<TypeParam>(std::is_integral_v<TypeParam> ? std::nearbyint(product) : product));
  }
  scale(out.data(), in.data(), in.size(), dtype_of<TypeParam>, factor);
  EXPECT_EQ(out, want);
  scale(in.data(), in.data(), in.size(), dtype_of<TypeParam>, factor);
  EXPECT_EQ(in, want);
}

template <class T>
class ReduceFloats : public testing::Test {};
using Floats = testing::Types<float, double, f16, bf16, f8e4m3, f8e5m2>;
TYPED_TEST_SUITE(ReduceFloats, Floats);

TYPED_TEST(ReduceFloats, ANanWinsWhereverItStands) {
  for (ReduceOp::Kind op : {ReduceOp::min, ReduceOp::max})
    for (int sources : {2, 3, 5})
      for (int where = 0; where < sources; ++where) {
        auto in = small_numbers<TypeParam>(sources, 67);
        in[static_cast<std::size_t>(where)][20] = element<TypeParam>(NAN);
        in[static_cast<std::size_t>(where)][66] = element<TypeParam>(NAN);
        std::vector<TypeParam> out(67);
        reduce(out.data(), pointers(in), out.size(), dtype_of<TypeParam>, op);
        for (std::size_t i = 0; i < out.size(); ++i) {
          if (i == 20 || i == 66)
            ASSERT_TRUE(std::isnan(test::widened(out[i]))) << i;
          else
            ASSERT_EQ(out[i], expected(op, in, i, 1)) << i;
        }
      }
}

template <class T>
using BitsOf =
    std::conditional_t<sizeof(T) == 8, std::uint64_t,
                       std::conditional_t<sizeof(T) == 4, std::uint32_t,
                                          std::conditional_t<sizeof(T) == 2, std::uint16_t, std::uint8_t>>>;
template <class T>
T with_bits(std::uint64_t bits) {
  const auto own = static_cast<BitsOf<T>>(bits);
  T x;
  std::memcpy(&x, &own, sizeof x);
  return x;
}
template <class T>
std::uint64_t bits_in(T x) {
  BitsOf<T> bits;
  std::memcpy(&bits, &x, sizeof bits);
  return bits;
}

/// The quiet NaN without a sign, and without a payload where there is room for one.
template <class T>
constexpr std::uint64_t canonical_nan = 0;
template <>
constexpr std::uint64_t canonical_nan<float> = 0x7fc00000;
template <>
constexpr std::uint64_t canonical_nan<double> = 0x7ff8000000000000;
template <>
constexpr std::uint64_t canonical_nan<f16> = 0x7e00;
template <>
constexpr std::uint64_t canonical_nan<bf16> = 0x7fc0;
template <>
constexpr std::uint64_t canonical_nan<f8e4m3> = 0x7f;
template <>
constexpr std::uint64_t canonical_nan<f8e5m2> = 0x7e;

/// Zeros, ones, infinities if the type has any, and NaNs of all kinds.
template <class T>
std::vector<T> special_numbers() {
  constexpr std::uint64_t sign = std::uint64_t{1} << (8 * sizeof(T) - 1);
  std::vector<T> all;
  for (const double x : {0.0, 1.0, 2.5, static_cast<double>(INFINITY)}) all.push_back(element<T>(x));
  for (const std::uint64_t nan : {canonical_nan<T>, canonical_nan<T> | 1}) all.push_back(with_bits<T>(nan));
  for (std::size_t i = 0, n = all.size(); i < n; ++i) all.push_back(with_bits<T>(bits_in(all[i]) | sign));
  return all;
}

/// By value; -0 before +0; a NaN before and after all else.
template <class T>
std::uint64_t extreme(ReduceOp::Kind op, T a, T b) {
  if (std::isnan(test::widened(a)) || std::isnan(test::widened(b))) return canonical_nan<T>;
  const auto rank = [](T x) { return std::pair(test::widened(x), !std::signbit(test::widened(x))); };
  return bits_in((op == ReduceOp::min) == (rank(a) < rank(b)) ? a : b);
}

/// Calls f(name) with each code path of reduce().
template <class F>
void on_each_path(const F& f) {
  for (std::int64_t target : {HWY_AVX3, HWY_AVX2, HWY_EMU128, HWY_SCALAR}) {
    if (target != HWY_SCALAR && target != HWY_EMU128 && !(hwy::SupportedTargets() & target)) continue;
    hwy::SetSupportedTargetsForTest(target);
    hwy::GetChosenTarget().Update(hwy::SupportedTargets());
    f(hwy::TargetName(target));
    hwy::SetSupportedTargetsForTest(0);
    hwy::GetChosenTarget().Update(hwy::SupportedTargets());
  }
}

// Ranks reduce the same contributions in different orders, for example over MPI, and still have the same
// bits.
TYPED_TEST(ReduceFloats, MinAndMaxHaveTheSameBitsInEveryOrder) {
  const std::vector<TypeParam> special = special_numbers<TypeParam>();
  std::vector<TypeParam> a, b;
  for (int times = 0; times < 3; ++times)
    for (const TypeParam x : special)
      for (const TypeParam y : special) a.push_back(x), b.push_back(y);
  const std::vector<TypeParam> one(a.size(), element<TypeParam>(1));
  for (const ReduceOp::Kind op : {ReduceOp::min, ReduceOp::max}) {
    const TypeParam last = with_bits<TypeParam>(extreme(op, special[1], special[1]));
    on_each_path([&](const char* path) {
      std::vector<TypeParam> ab(a.size()), ba(a.size()), three(a.size()), too(a.size());
      const std::vector<const void*> sources{a.data(), b.data()}, swapped{b.data(), a.data()},
          more{a.data(), one.data(), b.data()};
      reduce_to_both(ab.data(), too.data(), sources, a.size(), dtype_of<TypeParam>, op);
      reduce(ba.data(), swapped, a.size(), dtype_of<TypeParam>, op);
      reduce(three.data(), more, a.size(), dtype_of<TypeParam>, op);
      for (std::size_t i = 0; i < a.size(); ++i) {
        const std::uint64_t want = extreme(op, a[i], b[i]);
        const std::string what =
            concat(path, ' ', name(ReduceOp(op)), " of ", test::widened(a[i]), " and ", test::widened(b[i]));
        ASSERT_EQ(bits_in(ab[i]), want) << what;
        ASSERT_EQ(bits_in(too[i]), want) << what;
        ASSERT_EQ(bits_in(ba[i]), want) << what;
        ASSERT_EQ(bits_in(three[i]), extreme(op, with_bits<TypeParam>(want), last)) << what;
      }
    });
  }
}

/// The tree of sources [first, last), in T or, for small floats, in f32: the left half is the largest power
/// of two that leaves something for the right one.
template <class Wide, class T>
Wide tree(ReduceOp::Kind op, const std::vector<std::vector<T>>& sources, std::size_t first, std::size_t last,
          std::size_t i) {
  if (last - first == 1) return static_cast<Wide>(test::widened(sources[first][i]));
  const std::size_t middle = first + std::bit_floor(last - first - 1);
  const Wide a = tree<Wide>(op, sources, first, middle, i), b = tree<Wide>(op, sources, middle, last, i);
  return op == ReduceOp::prod ? a * b : a + b;
}

TYPED_TEST(ReduceFloats, PairwiseOrderIsATreeOnEveryPath) {
  using T = TypeParam;
  using Wide = std::conditional_t<std::is_arithmetic_v<T>, T, float>;
  constexpr ReductionOrder pairwise = ReductionOrder::pairwise;
  std::mt19937 random(5);
  std::normal_distribution<double> normal(0, 1);
  for (const std::size_t n : {1u, 2u, 3u, 4u, 5u, 6u, 7u, 8u, 9u, 12u, 13u, 16u, 17u, 33u, 65u})
    for (const std::size_t count : {1u, 2u, 15u, 1027u, 4099u}) {
      if (n > 17 && count != 1027u) continue;
      std::vector<std::vector<T>> in(n);
      for (auto& source : in)
        for (std::size_t i = 0; i < count; ++i) source.push_back(element<T>(normal(random)));
      for (const ReduceOp::Kind op : {ReduceOp::sum, ReduceOp::prod, ReduceOp::avg}) {
        std::vector<T> want;
        for (std::size_t i = 0; i < count; ++i) {
          const Wide sum = tree<Wide>(op, in, 0, n, i);
          want.push_back(element<T>(op == ReduceOp::avg ? sum / Wide(3) : sum));
        }
        on_each_path([&](const char* path) {
          std::vector<T> out(count), too(count);
          reduce_to_both(out.data(), too.data(), pointers(in), count, dtype_of<T>, op, 3, pairwise);
          ASSERT_EQ(out, want) << path << ' ' << name(ReduceOp(op)) << ' ' << n << " sources of " << count;
          ASSERT_EQ(too, want) << path;
          for (const std::size_t dst : {std::size_t{0}, n / 2, n - 1}) {
            auto same = in;
            reduce(same[dst].data(), pointers(same), count, dtype_of<T>, op, 3, pairwise);
            ASSERT_EQ(same[dst], want) << path << " in source " << dst << " of " << n;
          }
        });
      }
    }
}

TEST(ReduceOrder, MakesNoDifferenceUpToThreeSources) {
  const float x = 1e8f, y = 1, z = -1e8f;
  const void* sources[] = {&x, &y, &z, &y};
  for (const std::size_t n : {1u, 2u, 3u, 4u}) {
    float left = 0, tree = 0;
    reduce(&left, {sources, n}, 1, DType::f32, ReduceOp::sum);
    reduce(&tree, {sources, n}, 1, DType::f32, ReduceOp::sum, 1, ReductionOrder::pairwise);
    EXPECT_EQ(left == tree, n <= 3) << n;
  }
}

TEST(ReduceRounding, SmallFloatsAreRoundedOnce) {
  // 2048 + 1 is no f16: rounded twice, two ones are lost; rounded once, they make 2050.
  const f16 large = from_f32<f16>(2048), one = from_f32<f16>(1);
  const void* sources[] = {&large, &one, &one};
  f16 out{};
  reduce(&out, sources, 1, DType::f16, ReduceOp::sum);
  EXPECT_EQ(to_f32(out), 2050.0f);
}

TEST(ReduceRounding, SumsAreLeftFolds) {
  const std::vector<float> values{1e8f, -1e8f, 1.0f, 0.25f};
  std::vector<const void*> sources;
  for (const float& v : values) sources.push_back(&v);
  float out = 0;
  reduce(&out, sources, 1, DType::f32, ReduceOp::sum);
  EXPECT_EQ(out, 1.25f);
  std::swap(sources[1], sources[2]);
  reduce(&out, sources, 1, DType::f32, ReduceOp::sum);
  EXPECT_EQ(out, 0.25f);
}

TEST(ReduceRounding, EightBitFloatsSaturate) {
  const f8e4m3 x = from_f32<f8e4m3>(400);
  const f8e5m2 y = from_f32<f8e5m2>(-57344);
  const void *xs[] = {&x, &x}, *ys[] = {&y, &y};
  f8e4m3 a{};
  f8e5m2 b{};
  reduce(&a, xs, 1, DType::f8e4m3, ReduceOp::sum);
  reduce(&b, ys, 1, DType::f8e5m2, ReduceOp::sum);
  EXPECT_EQ(to_f32(a), 448.0f);
  EXPECT_EQ(to_f32(b), -57344.0f);
}

TEST(ReduceIntegers, WrapAndTruncate) {
  const std::vector<std::int8_t> a{127, -7, 100}, b{1, -8, 100};
  const void* sources[] = {a.data(), b.data()};
  std::vector<std::int8_t> out(3);
  reduce(out.data(), sources, 3, DType::i8, ReduceOp::sum);
  EXPECT_EQ(out, (std::vector<std::int8_t>{-128, -15, -56}));
  reduce(out.data(), sources, 3, DType::i8, ReduceOp::avg, 2);
  EXPECT_EQ(out, (std::vector<std::int8_t>{-64, -7, -28}));
  reduce(out.data(), sources, 3, DType::i8, ReduceOp::avg, 300);
  EXPECT_EQ(out, (std::vector<std::int8_t>{0, 0, 0}));

  const std::int64_t large = std::numeric_limits<std::int64_t>::max(), two = 2;
  const void* longs[] = {&large, &two};
  std::int64_t product = 0;
  reduce(&product, longs, 1, DType::i64, ReduceOp::prod);
  EXPECT_EQ(product, -2);
}

TEST(ReduceIntegers, ScaleRoundsToNearestAndStaysInRange) {
  const std::vector<std::int8_t> in{1, 3, 5, 100, -100};
  std::vector<std::int8_t> out(5);
  scale(out.data(), in.data(), 5, DType::i8, 0.5);
  EXPECT_EQ(out, (std::vector<std::int8_t>{0, 2, 2, 50, -50}));  // ties to even
  scale(out.data(), in.data(), 5, DType::i8, 1e9);
  EXPECT_EQ(out, (std::vector<std::int8_t>{127, 127, 127, 127, -128}));
}

TEST(ReduceErrors, ASourceIsNeeded) {
  float out = 0;
  EXPECT_THROW(reduce(&out, {}, 1, DType::f32, ReduceOp::sum), Error);
}

/// Any bits, apart from NaNs: the processor decides which of two NaNs an addition keeps.
std::vector<std::vector<unsigned char>> random_bits(int sources, std::size_t count, DType dtype) {
  std::mt19937 random(7);
  std::vector<std::vector<unsigned char>> all(static_cast<std::size_t>(sources));
  for (auto& source : all) {
    source.resize(count * size_of(dtype));
    for (unsigned char& byte : source) byte = static_cast<unsigned char>(random());
    for (std::size_t i = 0; i < count; ++i) {
      unsigned char& top = source[(i + 1) * size_of(dtype) - 1];
      if (size_of(dtype) > 1) top = static_cast<unsigned char>((top & 0x83) | 0x38);  // moderate exponents
      if (dtype == DType::f8e4m3 || dtype == DType::f8e5m2) top &= 0xbf;
    }
  }
  return all;
}

TEST(ReducePaths, AllHaveTheSameBits) {
  const std::size_t count = 1003;
  for (int t = 0; t < dtype_count; ++t)
    for (ReduceOp::Kind op : ops) {
      const auto in = random_bits(5, count, DType(t));
      std::vector<unsigned char> first;
      on_each_path([&](const char* path) {
        std::vector<unsigned char> out(in[0].size());
        reduce(out.data(), pointers(in), count, DType(t), op, 5);
        if (first.empty()) first = out;
        ASSERT_EQ(out, first) << name(DType(t)) << ' ' << name(ReduceOp(op)) << ' ' << path;
      });
    }
}

}  // namespace
}  // namespace rz
