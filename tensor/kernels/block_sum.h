#pragma once
/// Sums and maxima over a warp and over a block of whole warps. Every thread gets the same result; the order
/// of the additions depends on the block size only. For .cu files.

#include <cmath>

#include "comm/device/launch.h"

namespace rz::ops {

inline constexpr unsigned warp_size = 32, whole_warp = 0xffffffffu;

template <class T>
__device__ inline T warp_sum(T value) {
  for (int bits = 16; bits; bits >>= 1) value += __shfl_xor_sync(whole_warp, value, bits);
  return value;
}

/// Ignores NaN.
__device__ inline float warp_max(float value) {
  for (int bits = 16; bits; bits >>= 1) value = fmaxf(value, __shfl_xor_sync(whole_warp, value, bits));
  return value;
}

/// All threads of the block must call it.
template <class T>
__device__ inline T block_sum(T value) {
  RZ_SHARED(T, parts, 32);
  value = warp_sum(value);
  __syncthreads();  // the previous call's parts have been read
  if (threadIdx.x % warp_size == 0) parts[threadIdx.x / warp_size] = value;
  __syncthreads();
  T total = parts[0];
  for (unsigned w = 1; w < blockDim.x / warp_size; ++w) total += parts[w];
  return total;
}

/// All threads of the block must call it. Ignores NaN.
__device__ inline float block_max(float value) {
  RZ_SHARED(float, parts, 32);
  value = warp_max(value);
  __syncthreads();
  if (threadIdx.x % warp_size == 0) parts[threadIdx.x / warp_size] = value;
  __syncthreads();
  float largest = parts[0];
  for (unsigned w = 1; w < blockDim.x / warp_size; ++w) largest = fmaxf(largest, parts[w]);
  return largest;
}

/// Threads of a block that processes one row of `items` elements: whole warps, at most `limit`.
inline unsigned threads_for_row(std::size_t items, unsigned limit = 512) {
  const std::size_t whole = (items + warp_size - 1) / warp_size * warp_size;
  return static_cast<unsigned>(whole < warp_size ? warp_size : whole > limit ? limit : whole);
}

}  // namespace rz::ops
