#pragma once
/// Matrix products on CUDA devices, as one table: NVIDIA's cuBLASLt, or in tests the host's BLAS in the order
/// of an emulated device's stream.

#include <cstddef>

#include "comm/core/types.h"

namespace rz::kernels {

/// What happens to alpha · a · b + beta · d on its way into d[m, n].
enum class Epilogue {
  none,
  bias,              ///< bias[n] is added to every row
  gelu,              ///< bias[n] is added unless null, the sum is stored in `aux`, d becomes its GELU (tanh)
  gelu_gradient,     ///< is multiplied by the derivative of GELU (tanh) at `aux`
  column_sums_of_b,  ///< none; bias[n] becomes b's sums over k
  row_sums_of_a      ///< none; bias[m] becomes a's sums over k
};

/// d[m, n] = epilogue(alpha · a[m, k] · b[k, n] + beta · d), row-major, sums in f32. A transposed factor is
/// stored as [k, m] or [n, k]. Strides are elements from row to row. d is not read if beta is 0.
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
  DType result = DType::f32;   ///< of d, bias and aux: as the factors, or f32
  float alpha = 1, beta = 0;
  Epilogue epilogue = Epilogue::none;
  void* bias = nullptr;
  void* aux = nullptr;  ///< [m, n], rows d_stride apart
  bool allow_tf32 = false;
  void* workspace = nullptr;  ///< workspace_bytes() of the device, the stream's alone
};

/// Thread-safe. All errors are exceptions that name the call and the device.
struct Blas {
  std::size_t (*workspace_bytes)(Device);
  /// Whether gemm can do it, epilogue and all, on this device: a function of sizes, types, transposes, and of
  /// the alignment of addresses below 16 bytes.
  bool (*can)(const GemmCall&, Device);
  /// Puts the product into the stream. The same call on the same kind of device gives the same bits. Never
  /// waits for the device or allocates its memory; may be captured.
  void (*gemm)(const GemmCall&, Device, void* stream);
};

/// Errc::unsupported, with what to install, where cuBLASLt cannot be loaded.
const Blas& blas();

}  // namespace rz::kernels
