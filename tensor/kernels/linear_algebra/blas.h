#pragma once
/// Matrix products on CUDA devices, as a table: NVIDIA's cuBLASLt; in tests the host's BLAS, run in the order
/// of an emulated device's stream.

#include <compare>
#include <cstddef>
#include <optional>
#include <utility>

#include "comm/core/types.h"

namespace rz::kernels {

/// Operation fused into the product alpha · a · b + beta · d before it is stored in d[m, n].
enum class Epilogue {
  none,
  bias,              ///< adds bias[n] to every row
  gelu,              ///< adds bias[n] unless null, stores the sum in `aux`, and stores its GELU (tanh) in d
  gelu_gradient,     ///< multiplies by the derivative of GELU (tanh) at `aux`
  column_sums_of_b,  ///< none on d; bias[n] = sums of b over k
  row_sums_of_a      ///< none on d; bias[m] = sums of a over k
};

/// Products of equal sizes, whose matrices begin `step` elements apart; 0: the same factor for all.
struct GemmBatch {
  std::size_t count = 1;
  std::size_t a_step = 0, b_step = 0, d_step = 0;
  auto operator<=>(const GemmBatch&) const = default;
};

/// d[m, n] = epilogue(alpha · a[m, k] · b[k, n] + beta · d), row-major, sums in f32. Transposed operands are
/// stored as [k, m] and [n, k]. Strides are in elements between rows. d is not read if beta is 0.
struct GemmCall {
  std::size_t m = 0, n = 0, k = 0;
  const void* a = nullptr;
  std::size_t a_stride = 0;
  bool transpose_a = false;
  const void* b = nullptr;
  std::size_t b_stride = 0;
  bool transpose_b = false;
  void* d = nullptr;
  std::size_t d_stride = 0;
  DType factors = DType::f32;  ///< of a and b: f32, f16 or bf16
  DType result = DType::f32;   ///< of d, bias and aux: the type of the factors, or f32
  float alpha = 1, beta = 0;
  GemmBatch batch;  ///< several products have no epilogue
  Epilogue epilogue = Epilogue::none;
  void* bias = nullptr;
  void* aux = nullptr;  ///< [m, n], rows d_stride apart
  bool allow_tf32 = false;
  void* workspace = nullptr;  ///< workspace_bytes() of device memory, used by this stream only
};

/// Two calls that compute `c` in this order; the one of nearly the whole size has rows of whole 16-byte
/// words. cuBLASLt's fast kernels for f16 and bf16 require such rows: on an H200 two products
/// with a vocabulary of 50,257 ran at 95 and 130 TFLOP/s, products of whole words at about 500. nullopt if
/// all rows are whole words, for several products, or if a second call would take longer, or change how often
/// a result is rounded.
std::optional<std::pair<GemmCall, GemmCall>> split_whole_words(const GemmCall& c);

/// Thread-safe. Errors are exceptions that name the call and the device.
struct Blas {
  std::size_t (*workspace_bytes)(Device);
  /// True if gemm supports the call, including its epilogue, on this device. Depends on sizes, types,
  /// transposes and the alignment of addresses modulo 16 bytes only.
  bool (*can)(const GemmCall&, Device);
  /// Enqueues the product. The same call on the same kind of device gives the same bits. Never waits for the
  /// device, never allocates device memory; may be captured.
  void (*gemm)(const GemmCall&, Device, void* stream);
};

/// The table. Errc::unsupported, with the package to install, if cuBLASLt cannot be loaded.
const Blas& blas();

}  // namespace rz::kernels
