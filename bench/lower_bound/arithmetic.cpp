// Highway compiles this file once per target and selects a target at run time, as for comm/reduce/reduce.cpp,
// whose kernels compute a single cached result.

#include "bench/lower_bound/arithmetic.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "bench/lower_bound/arithmetic.cpp"
#ifndef HWY_DISABLED_TARGETS
#define HWY_DISABLED_TARGETS (HWY_SSSE3 | HWY_SSE4 | HWY_AVX3_DL)
#endif
#include <hwy/cache_control.h>
#include <hwy/foreach_target.h>
#include <hwy/highway.h>

#include <array>
#include <cstring>

#include "comm/reduce/reduce.h"

HWY_BEFORE_NAMESPACE();
namespace rz::bench::lower_bound {
namespace HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;

template <StoreKind stores, class V>
HWY_INLINE void put(V value, float* to) {
  const hn::ScalableTag<float> d;
  if constexpr (stores == StoreKind::streamed)
    hn::Stream(value, d, to);
  else
    hn::StoreU(value, d, to);
}

/// Calls each(i) for whole vectors at i, rest(i) for single elements.
template <class Each, class Rest>
HWY_INLINE void walk(std::size_t count, const Each& each, const Rest& rest) {
  const std::size_t lanes = hn::Lanes(hn::ScalableTag<float>());
  std::size_t i = 0;
  for (; i + 2 * lanes <= count; i += 2 * lanes) each(i), each(i + lanes);
  for (; i < count; ++i) rest(i);
}

void copy_streamed(float* to, const float* from, std::size_t count) {
  const hn::ScalableTag<float> d;
  walk(
      count, [&](std::size_t i) { put<StoreKind::streamed>(hn::LoadU(d, from + i), to + i); },
      [&](std::size_t i) { to[i] = from[i]; });
}

void add_streamed(float* to, const float* a, const float* b, std::size_t count) {
  const hn::ScalableTag<float> d;
  walk(
      count,
      [&](std::size_t i) {
        put<StoreKind::streamed>(hn::Add(hn::LoadU(d, a + i), hn::LoadU(d, b + i)), to + i);
      },
      [&](std::size_t i) { to[i] = a[i] + b[i]; });
}

template <StoreKind first, StoreKind second>
void add_twice_as(float* to, float* too, const float* a, const float* b, std::size_t count) {
  const hn::ScalableTag<float> d;
  walk(
      count,
      [&](std::size_t i) {
        const auto sum = hn::Add(hn::LoadU(d, a + i), hn::LoadU(d, b + i));
        put<first>(sum, to + i);
        put<second>(sum, too + i);
      },
      [&](std::size_t i) { to[i] = too[i] = a[i] + b[i]; });
}

void add_twice_any(float* to, StoreKind first, float* too, StoreKind second, const float* a, const float* b,
                   std::size_t count) {
  constexpr auto cached = StoreKind::cached, streamed = StoreKind::streamed;
  if (first == cached)
    return second == cached ? add_twice_as<cached, cached>(to, too, a, b, count)
                            : add_twice_as<cached, streamed>(to, too, a, b, count);
  return second == cached ? add_twice_as<streamed, cached>(to, too, a, b, count)
                          : add_twice_as<streamed, streamed>(to, too, a, b, count);
}

}  // namespace HWY_NAMESPACE
}  // namespace rz::bench::lower_bound
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace rz::bench::lower_bound {

HWY_EXPORT(copy_streamed);
HWY_EXPORT(add_streamed);
HWY_EXPORT(add_twice_any);

void copy(float* to, const float* from, std::size_t count, StoreKind stores) {
  if (stores == StoreKind::cached) {
    std::memcpy(to, from, count * sizeof(float));
    return;
  }
  HWY_DYNAMIC_DISPATCH(copy_streamed)(to, from, count);
  hwy::FlushStream();
}

void add(float* to, const float* a, const float* b, std::size_t count, StoreKind stores) {
  if (stores == StoreKind::cached)
    return reduce(to, std::array<const void*, 2>{a, b}, count, DType::f32, ReduceOp::sum);
  HWY_DYNAMIC_DISPATCH(add_streamed)(to, a, b, count);
  hwy::FlushStream();
}

void add_twice(float* to, StoreKind first, float* too, StoreKind second, const float* a, const float* b,
               std::size_t count) {
  HWY_DYNAMIC_DISPATCH(add_twice_any)(to, first, too, second, a, b, count);
  if (first == StoreKind::streamed || second == StoreKind::streamed) hwy::FlushStream();
}

}  // namespace rz::bench::lower_bound
#endif
