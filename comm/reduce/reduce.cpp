// The loops below are plain C++ over the scalar functions of comm/reduce/reduce_ops.h and comm/core/math.h.
// Highway compiles this file once per target and selects one at run time. The compiler vectorizes the loops,
// except min and max of floats, for which it does not find the processor's instructions. No loop adds across
// elements and nothing is contracted to a fused multiply-add (see CMakeLists.txt), so every target produces
// the same bits.
//
// Memory is traversed once, in blocks that stay in L1 while several sources are reduced into them.

#include "comm/reduce/reduce.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "comm/reduce/reduce.cpp"
#include <hwy/foreach_target.h>
#include <hwy/highway.h>

#include <algorithm>
#include <bit>
#include <cstring>

#include "comm/core/error.h"
#include "comm/core/math.h"
#include "comm/reduce/reduce_ops.h"

// dst may be one of the sources. Each element is then read before it is written, so iterations stay
// independent.
#ifndef RZ_EACH
#ifdef __clang__
#pragma clang diagnostic ignored "-Wpass-failed"  // checks of a sanitizer exclude vectors
#define RZ_INDEPENDENT _Pragma("clang loop vectorize(assume_safety)")
#else
#define RZ_INDEPENDENT _Pragma("GCC ivdep")
#endif
#define RZ_EACH(i, begin, end) RZ_INDEPENDENT for (std::size_t i = (begin); i < (end); ++i)
#endif

