// Sums over any extents, in double. A sum of rows adds whole rows; a sum of columns adds rows to a tile of
// sums. Threads split the sums; a single sum is split into ranges that depend on its size only.

#include "tensor/element_ops.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "tensor/kernels/elementwise/sum.cpp"
#include <hwy/foreach_target.h>
#include <hwy/highway.h>

#include <algorithm>

#include "tensor/kernels/broadcast.h"
#include "tensor/kernels/check.h"
#include "tensor/kernels/device_ops.h"
#include "tensor/kernels/ordered_sum.h"
#include "tensor/kernels/vector-inl.h"

HWY_BEFORE_NAMESPACE();
namespace rz {
namespace HWY_NAMESPACE {

/// The sum of `n` consecutive elements.
double sum_of(const Tensor& in, std::size_t at, std::size_t n) {
  double total = 0;
  ops::dispatch_dtype(in.dtype(), [&](auto t) HWY_ATTR {
    const auto* const row = elements<decltype(t)>(in) + at;
    total = sum(
        n, [](auto x) HWY_ATTR { return x; }, row);
  });
  return total;
}

/// Adds n consecutive elements of each term to the sums, in the order of the terms; of four terms at a time,
/// so that the sums are read and written less.
void add_terms(const Tensor& in, std::size_t at, const ops::IndexMap& terms, std::size_t n,
               double* HWY_RESTRICT sums) {
  ops::dispatch_dtype(in.dtype(), [&](auto t) HWY_ATTR {
    using T = decltype(t);
    const Doubles d;
    const HalfFloats h;
    const std::size_t lanes = hn::Lanes(d), count = terms.count(), whole = n / lanes * lanes;
    const T* const first = elements<T>(in) + at;
    const auto row = [&](std::size_t term) { return first + terms.offset(term); };
    std::size_t term = 0;
    for (; term + 4 <= count; term += 4) {
      const T *const r0 = row(term), *const r1 = row(term + 1), *const r2 = row(term + 2),
                     *const r3 = row(term + 3);
      for (std::size_t i = 0; i < whole; i += lanes) {
        DoubleVector sum = hn::LoadU(d, sums + i);
        for (const T* r : {r0, r1, r2, r3}) sum = hn::Add(sum, hn::PromoteTo(d, load(h, r + i)));
        hn::StoreU(sum, d, sums + i);
      }
      for (std::size_t i = whole; i < n; ++i)
        for (const T* r : {r0, r1, r2, r3}) sums[i] += static_cast<double>(to_f32(r[i]));
    }
    for (; term < count; ++term)
      for (std::size_t i = 0; i < n; ++i) sums[i] += static_cast<double>(to_f32(row(term)[i]));
  });
}

}  // namespace HWY_NAMESPACE
}  // namespace rz
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace rz {

HWY_EXPORT(sum_of);
HWY_EXPORT(add_terms);

namespace ops {

namespace {

constexpr std::size_t terms_per_thread = 4096;  // at least

/// Writes sums of an operator to its output.
struct Output {
  const Tensor& out;
  double divisor;
  Into into;

  void operator()(std::size_t i, double sum) const {
    dispatch_dtype(out.dtype(), [&](auto t) {
      using T = decltype(t);
      T& to =
          reinterpret_cast<T*>(out.raw())[i];  // data() checks the dtype again, as long as a short row takes
      const double value = sum / divisor;
      to = from_f32<T>(
          static_cast<float>(into == Into::accumulate ? static_cast<double>(to_f32(to)) + value : value));
    });
  }
};

/// How many of `items` with `terms` terms each a thread takes at least.
std::size_t grain(std::size_t terms) {
  return std::max<std::size_t>(1, terms_per_thread / std::max<std::size_t>(1, terms));
}

/// Each term of a sum is a row of consecutive elements.
void sum_rows(const Tensor& in, const Reduction& r, const Output& write, const Stream& stream) {
  const std::size_t terms = r.terms.count(), n = r.terms.dims ? r.terms.extent[r.terms.dims - 1] : 1;
  stream.parallel_for(r.outputs.count(), grain(terms), [&](std::size_t begin, std::size_t end) {
    for (std::size_t i = begin; i < end; ++i) {
      double sum = 0;
      for (std::size_t term = 0; term < terms; term += n)
        sum += HWY_DYNAMIC_DISPATCH(sum_of)(in, r.outputs.offset(i) + r.terms.offset(term), n);
      write(i, sum);
    }
  });
}

/// Consecutive sums have consecutive terms.
void sum_columns(const Tensor& in, const Reduction& r, const Output& write, const Stream& stream) {
  constexpr std::size_t tile = 128;
  const std::size_t columns = r.outputs.extent[r.outputs.dims - 1], tiles = (columns + tile - 1) / tile;
  const std::size_t tasks = r.outputs.count() / columns * tiles;
  stream.parallel_for(tasks, grain(r.terms.count() * tile), [&](std::size_t begin, std::size_t end) {
    for (std::size_t task = begin; task < end; ++task) {
      const std::size_t column = task % tiles * tile, first = task / tiles * columns + column;
      const std::size_t n = std::min(tile, columns - column);
      std::array<double, tile> sums{};
      HWY_DYNAMIC_DISPATCH(add_terms)(in, r.outputs.offset(first), r.terms, n, sums.data());
      for (std::size_t i = 0; i < n; ++i) write(first + i, sums[i]);
    }
  });
}

}  // namespace

void sum_to_size(const Tensor& out, const Tensor& in, double divisor, Into into, const Stream& stream) {
  check("sum_to_size", {{"out", out}, {"in", in}}, broadcasts(out.shape(), in.shape()));
  if (const auto* d = on_device("sum_to_size", out, stream))
    return d->sum_to_size(out, in, divisor, into, stream);
  check_dtype("sum_to_size", out.dtype(), {{"in", in}});
  const Reduction r = reduction(out.shape(), in.shape());
  const Output write{out, divisor, into};
  if (out.count() == 1)
    return write(0, ordered_sum(in.count(), stream, [&](std::size_t begin, std::size_t end) {
                   return HWY_DYNAMIC_DISPATCH(sum_of)(in, begin, end - begin);
                 }));
  if (out.count() > 0) (r.by_rows ? sum_rows : sum_columns)(in, r, write, stream);
}

}  // namespace ops
}  // namespace rz
#endif
