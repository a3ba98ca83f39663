// Products of bf16 by AMX tiles and by AVX-512 vectors, from the same packed form: tiles of 16 rows or
// columns by 32 elements along k. A tile of a holds a row's 32 elements in 64 bytes; a tile of b holds pairs
// of elements along k, 16 columns in 64 bytes. Missing elements are zeros.

#include "tensor/kernels/linear_algebra/gemm_16bit.h"

#ifndef __x86_64__

namespace rz::kernels {
const GemmEngine* tile_engine() { return nullptr; }
const GemmEngine* vector_engine() { return nullptr; }
bool prefers_vectors() { return false; }
}  // namespace rz::kernels

#else

#include <cpuid.h>
#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>

#include "comm/core/lazy.h"

// g++ 12 reports its own headers' _mm512_undefined_epi32().
#ifndef __clang__
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC diagnostic ignored "-Wuninitialized"
#endif

#define RZ_AVX512 __attribute__((target("avx512f,avx512bw,avx512vl")))
#define RZ_AVX512_BF16 __attribute__((target("avx512f,avx512bw,avx512vl,avx512bf16")))
#define RZ_AMX __attribute__((target("amx-tile,amx-bf16")))

namespace rz::kernels {

namespace {

constexpr std::size_t side = 16, depth_of_tile = 32, tile_elements = side * depth_of_tile;

std::size_t tiles(std::size_t depth) { return (depth + depth_of_tile - 1) / depth_of_tile; }
/// Panels of 16 rows or columns; a multiple of two.
std::size_t panels(std::size_t extent) { return (extent + 2 * side - 1) / (2 * side) * 2; }

// ---- packing

struct Rows {
  __m512i at[side];
};

/// out.at[i] lane j = in.at[j] lane i.
RZ_AVX512 inline void transpose(Rows& x) {
  Rows y;
  for (std::size_t i = 0; i < side; i += 2) {
    y.at[i] = _mm512_unpacklo_epi32(x.at[i], x.at[i + 1]);
    y.at[i + 1] = _mm512_unpackhi_epi32(x.at[i], x.at[i + 1]);
  }
  for (std::size_t i = 0; i < side; i += 4) {
    x.at[i] = _mm512_unpacklo_epi64(y.at[i], y.at[i + 2]);
    x.at[i + 1] = _mm512_unpackhi_epi64(y.at[i], y.at[i + 2]);
    x.at[i + 2] = _mm512_unpacklo_epi64(y.at[i + 1], y.at[i + 3]);
    x.at[i + 3] = _mm512_unpackhi_epi64(y.at[i + 1], y.at[i + 3]);
  }
  for (std::size_t i = 0; i < 4; ++i) {
    y.at[i] = _mm512_shuffle_i32x4(x.at[i], x.at[i + 4], 0x88);
    y.at[i + 4] = _mm512_shuffle_i32x4(x.at[i], x.at[i + 4], 0xdd);
    y.at[i + 8] = _mm512_shuffle_i32x4(x.at[i + 8], x.at[i + 12], 0x88);
    y.at[i + 12] = _mm512_shuffle_i32x4(x.at[i + 8], x.at[i + 12], 0xdd);
  }
  for (std::size_t i = 0; i < 4; ++i) {
    x.at[i] = _mm512_shuffle_i32x4(y.at[i], y.at[i + 8], 0x88);
    x.at[i + 8] = _mm512_shuffle_i32x4(y.at[i], y.at[i + 8], 0xdd);
    x.at[i + 4] = _mm512_shuffle_i32x4(y.at[i + 4], y.at[i + 12], 0x88);
    x.at[i + 12] = _mm512_shuffle_i32x4(y.at[i + 4], y.at[i + 12], 0xdd);
  }
}

/// 32 rows along k of 16 elements: lane j of row q is the pair (from[2q][j], from[2q + 1][j]).
RZ_AVX512 inline void load_pairs(Rows& x, const std::uint16_t* from, std::size_t stride) {
  for (std::size_t q = 0; q < side; ++q) {
    const std::uint16_t* const even = from + 2 * q * stride;
    const __m256i low = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(even));
    const __m256i high = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(even + stride));
    x.at[q] = _mm512_or_si512(_mm512_cvtepu16_epi32(low), _mm512_slli_epi32(_mm512_cvtepu16_epi32(high), 16));
  }
}

/// 16 rows of 32 elements along k.
RZ_AVX512 inline void load_rows(Rows& x, const std::uint16_t* from, std::size_t stride) {
  for (std::size_t i = 0; i < side; ++i) x.at[i] = _mm512_loadu_si512(from + i * stride);
}

/// How a matrix is read: along_k if rows in memory follow k, and what packing makes of it.
struct Reading {
  bool along_k, transposed;
};