HWY_BEFORE_NAMESPACE();
namespace rz {
namespace HWY_NAMESPACE {

using Sources = std::span<const void* const>;

using elementwise::Max;
using elementwise::Min;
using elementwise::Product;
using elementwise::Sum;

/// Element i of memory that need not be aligned, such as a receive buffer of TCP.
template <class T>
T load(const T* memory, std::size_t i) {
  T x;
  std::memcpy(&x, reinterpret_cast<const std::byte*>(memory) + i * sizeof(T), sizeof x);
  return x;
}

/// The reverse.
template <class T>
void store(T* memory, std::size_t i, T x) {
  std::memcpy(reinterpret_cast<std::byte*>(memory) + i * sizeof(T), &x, sizeof x);
}

template <class T>
void copy(T* to, const T* from, std::size_t count) {
  std::memcpy(reinterpret_cast<std::byte*>(to), reinterpret_cast<const std::byte*>(from), count * sizeof(T));
}

#if HWY_TARGET == HWY_AVX2 || HWY_TARGET == HWY_AVX3
namespace hn = hwy::HWY_NAMESPACE;

/// Min or Max of floats. The processor's instructions return the second operand if both are equal or one is
/// NaN.
template <class Op, class V>
HWY_INLINE V apply_to_vectors(V a, V b) {
  const V nan = hn::Set(hn::DFromV<V>(), elementwise::canonical_nan<hn::TFromV<V>>());
  if constexpr (std::is_same_v<Op, Min>) {
    const V x = hn::Min(a, b), y = hn::Min(b, a);
    return hn::IfThenElse(hn::Eq(x, y), hn::Or(x, y), nan);
  } else {
    const V x = hn::Max(a, b), y = hn::Max(b, a);
    return hn::IfThenElse(hn::Eq(x, y), hn::And(x, y), nan);
  }
}

/// Reduces the elements that fill whole vectors and returns their number: 0 where the compiler's vector code
/// is as good. `c` and `too` may be null.
template <class Op, class T>
HWY_INLINE std::size_t reduce_vectors(T* dst, T* too, const T* a, const T* b, const T* c, std::size_t count) {
  std::size_t i = 0;
  if constexpr (std::is_floating_point_v<T> && elementwise::ordered<Op>) {
    const hn::ScalableTag<T> d;
    for (; i + hn::Lanes(d) <= count; i += hn::Lanes(d)) {
      auto x = apply_to_vectors<Op>(hn::LoadU(d, a + i), hn::LoadU(d, b + i));
      if (c) x = apply_to_vectors<Op>(x, hn::LoadU(d, c + i));
      hn::StoreU(x, d, dst + i);
      if (too) hn::StoreU(x, d, too + i);
    }
  }
  return i;
}
#else
template <class Op, class T>
constexpr std::size_t reduce_vectors(T*, T*, const T*, const T*, const T*, std::size_t) {
  return 0;
}
#endif

template <class Op, class T>
void reduce2(T* dst, const T* a, const T* b, std::size_t count) {
  const std::size_t done = reduce_vectors<Op, T>(dst, nullptr, a, b, nullptr, count);
  RZ_EACH(i, done, count) store<T>(dst, i, Op::apply(load(a, i), load(b, i)));
}

template <class Op, class T>
void reduce3(T* dst, const T* a, const T* b, const T* c, std::size_t count) {
  const std::size_t done = reduce_vectors<Op, T>(dst, nullptr, a, b, c, count);
  RZ_EACH(i, done, count) store<T>(dst, i, Op::apply(Op::apply(load(a, i), load(b, i)), load(c, i)));
}

/// Stores the result at two addresses, in one pass over the sources.
template <class Op, class T>
void reduce2_to_both(T* dst, T* too, const T* a, const T* b, std::size_t count) {
  const std::size_t done = reduce_vectors<Op, T>(dst, too, a, b, nullptr, count);
  RZ_EACH(i, done, count) {
    const T x = Op::apply(load(a, i), load(b, i));
    store<T>(dst, i, x), store<T>(too, i, x);
  }
}

/// Divides integers: averages of floats have kernels of their own.
template <class T>
void divide(T* x, std::size_t count, const AverageStep& mean) {
  if (!mean.last || mean.ranks == 1) return;
  const elementwise::MeanFactors factors(mean.ranks);
  RZ_EACH(i, 0, count) store<T>(x, i, elementwise::divide(load(x, i), factors));
}

template <class T>
const T* at(const void* memory, std::size_t element) {
  return static_cast<const T*>(memory) + element;
}

// Reduces one block of all sources, from element `begin` on. Until the last pass the sum stays in `buffer`,
// since dst may be a source that has not been read yet.
template <class Op, class T>
void reduce_block(T* dst, T* buffer, Sources sources, std::size_t begin, std::size_t count) {
  const T* sum = at<T>(sources[0], begin);
  std::size_t next = 1;
  for (; sources.size() - next > 2; next += 2, sum = buffer)
    reduce3<Op>(buffer, sum, at<T>(sources[next], begin), at<T>(sources[next + 1], begin), count);
  if (sources.size() - next == 2)
    reduce3<Op>(dst, sum, at<T>(sources[next], begin), at<T>(sources[next + 1], begin), count);
  else if (sources.size() - next == 1)
    reduce2<Op>(dst, sum, at<T>(sources[next], begin), count);
  else if (dst != sum)
    copy(dst, sum, count);
}

// `T`: type of the reduction; `Result`: type of the division. Sums and products of signed integers use
// unsigned types.
template <class Op, class T, class Result>
HWY_NOINLINE void reduce_blocks(void* dst, void* too, Sources sources, std::size_t count,
                                const AverageStep& mean) {
  constexpr std::size_t block = 8192 / sizeof(T);
  T buffer[block];
  for (std::size_t begin = 0; begin < count; begin += block) {
    const std::size_t n = std::min(block, count - begin);
    reduce_block<Op>(static_cast<T*>(dst) + begin, buffer, sources, begin, n);
    if constexpr (std::is_integral_v<Result>) divide(static_cast<Result*>(dst) + begin, n, mean);
    if (too) copy(static_cast<T*>(too) + begin, static_cast<T*>(dst) + begin, n);
  }
}

/// Without the buffer of reduce_blocks() for two sources: its cost is comparable to that of the smallest
/// calls.
template <class Op, class T, class Result = T>
void reduce_as(void* dst, void* too, Sources sources, std::size_t count, const AverageStep& mean) {
  if (sources.size() != 2 || mean.ranks > 1)
    return reduce_blocks<Op, T, Result>(dst, too, sources, count, mean);
  const T *a = at<T>(sources[0], 0), *b = at<T>(sources[1], 0);
  return too ? reduce2_to_both<Op>(static_cast<T*>(dst), static_cast<T*>(too), a, b, count)
             : reduce2<Op>(static_cast<T*>(dst), a, b, count);
}

template <class T>
void widen(float* dst, const T* src, std::size_t count) {
  RZ_EACH(i, 0, count) dst[i] = to_f32(load(src, i));
}

template <class T>
void narrow(T* dst, const float* src, std::size_t count) {
  RZ_EACH(i, 0, count) store<T>(dst, i, from_f32<T>(src[i]));
}

template <class Op, class T>
void reduce_small_floats(void* dst, void* too, Sources sources, std::size_t count, const AverageStep&) {
  constexpr std::size_t block = 2048;
  float sum[block], term[block];
  for (std::size_t begin = 0; begin < count; begin += block) {
    const std::size_t n = std::min(block, count - begin);
    widen(sum, at<T>(sources[0], begin), n);
    for (const void* source : sources.subspan(1)) {
      widen(term, at<T>(source, begin), n);
      reduce2<Op>(sum, sum, term, n);
    }
    narrow(static_cast<T*>(dst) + begin, sum, n);
    if (too) copy(static_cast<T*>(too) + begin, static_cast<T*>(dst) + begin, n);
  }
}

// ---- pairwise order

// The sum of a block as a tree. Up to four leaves are combined in registers, with the sum of the leaves on
// their left if there are any. So each source is read once, and sums of inner nodes stay in L1.

template <class Wide, class T>
Wide load_wide(const T* memory, std::size_t i) {
  if constexpr (std::is_same_v<Wide, T>)
    return load(memory, i);
  else
    return to_f32(load(memory, i));
}

/// The sources of a block, as terms of a sum in `Wide`.
template <class Wide, class T>
struct SourceTerms {
  struct Term {
    const T* from;
    Wide operator()(std::size_t i) const { return load_wide<Wide>(from, i); }
  };
  Sources sources;
  std::size_t begin;  // first element of the block

