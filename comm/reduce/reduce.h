#pragma once
/// Element-wise combination of contributions on the host: what every reducing step comes down to. Vector code
/// is chosen at run time (AVX-512, AVX2, portable); every path gives the same bits.

#include <span>

#include "comm/core/types.h"

namespace rz {

/// dst[i] = ((src0[i] op src1[i]) op src2[i]) op …, then for `avg` with `divide` > 1 divided by it.
/// 16- and 8-bit floats: converted to f32, combined in f32, rounded once (to nearest even; f8e4m3 and f8e5m2
/// as the OCP 8-bit formats, saturating to the largest finite value like NCCL). min and max of two sources or
/// more do not depend on their order: a NaN among them gives the quiet NaN without sign and payload, and -0
/// is less than +0. Integers wrap; avg of integers truncates. dst may be the same memory as any one source;
/// no other overlap. premul_sum is a plain sum here (see scale).
void reduce(void* dst, std::span<const void* const> sources, std::size_t count, DType, ReduceOp::Kind,
            int divide = 1);

/// The same, and once more to `too`, which overlaps nothing else: what a peer reads next.
void reduce_to_both(void* dst, void* too, std::span<const void* const> sources, std::size_t count, DType,
                    ReduceOp::Kind, int divide = 1);

/// reduce_twice() of one type and one way to combine, for who calls it often with few elements: 1 ≤ count,
/// 1 ≤ sources, `divide` 1 unless it is avg.
using ReduceKernel = void (*)(void* dst, void* too, std::span<const void* const> sources, std::size_t count,
                              int divide);
ReduceKernel reduce_kernel(DType, ReduceOp::Kind);

/// dst[i] = src[i] · factor, in f32 for small floats, in f64 rounded to nearest for integers. dst may be src.
void scale(void* dst, const void* src, std::size_t count, DType, double factor);

}  // namespace rz