RZ_AVX512 void pack_tile(std::uint16_t* to, const std::uint16_t* from, std::size_t stride, Reading reading) {
  Rows x;
  if (reading.along_k)
    load_pairs(x, from, stride);
  else
    load_rows(x, from, stride);
  if (reading.transposed) transpose(x);
  for (std::size_t i = 0; i < side; ++i) _mm512_store_si512(to + i * depth_of_tile, x.at[i]);
}

/// A tile of which `rows` rows and `columns` columns exist in memory.
void pack_partial_tile(std::uint16_t* to, const std::uint16_t* from, std::size_t stride, std::size_t rows,
                       std::size_t columns, Reading reading) {
  std::uint16_t whole[depth_of_tile * depth_of_tile] = {};
  for (std::size_t i = 0; i < rows; ++i)
    std::memcpy(whole + i * depth_of_tile, from + i * stride, columns * sizeof *from);
  pack_tile(to, whole, depth_of_tile, reading);
}

/// Packs elements [first, first + extent) across and [k, k + depth) along k into panels of tiles.
void pack(void* to, const Matrix16& m, Reading reading, std::size_t first, std::size_t extent, std::size_t k,
          std::size_t depth) {
  auto* const packed = static_cast<std::uint16_t*>(to);
  const std::size_t across = panels(extent), along = tiles(depth);
  const auto one = [&](std::size_t panel, std::size_t tile) {
    const std::size_t i = panel * side, d = tile * depth_of_tile;
    const std::size_t wide = std::min(side, extent - std::min(extent, i));
    const std::size_t deep = std::min(depth_of_tile, depth - d);
    const std::size_t row = reading.along_k ? k + d : first + i, column = reading.along_k ? first + i : k + d;
    const std::uint16_t* const from = m.data + row * m.stride + column;
    std::uint16_t* const place = packed + (panel * along + tile) * tile_elements;
    if (wide == side && deep == depth_of_tile)
      pack_tile(place, from, m.stride, reading);
    else if (wide == 0)
      std::memset(place, 0, tile_elements * sizeof *place);
    else
      pack_partial_tile(place, from, m.stride, reading.along_k ? deep : wide, reading.along_k ? wide : deep,
                        reading);
  };
  // In the order of memory.
  if (reading.along_k)
    for (std::size_t tile = 0; tile < along; ++tile)
      for (std::size_t panel = 0; panel < across; ++panel) one(panel, tile);
  else
    for (std::size_t panel = 0; panel < across; ++panel)
      for (std::size_t tile = 0; tile < along; ++tile) one(panel, tile);
}

void pack_a(void* to, const Matrix16& a, std::size_t i, std::size_t rows, std::size_t k, std::size_t depth) {
  pack(to, a, {a.transposed, a.transposed}, i, rows, k, depth);
}

void pack_b(void* to, const Matrix16& b, std::size_t k, std::size_t depth, std::size_t j,
            std::size_t columns) {
  pack(to, b, {!b.transposed, b.transposed}, j, columns, k, depth);
}

// ---- products

/// Calls f(sums, two panels of a, two panels of b) for every block of 32 by 32.
template <class F>
void each_block(float* sums, std::size_t stride, const void* a, const void* b, std::size_t rows,
                std::size_t columns, std::size_t depth, const F& f) {
  const std::size_t panel = tiles(depth) * tile_elements;
  for (std::size_t j = 0; j < panels(columns); j += 2)
    for (std::size_t i = 0; i < panels(rows); i += 2)
      f(sums + i * side * stride + j * side, static_cast<const std::uint16_t*>(a) + i * panel,
        static_cast<const std::uint16_t*>(b) + j * panel);
}

/// 8 rows of one panel of a by two panels of b.
RZ_AVX512_BF16 void multiply_rows(float* sums, std::size_t stride, const std::uint16_t* a,
                                  const std::uint16_t* b, std::size_t count, bool first) {
  constexpr int rows = 8;
  __m512 left[rows], right[rows];
  for (int r = 0; r < rows; ++r) {
    float* const c = sums + static_cast<std::size_t>(r) * stride;
    left[r] = first ? _mm512_setzero_ps() : _mm512_loadu_ps(c);
    right[r] = first ? _mm512_setzero_ps() : _mm512_loadu_ps(c + side);
  }
  const std::uint16_t* const b_right = b + count * tile_elements;
  for (std::size_t t = 0; t < count; ++t)
    for (std::size_t q = 0; q < side; ++q) {
      const std::size_t at = t * tile_elements + q * depth_of_tile;
      const auto b0 = (__m512bh)_mm512_load_si512(b + at), b1 = (__m512bh)_mm512_load_si512(b_right + at);
      const std::uint16_t* const pair = a + t * tile_elements + 2 * q;
#pragma GCC unroll 8
      for (int r = 0; r < rows; ++r) {
        int both;
        std::memcpy(&both, pair + static_cast<std::size_t>(r) * depth_of_tile, sizeof both);
        const auto factor = (__m512bh)_mm512_set1_epi32(both);
        left[r] = _mm512_dpbf16_ps(left[r], factor, b0);
        right[r] = _mm512_dpbf16_ps(right[r], factor, b1);
      }
    }
  for (int r = 0; r < rows; ++r) {
    float* const c = sums + static_cast<std::size_t>(r) * stride;
    _mm512_storeu_ps(c, left[r]);
    _mm512_storeu_ps(c + side, right[r]);
  }
}

