#pragma once
/// CUDA's keywords for a kernel that a host compiler compiles; included before a .cu file (compiler flag
/// -include). A thread of a block is a fiber; each of these calls that waits for other threads switches to
/// another one.

#define RZ_EMULATED_GPU 1

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __noinline__
#define __launch_bounds__(...)
#define __grid_constant__
#define __restrict__ __restrict

struct uint3 {
  unsigned x, y, z;
};

namespace rz::emulated {

/// Of the thread that runs; kept by the block's scheduler.
extern uint3 thread_index, block_index, block_size, grid_size;

/// __syncthreads(), and its equivalent for a part of a warp.
void wait_for_block();
void wait_for_warp(std::uint32_t mask);
/// Exchanges `value` with the other threads of the warp in `mask`; at(lane) returns theirs.
class Exchange {
 public:
  Exchange(std::uint32_t mask, std::uint64_t value);
  std::uint64_t at(unsigned lane) const;
  bool has(unsigned lane) const;
  unsigned lane() const;
};
/// An iteration of a loop that waits for memory: lets other threads, blocks, kernels and devices run.
void spin();
/// Shared memory of the block, the same for the same key; poisoned when the block starts.
void* shared_memory(const void* key, std::size_t bytes);
void* dynamic_shared_memory();

}  // namespace rz::emulated

#define threadIdx ::rz::emulated::thread_index
#define blockIdx ::rz::emulated::block_index
#define blockDim ::rz::emulated::block_size
#define gridDim ::rz::emulated::grid_size
inline constexpr int warpSize = 32;

#define RZ_SHARED(T, name, count)      \
  static const char rz_key_##name = 0; \
  auto& name = *static_cast<T(*)[count]>(::rz::emulated::shared_memory(&rz_key_##name, sizeof(T) * (count)))
#define RZ_DYNAMIC_SHARED(T, name) T* const name = static_cast<T*>(::rz::emulated::dynamic_shared_memory())

inline void __syncthreads() { ::rz::emulated::wait_for_block(); }
inline void __syncwarp(unsigned mask = 0xffffffffu) { ::rz::emulated::wait_for_warp(mask); }
inline void __threadfence() {}
inline void __threadfence_system() {}
inline void __threadfence_block() {}
inline void __nanosleep(unsigned) { ::rz::emulated::spin(); }

namespace rz::emulated {

template <class T>
std::uint64_t pack(T value) {
  static_assert(sizeof(T) <= 8);
  std::uint64_t bits = 0;
  std::memcpy(&bits, &value, sizeof value);
  return bits;
}
template <class T>
T unpack(std::uint64_t bits) {
  T value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}
/// The value of lane `from`, or the own value where that lane is outside of the sub-warp.
template <class T>
T shuffle(unsigned mask, T value, unsigned from, bool inside) {
  const Exchange exchange(mask, pack(value));
  return inside ? unpack<T>(exchange.at(from)) : value;
}
inline unsigned lane_of_thread() {
  return (thread_index.x + block_size.x * (thread_index.y + block_size.y * thread_index.z)) & 31u;
}

}  // namespace rz::emulated

template <class T>
T __shfl_xor_sync(unsigned mask, T value, int bits, int width = 32) {
  const unsigned lane = ::rz::emulated::lane_of_thread(), from = lane ^ static_cast<unsigned>(bits);
  const unsigned end = (lane / static_cast<unsigned>(width) + 1) * static_cast<unsigned>(width);
  return ::rz::emulated::shuffle(mask, value, from, from < end);
}
template <class T>
T __shfl_down_sync(unsigned mask, T value, unsigned by, int width = 32) {
  const unsigned lane = ::rz::emulated::lane_of_thread(), w = static_cast<unsigned>(width);
  return ::rz::emulated::shuffle(mask, value, lane + by, lane % w + by < w);
}
template <class T>
T __shfl_up_sync(unsigned mask, T value, unsigned by, int width = 32) {
  const unsigned lane = ::rz::emulated::lane_of_thread(), w = static_cast<unsigned>(width);
  return ::rz::emulated::shuffle(mask, value, lane - by, lane % w >= by);
}
template <class T>
T __shfl_sync(unsigned mask, T value, int from, int width = 32) {
  const unsigned lane = ::rz::emulated::lane_of_thread(), w = static_cast<unsigned>(width);
  return ::rz::emulated::shuffle(mask, value, lane / w * w + static_cast<unsigned>(from) % w, true);
}
inline unsigned __ballot_sync(unsigned mask, int predicate) {
  const ::rz::emulated::Exchange exchange(mask, predicate != 0);
  unsigned votes = 0;
  for (unsigned lane = 0; lane < 32; ++lane)
    if (exchange.has(lane) && exchange.at(lane)) votes |= 1u << lane;
  return votes;
}
inline int __any_sync(unsigned mask, int predicate) { return __ballot_sync(mask, predicate) != 0; }
inline int __all_sync(unsigned mask, int predicate) { return __ballot_sync(mask, !predicate) == 0; }

// One thread runs at a time, so that an atomic is a plain operation.
template <class T>
T atomicAdd(T* to, T value) {
  const T before = *to;
  *to = before + value;
  return before;
}
template <class T>
T atomicMax(T* to, T value) {
  const T before = *to;
  if (value > before) *to = value;
  return before;
}
template <class T>
T atomicExch(T* to, T value) {
  const T before = *to;
  *to = value;
  return before;
}
template <class T>
T atomicCAS(T* to, T expected, T value) {
  const T before = *to;
  if (before == expected) *to = value;
  return before;
}
template <class T>
T __ldg(const T* p) {
  return *p;
}

inline float rsqrtf(float x) { return 1.0f / std::sqrt(x); }
inline float __expf(float x) { return std::exp(x); }
inline float __fdividef(float a, float b) { return a / b; }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fsub_rn(float a, float b) { return a - b; }
inline float __fsqrt_rn(float x) { return std::sqrt(x); }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline double __dmul_rn(double a, double b) { return a * b; }
inline double __dadd_rn(double a, double b) { return a + b; }
inline unsigned __umulhi(unsigned a, unsigned b) {
  return static_cast<unsigned>(static_cast<std::uint64_t>(a) * b >> 32);
}
inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __ffs(int x) { return __builtin_ffs(x); }
