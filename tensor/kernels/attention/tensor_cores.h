#pragma once
/// Warp-wide tensor-core instructions (sm_80 and later) and asynchronous copies into shared memory, for
/// matrices of f16 or bf16. Each instruction has an equivalent for the emulated device.
///
/// Fragments held by lane l of a warp, with g = l / 4 and t = l % 4 (PTX ISA, "Matrix fragments for
/// mma.m16n8k16"):
///   - a[16, 16]: columns 2t, 2t+1 of row g and of row g+8, then columns 2t+8, 2t+9 of the same rows
///   - b[16, 8]: rows 2t, 2t+1 of column g, then rows 2t+8, 2t+9
///   - c[16, 8]: columns 2t, 2t+1 of row g, then of row g+8

#include <cstddef>
#include <cstdint>
#ifdef RZ_EMULATED_GPU
#include <cmath>
#include <vector>
#endif

#include "comm/core/math.h"

namespace rz::kernels {

constexpr unsigned whole_warp = 0xffffffffu;

// ---- two elements in a register

template <class T>
__device__ std::uint32_t pack(float low, float high);

#ifndef RZ_EMULATED_GPU
template <>
__device__ inline std::uint32_t pack<f16>(float low, float high) {
  std::uint32_t both;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
  return both;
}
template <>
__device__ inline std::uint32_t pack<bf16>(float low, float high) {
  std::uint32_t both;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
  return both;
}

/// 2^x, accurate to about 2 ulp.
__device__ inline float power_of_2(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
#else
template <class T>
std::uint32_t pack(float low, float high) {
  return from_f32<T>(low).bits | std::uint32_t{from_f32<T>(high).bits} << 16;
}
inline float power_of_2(float x) { return std::exp2(x); }
#endif

// ---- fragments from shared memory

/// Loads four 8 x 8 matrices. Lane 8i+r passes the address of row r (16 bytes) of matrix i. Each lane gets
/// columns 2t, 2t+1 of row g of each matrix.
__device__ inline void load_matrices(std::uint32_t (&to)[4], const void* row) {
#ifndef RZ_EMULATED_GPU
  const auto at = static_cast<std::uint32_t>(__cvta_generic_to_shared(row));
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
               : "r"(at)
               : "memory");
#else
  const emulated::Exchange rows(whole_warp, emulated::pack(row));
  const unsigned g = rows.lane() / 4, t = rows.lane() % 4;
  for (unsigned i = 0; i < 4; ++i)
    std::memcpy(&to[i], emulated::unpack<const char*>(rows.at(8 * i + g)) + 4 * t, 4);
#endif
}

/// The same for the transposed matrices: rows 2t, 2t+1 of column g.
__device__ inline void load_matrices_transposed(std::uint32_t (&to)[4], const void* row) {
#ifndef RZ_EMULATED_GPU
  const auto at = static_cast<std::uint32_t>(__cvta_generic_to_shared(row));
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
               : "r"(at)
               : "memory");
#else
  const emulated::Exchange rows(whole_warp, emulated::pack(row));
  const unsigned g = rows.lane() / 4, t = rows.lane() % 4;
  for (unsigned i = 0; i < 4; ++i) {
    std::uint16_t both[2];
    for (unsigned e = 0; e < 2; ++e)
      std::memcpy(&both[e], emulated::unpack<const char*>(rows.at(8 * i + 2 * t + e)) + 2 * g, 2);
    to[i] = both[0] | std::uint32_t{both[1]} << 16;
  }
#endif
}

// ---- products

/// c += a · b; products are exact, sums are in f32.
template <class T>
__device__ void multiply_add(float (&c)[4], const std::uint32_t (&a)[4], std::uint32_t b0, std::uint32_t b1);

#ifndef RZ_EMULATED_GPU
#define RZ_MULTIPLY_ADD(T, type)                                                                     \
  template <>                                                                                        \
  __device__ inline void multiply_add<T>(float(&c)[4], const std::uint32_t(&a)[4], std::uint32_t b0, \
                                         std::uint32_t b1) {                                         \
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32." type "." type                              \
                 ".f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"              \
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])                                    \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));                    \
  }
RZ_MULTIPLY_ADD(f16, "f16")
RZ_MULTIPLY_ADD(bf16, "bf16")
#undef RZ_MULTIPLY_ADD
#else
template <class T>
void multiply_add(float (&c)[4], const std::uint32_t (&a)[4], std::uint32_t b0, std::uint32_t b1) {
  const emulated::Exchange low(whole_warp, a[0] | std::uint64_t{a[2]} << 32);  // row g
  std::uint32_t rows[2][8];                                                    // pairs of columns of g, g+8
  const unsigned g = low.lane() / 4, t = low.lane() % 4;
  const auto keep = [&](const emulated::Exchange& x, unsigned lane, std::uint32_t(&to)[8]) {
    for (unsigned i = 0; i < 4; ++i) {
      const std::uint64_t both = x.at(4 * lane + i);
      to[i] = static_cast<std::uint32_t>(both), to[4 + i] = static_cast<std::uint32_t>(both >> 32);
    }
  };
  keep(low, g, rows[0]);
  keep(emulated::Exchange(whole_warp, a[1] | std::uint64_t{a[3]} << 32), g, rows[1]);
  const emulated::Exchange columns(whole_warp, b0 | std::uint64_t{b1} << 32);
  for (unsigned n = 0; n < 2; ++n) {
    std::uint32_t column[8];
    keep(columns, 2 * t + n, column);
    const auto element = [](std::uint32_t pair, unsigned i) {
      return to_f32(T{static_cast<std::uint16_t>(pair >> (16 * i))});
    };
    for (unsigned r = 0; r < 2; ++r)
      for (unsigned k = 0; k < 16; ++k)
        c[2 * r + n] += element(rows[r][k / 2], k % 2) * element(column[k / 2], k % 2);
  }
}
#endif

// ---- asynchronous copies

/// Asynchronous 16-byte copies of one thread from global to shared memory. Groups complete in order. Data
/// copied by another thread may be read after that thread has waited and a barrier has followed.
class AsyncCopies {
 public:
  /// Writes zeros if not `valid`; `from` must be a readable address in any case.
  __device__ void copy(void* to, const void* from, bool valid) {
#ifndef RZ_EMULATED_GPU
    const auto at = static_cast<std::uint32_t>(__cvta_generic_to_shared(to));
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(at), "l"(from), "r"(valid ? 16 : 0)
                 : "memory");
#else
    open_.push_back({to, valid ? from : nullptr});
#endif
  }
  __device__ void end_group() {
#ifndef RZ_EMULATED_GPU
    asm volatile("cp.async.commit_group;" ::: "memory");
#else
    groups_.push_back(std::move(open_)), open_.clear();
#endif
  }
  /// Waits until at most `left` groups are pending.
  template <int left>
  __device__ void wait() {
#ifndef RZ_EMULATED_GPU
    asm volatile("cp.async.wait_group %0;" ::"n"(left) : "memory");
#else  // copies as late as permitted
    for (; groups_.size() > left; groups_.erase(groups_.begin()))
      for (const Copy& c : groups_.front()) c.from ? std::memcpy(c.to, c.from, 16) : std::memset(c.to, 0, 16);
#endif
  }

#ifdef RZ_EMULATED_GPU
 private:
  struct Copy {
    void* to;
    const void* from;
  };
  std::vector<Copy> open_;
  std::vector<std::vector<Copy>> groups_;
#endif
};

}  // namespace rz::kernels