  std::size_t size() const { return sources.size(); }
  Term operator[](std::size_t s) const { return {at<T>(sources[s], begin)}; }
  SourceTerms subspan(std::size_t first, std::size_t n) const { return {sources.subspan(first, n), begin}; }
};

/// The same of an average: contributions are scaled, partial sums are not.
template <class Wide, class T>
struct MeanTerms {
  struct Term {
    const T* from;
    Wide factor;
    Wide operator()(std::size_t i) const { return load_wide<Wide>(from, i) * factor; }
  };
  SourceTerms<Wide, T> terms;
  std::span<const unsigned char> partial;  // as in AverageStep
  Wide scale;

  std::size_t size() const { return terms.size(); }
  Term operator[](std::size_t s) const {
    return {terms[s].from, !partial.empty() && partial[s] ? Wide(1) : scale};
  }
  MeanTerms subspan(std::size_t first, std::size_t n) const {
    return {terms.subspan(first, n), partial.empty() ? partial : partial.subspan(first, n), scale};
  }
};

/// dst = left op (tree of the leaves), or the tree alone if `left` is null. dst may be `left`, or a leaf.
template <class Op, int leaves, class Wide, class Terms>
void combine(Wide* dst, const Wide* left, const Terms& terms, std::size_t count) {
  const auto a = terms[0], b = terms[leaves > 1 ? 1 : 0], c = terms[leaves > 2 ? 2 : 0],
             d = terms[leaves > 3 ? 3 : 0];
  const auto tree = [=](std::size_t i) {
    Wide x = a(i);
    if constexpr (leaves > 1) x = Op::apply(x, b(i));
    if constexpr (leaves == 3) x = Op::apply(x, c(i));
    if constexpr (leaves == 4) x = Op::apply(x, Op::apply(c(i), d(i)));
    return x;
  };
  if (left) {
    RZ_EACH(i, 0, count) store<Wide>(dst, i, Op::apply(load(left, i), tree(i)));
  } else {
    RZ_EACH(i, 0, count) store<Wide>(dst, i, tree(i));
  }
}

template <class Op, class Wide, class Terms>
void combine_leaves(Wide* dst, const Wide* left, const Terms& terms, std::size_t count) {
  switch (terms.size()) {
    case 1:
      return combine<Op, 1>(dst, left, terms, count);
    case 2:
      return combine<Op, 2>(dst, left, terms, count);
    case 3:
      return combine<Op, 3>(dst, left, terms, count);
    default:
      return combine<Op, 4>(dst, left, terms, count);
  }
}

constexpr std::size_t tree_block_bytes = 4 << 10;  // of sums
constexpr std::size_t tree_levels = 16;            // sums kept at once: for up to 2^17 sources

template <class Wide>
constexpr std::size_t tree_block = tree_block_bytes / sizeof(Wide);

/// The tree of a block into dst, which may be a source unless `dst_is_free`. Sums are kept in `kept`, one
/// block for each level of the tree above four leaves.
template <class Op, class Wide, class Terms>
void combine_tree(Wide* dst, bool dst_is_free, Wide* kept, const Terms& terms, std::size_t count) {
  if (terms.size() <= 4) return combine_leaves<Op>(dst, static_cast<const Wide*>(nullptr), terms, count);
  const std::size_t half = std::bit_floor(terms.size() - 1);
  Wide* const left = dst_is_free ? dst : kept;
  Wide* const next = dst_is_free ? kept : kept + tree_block<Wide>;
  combine_tree<Op>(left, true, next, terms.subspan(0, half), count);
  const Terms others = terms.subspan(half, terms.size() - half);
  if (others.size() <= 4) return combine_leaves<Op>(dst, static_cast<const Wide*>(left), others, count);
  combine_tree<Op>(next, true, next + tree_block<Wide>, others, count);
  reduce2<Op>(dst, left, next, count);
}

/// `Wide`: type of the sums; T: of the elements.
template <class Op, class Wide, class T>
HWY_NOINLINE void reduce_pairwise(void* dst, void* too, Sources sources, std::size_t count) {
  Wide kept[tree_levels * tree_block<Wide>];
  for (std::size_t begin = 0; begin < count; begin += tree_block<Wide>) {
    const std::size_t n = std::min(tree_block<Wide>, count - begin);
    const SourceTerms<Wide, T> terms{sources, begin};
    T* const to = static_cast<T*>(dst) + begin;
    if constexpr (std::is_same_v<Wide, T>) {
      combine_tree<Op>(to, false, kept, terms, n);
    } else {
      combine_tree<Op>(kept, true, kept + tree_block<Wide>, terms, n);
      narrow(to, kept, n);
    }
    if (too) copy(static_cast<T*>(too) + begin, to, n);
  }
}

// ---- averages of floats

/// dst = ((x0 + x1) + x2) + …
template <class Wide, class Terms>
void add_in_rank_order(Wide* dst, const Terms& terms, std::size_t count) {
  const std::size_t first = std::min(terms.size(), std::size_t{3});  // whose tree is the same
  combine_leaves<Sum>(dst, static_cast<const Wide*>(nullptr), terms.subspan(0, first), count);
  for (std::size_t s = first; s < terms.size(); ++s)
    combine<Sum, 1>(dst, static_cast<const Wide*>(dst), terms.subspan(s, 1), count);
}

template <class Wide, class T, ReductionOrder order>
HWY_NOINLINE void average(void* dst, void* too, Sources sources, std::size_t count, const AverageStep& mean) {
  constexpr std::size_t block = tree_block<Wide>;
  Wide sum[block * (order == ReductionOrder::rank ? 1 : 1 + tree_levels)];
  const elementwise::MeanFactors factors(mean.ranks);
  const Wide rest = mean.last ? factors.rest : 1;
  for (std::size_t begin = 0; begin < count; begin += block) {
    const std::size_t n = std::min(block, count - begin);
    const MeanTerms<Wide, T> terms{{sources, begin}, mean.partial, factors.scale};
    if constexpr (order == ReductionOrder::rank)
      add_in_rank_order(sum, terms, n);
    else
      combine_tree<Sum>(sum, true, sum + block, terms, n);
    if (rest < 1) {
      RZ_EACH(i, 0, n) sum[i] /= rest;
    }
    T* const to = static_cast<T*>(dst) + begin;
    if constexpr (std::is_same_v<Wide, T>)
      copy(to, sum, n);
    else
      narrow(to, sum, n);
    if (too) copy(static_cast<T*>(too) + begin, to, n);
  }
}

using Kernel = void (*)(void* dst, void* too, Sources, std::size_t count, const AverageStep&);

/// Both orders are the same for up to three sources.
template <class Op, class Wide, class T, Kernel in_rank_order>
void reduce_tree(void* dst, void* too, Sources sources, std::size_t count, const AverageStep& mean) {
  return sources.size() <= 3 ? in_rank_order(dst, too, sources, count, mean)
                             : reduce_pairwise<Op, Wide, T>(dst, too, sources, count);
}

/// Null: integers.
template <ReductionOrder order>
Kernel average_kernel_of(DType dtype) {
  switch (dtype) {
    case DType::f32:
      return average<float, float, order>;
    case DType::f64:
      return average<double, double, order>;
    case DType::f16:
      return average<float, f16, order>;
    case DType::bf16:
      return average<float, bf16, order>;
    case DType::f8e4m3:
      return average<float, f8e4m3, order>;
    case DType::f8e5m2:
      return average<float, f8e5m2, order>;
    default:
      return nullptr;
  }
}

/// Null: the order makes no difference.
template <class Op>
Kernel pairwise_kernel_of_dtype(DType dtype) {
  switch (dtype) {
    case DType::f32:
      return reduce_tree<Op, float, float, reduce_as<Op, float>>;
    case DType::f64:
      return reduce_tree<Op, double, double, reduce_as<Op, double>>;
    case DType::f16:
      return reduce_tree<Op, float, f16, reduce_small_floats<Op, f16>>;
    case DType::bf16:
      return reduce_tree<Op, float, bf16, reduce_small_floats<Op, bf16>>;
    case DType::f8e4m3:
      return reduce_tree<Op, float, f8e4m3, reduce_small_floats<Op, f8e4m3>>;
    case DType::f8e5m2:
      return reduce_tree<Op, float, f8e5m2, reduce_small_floats<Op, f8e5m2>>;
    default:
      return nullptr;
  }
}

Kernel pairwise_kernel_of(DType dtype, ReduceOp::Kind kind) {
  switch (kind) {
    case ReduceOp::avg:
      return average_kernel_of<ReductionOrder::pairwise>(dtype);
    case ReduceOp::min:
    case ReduceOp::max:
      return nullptr;
    case ReduceOp::prod:
      return pairwise_kernel_of_dtype<Product>(dtype);
    default:
      return pairwise_kernel_of_dtype<Sum>(dtype);
  }
}

template <class Op>
Kernel kernel_of_dtype(DType dtype) {
  using I8 = elementwise::Accumulator<Op, std::int8_t>;
  using I32 = elementwise::Accumulator<Op, std::int32_t>;
  using I64 = elementwise::Accumulator<Op, std::int64_t>;
  switch (dtype) {
    case DType::f32:
      return reduce_as<Op, float>;
    case DType::f64:
      return reduce_as<Op, double>;
    case DType::f16:
      return reduce_small_floats<Op, f16>;
    case DType::bf16:
      return reduce_small_floats<Op, bf16>;
    case DType::f8e4m3:
      return reduce_small_floats<Op, f8e4m3>;
    case DType::f8e5m2:
      return reduce_small_floats<Op, f8e5m2>;
    case DType::i8:
      return reduce_as<Op, I8, std::int8_t>;
    case DType::u8:
      return reduce_as<Op, std::uint8_t>;
    case DType::i32:
      return reduce_as<Op, I32, std::int32_t>;
    case DType::u32:
      return reduce_as<Op, std::uint32_t>;
    case DType::i64:
      return reduce_as<Op, I64, std::int64_t>;
    case DType::u64:
      return reduce_as<Op, std::uint64_t>;
  }
  return nullptr;
}

Kernel kernel_of(DType dtype, ReduceOp::Kind kind) {
  switch (kind) {
    case ReduceOp::avg:
      if (const Kernel average = average_kernel_of<ReductionOrder::rank>(dtype)) return average;
      [[fallthrough]];
    case ReduceOp::sum:
    case ReduceOp::premul_sum:
      return kernel_of_dtype<Sum>(dtype);
    case ReduceOp::prod:
      return kernel_of_dtype<Product>(dtype);
    case ReduceOp::min:
      return kernel_of_dtype<Min>(dtype);
    case ReduceOp::max:
      return kernel_of_dtype<Max>(dtype);
  }
  return nullptr;
}

template <class T>
void scale_as(void* dst, const void* src, std::size_t count, double factor) {
  T* out = static_cast<T*>(dst);
  const T* in = static_cast<const T*>(src);
  RZ_EACH(i, 0, count) store<T>(out, i, elementwise::scale(load(in, i), factor));
}

void scale_all(void* dst, const void* src, std::size_t count, DType dtype, double factor) {
  switch (dtype) {
    case DType::f32:
      return scale_as<float>(dst, src, count, factor);
    case DType::f64:
      return scale_as<double>(dst, src, count, factor);
    case DType::f16:
      return scale_as<f16>(dst, src, count, factor);
    case DType::bf16:
      return scale_as<bf16>(dst, src, count, factor);
    case DType::f8e4m3:
      return scale_as<f8e4m3>(dst, src, count, factor);
    case DType::f8e5m2:
      return scale_as<f8e5m2>(dst, src, count, factor);
    case DType::i8:
      return scale_as<std::int8_t>(dst, src, count, factor);
    case DType::u8:
      return scale_as<std::uint8_t>(dst, src, count, factor);
    case DType::i32:
      return scale_as<std::int32_t>(dst, src, count, factor);
    case DType::u32:
      return scale_as<std::uint32_t>(dst, src, count, factor);
    case DType::i64:
      return scale_as<std::int64_t>(dst, src, count, factor);
    case DType::u64:
      return scale_as<std::uint64_t>(dst, src, count, factor);
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace rz
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace rz {

HWY_EXPORT(kernel_of);
HWY_EXPORT(pairwise_kernel_of);
HWY_EXPORT(scale_all);

ReduceKernel reduce_kernel(DType dtype, ReduceOp::Kind kind, ReductionOrder order) {
  const ReduceKernel pairwise =
      order == ReductionOrder::pairwise ? HWY_DYNAMIC_DISPATCH(pairwise_kernel_of)(dtype, kind) : nullptr;
  return pairwise ? pairwise : HWY_DYNAMIC_DISPATCH(kernel_of)(dtype, kind);
}

double mean_scale(DType dtype, int ranks) {
  switch (dtype) {
    case DType::f32:
    case DType::f64:
    case DType::f16:
    case DType::bf16:
    case DType::f8e4m3:
    case DType::f8e5m2:
      return elementwise::MeanFactors(ranks).scale;
    default:
      return 1;
  }
}

void reduce(void* dst, std::span<const void* const> sources, std::size_t count, DType dtype,
            ReduceOp::Kind kind, const AverageStep& mean, ReductionOrder order) {
  reduce_to_both(dst, nullptr, sources, count, dtype, kind, mean, order);
}

void reduce_to_both(void* dst, void* too, std::span<const void* const> sources, std::size_t count,
                    DType dtype, ReduceOp::Kind kind, const AverageStep& mean, ReductionOrder order) {
  require(!sources.empty(), Errc::invalid_argument, "reduce() of ", name(dtype), " without a source");
  if (count != 0)
    reduce_kernel(dtype, kind, order)(dst, too, sources, count, kind == ReduceOp::avg ? mean : AverageStep{});
}

void scale(void* dst, const void* src, std::size_t count, DType dtype, double factor) {
  if (count != 0) HWY_DYNAMIC_DISPATCH(scale_all)(dst, src, count, dtype, factor);
}

}  // namespace rz
#endif
