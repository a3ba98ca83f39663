#pragma once
/// Kernels of collectives on the host: reductions, scaling, copies past the caches. Vector code is selected
/// at run time (AVX-512, AVX2, portable); all of it produces the same bits. Thread safe: pure functions of
/// their arguments.

#include <span>

#include "comm/core/types.h"

namespace rz {

/// How one step of an `avg` of `ranks` contributions divides. Integers are divided at the end. Floats are
/// divided by a power of two first and by the rest at the end: each contribution is multiplied by
/// s, 1 over the first power of two that is not less than `ranks`, and the sum divided by ranks · s. So no
/// sum exceeds the largest contribution. The bits are those of the sum divided by `ranks`, unless that
/// overflows or a contribution is below 1 / s times the smallest normal number of the type in which it is
/// summed.
struct AverageStep {
  int ranks = 1;
  bool last = true;                          ///< false: the result is a partial sum, to be divided later
  std::span<const unsigned char> partial{};  ///< nonzero: the source is one; empty: all are contributions

  constexpr AverageStep(int n = 1) : ranks(n) {}  // NOLINT: implicit by design
  constexpr AverageStep(int n, bool is_last, std::span<const unsigned char> partial_sums)
      : ranks(n), last(is_last), partial(partial_sums) {}
};

/// The factor s of AverageStep; 1 for integers.
double mean_scale(DType, int ranks);

/// dst[i] = src0[i] op src1[i] op src2[i] …, in the order of ReductionOrder; `avg` divides by the number
/// of ranks of `mean`, other operations ignore it. `count` elements. 16- and 8-bit floats are converted to
/// f32, reduced in f32 and rounded once (to nearest even; f8e4m3 and f8e5m2 as the OCP 8-bit formats,
/// saturating to the largest finite value like NCCL). min and max of two or more sources do not depend on
/// their order: any NaN gives the quiet NaN without sign and payload, and -0 is less than +0. Integers wrap;
/// avg of integers truncates. premul_sum is a plain sum here (see scale()). dst may be the same memory as one
/// source; no other overlap is allowed. Addresses need not be aligned. Errc::invalid_argument without a
/// source.
void reduce(void* dst, std::span<const void* const> sources, std::size_t count, DType, ReduceOp::Kind,
            const AverageStep& mean = {}, ReductionOrder = ReductionOrder::rank);

/// The same, with the result also in `too`, from where a peer reads it. `too` overlaps no other argument.
void reduce_to_both(void* dst, void* too, std::span<const void* const> sources, std::size_t count, DType,
                    ReduceOp::Kind, const AverageStep& mean = {}, ReductionOrder = ReductionOrder::rank);

/// reduce_to_both() for one type, operation and order, resolved once for repeated small calls. `too` may be
/// null. Requires count ≥ 1, at least one source, and a mean of one rank unless the operation is avg.
using ReduceKernel = void (*)(void* dst, void* too, std::span<const void* const> sources, std::size_t count,
                              const AverageStep&);
ReduceKernel reduce_kernel(DType, ReduceOp::Kind, ReductionOrder = ReductionOrder::rank);

/// dst[i] = src[i] · factor: in f32 for 16- and 8-bit floats, in f64 rounded to nearest and saturating for
/// integers. dst may be src.
void scale(void* dst, const void* src, std::size_t count, DType, double factor);

/// memcpy() with non-temporal stores: destination lines are not read first, and cached data is not evicted.
/// Useful if the destination exceeds the last-level cache, so that its lines would be evicted anyway. The
/// stores are ordered before later stores of the calling thread. Thread safe.
void copy_nontemporal(void* to, const void* from, std::size_t bytes);

}  // namespace rz