void multiply_by_vectors(const Product16&, float* sums, std::size_t stride, const void* a, const void* b,
                         std::size_t rows, std::size_t columns, std::size_t depth, bool first) {
  const std::size_t count = tiles(depth);
  each_block(sums, stride, a, b, rows, columns, depth,
             [&](float* c, const std::uint16_t* left, const std::uint16_t* right) {
               for (std::size_t r = 0; r < 2 * side; r += 8)
                 multiply_rows(c + r * stride, stride,
                               left + r / side * count * tile_elements + r % side * depth_of_tile, right,
                               count, first);
             });
}

/// Operand of LDTILECFG: eight tiles of 16 rows of 64 bytes.
struct alignas(64) TileConfiguration {
  std::uint8_t palette = 1, start_row = 0, reserved[14] = {};
  std::uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
  std::uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};

/// Four tiles of sums from two panels of a and two of b.
RZ_AMX void multiply_tiles(float* c, std::size_t stride, const std::uint16_t* a, const std::uint16_t* b,
                           std::size_t count, bool first) {
  const std::size_t row = stride * sizeof *c;
  float* const below = c + side * stride;
  if (first) {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
  } else {
    _tile_loadd(0, c, row);
    _tile_loadd(1, c + side, row);
    _tile_loadd(2, below, row);
    _tile_loadd(3, below + side, row);
  }
  const std::uint16_t *const lower = a + count * tile_elements, *const right = b + count * tile_elements;
  for (std::size_t at = 0; at < count * tile_elements; at += tile_elements) {
    _tile_loadd(4, a + at, 64);
    _tile_loadd(6, b + at, 64);
    _tile_dpbf16ps(0, 4, 6);
    _tile_loadd(7, right + at, 64);
    _tile_dpbf16ps(1, 4, 7);
    _tile_loadd(5, lower + at, 64);
    _tile_dpbf16ps(2, 5, 6);
    _tile_dpbf16ps(3, 5, 7);
  }
  _tile_stored(0, c, row);
  _tile_stored(1, c + side, row);
  _tile_stored(2, below, row);
  _tile_stored(3, below + side, row);
}

RZ_AMX void multiply_by_tiles(const Product16&, float* sums, std::size_t stride, const void* a, const void* b,
                              std::size_t rows, std::size_t columns, std::size_t depth, bool first) {
  static const TileConfiguration configuration;
  // The compiler does not know that the tile instructions access memory.
  asm volatile("" ::: "memory");
  _tile_loadconfig(&configuration);
  each_block(sums, stride, a, b, rows, columns, depth,
             [&](float* c, const std::uint16_t* left, const std::uint16_t* right) {
               multiply_tiles(c, stride, left, right, tiles(depth), first);
             });
  _tile_release();
  asm volatile("" ::: "memory");
}

// ---- the CPU

struct Features {
  bool vectors = false, tiles = false;
};

/// Linux lets a process use tiles after a request. It fails in kernels without AMX, and where a thread's
/// alternate signal stack is too small for the tiles' state.
bool request_tiles() {
  constexpr long request = 0x1023, tile_data = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILE_DATA
  return ::syscall(SYS_arch_prctl, request, tile_data) == 0;
}

Features features() {
  Features f;
  unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
  if (!__builtin_cpu_supports("avx512bw") || !__builtin_cpu_supports("avx512vl")) return f;
  if (__get_cpuid_count(7, 1, &eax, &ebx, &ecx, &edx)) f.vectors = eax >> 5 & 1;
  if (__get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx)) f.tiles = (edx >> 22 & 1) && (edx >> 24 & 1);
  f.tiles = f.tiles && request_tiles();
  return f;
}

const Features& cpu() {
  static constinit Lazy<Features> f;
  return f.get(features);
}

constexpr GemmEngine by_tiles{"AMX-BF16", 32, 32, pack_a, pack_b, multiply_by_tiles};
constexpr GemmEngine by_vectors{"AVX512-BF16", 32, 32, pack_a, pack_b, multiply_by_vectors};

}  // namespace

const GemmEngine* tile_engine() { return cpu().tiles ? &by_tiles : nullptr; }
const GemmEngine* vector_engine() { return cpu().vectors ? &by_vectors : nullptr; }
bool prefers_vectors() { return __builtin_cpu_is("amd"); }

}  // namespace rz::kernels

#endif
