// The table of matrix products, computed by the host's BLAS when the emulated stream reaches them.

#include "tensor/kernels/linear_algebra/blas.h"

#include <cmath>
#include <cstdint>
#include <cstring>
#include <memory>
#include <vector>

#include "comm/core/error.h"
#include "comm/core/math.h"
#include "comm/device/cuda_runtime.h"
#include "tensor/kernels/linear_algebra/gemm.h"
#include "tests/emulated_gpu/machine.h"

namespace rz::emulated {

namespace {

using kernels::Epilogue;
using kernels::GemmCall;

constexpr std::size_t workspace = 4096;

float load(const void* from, DType t, std::size_t i) {
  if (t == DType::f16) return to_f32(static_cast<const f16*>(from)[i]);
  if (t == DType::bf16) return to_f32(static_cast<const bf16*>(from)[i]);
  return static_cast<const float*>(from)[i];
}

void store(void* to, DType t, std::size_t i, float value) {
  if (t == DType::f16)
    static_cast<f16*>(to)[i] = from_f32<f16>(value);
  else if (t == DType::bf16)
    static_cast<bf16*>(to)[i] = from_f32<bf16>(value);
  else
    static_cast<float*>(to)[i] = value;
}

/// A packed copy in f32.
std::vector<float> widened(const void* from, DType t, std::size_t rows, std::size_t columns,
                           std::size_t stride) {
  std::vector<float> values;
  for (std::size_t i = 0; i < rows; ++i)
    for (std::size_t j = 0; j < columns; ++j) values.push_back(load(from, t, i * stride + j));
  return values;
}

struct Gelu {
  explicit Gelu(double x) : x(x), tanh(std::tanh(0.7978845608028654 * (x + 0.044715 * x * x * x))) {}
  double value() const { return x / 2 * (1 + tanh); }
  double derivative() const {
    return (1 + tanh) / 2 + x / 2 * (1 - tanh * tanh) * 0.7978845608028654 * (1 + 3 * 0.044715 * x * x);
  }
  double x, tanh;
};

float finished(const GemmCall& c, float value, std::size_t i, std::size_t j) {
  const std::size_t at = i * c.d_stride + j;
  if (c.bias && (c.epilogue == Epilogue::bias || c.epilogue == Epilogue::gelu))
    value += load(c.bias, c.result, j);
  if (c.epilogue == Epilogue::gelu) {
    store(c.aux, c.result, at, value);
    return static_cast<float>(Gelu(double{value}).value());
  }
  if (c.epilogue == Epilogue::gelu_gradient)
    return static_cast<float>(double{value} * Gelu(double{load(c.aux, c.result, at)}).derivative());
  return value;
}

/// Of n columns with k elements, whose first and second one stand `next` apart.
void sum_columns(const GemmCall& c, const std::vector<float>& of, std::size_t n, std::size_t column,
                 std::size_t next) {
  for (std::size_t j = 0; j < n; ++j) {
    float sum = 0;
    for (std::size_t i = 0; i < c.k; ++i) sum += of[j * column + i * next];
    store(c.bias, c.result, j, sum);
  }
}

void multiply(const GemmCall& c) {
  const auto side = [&](bool transposed, std::size_t rows, std::size_t columns) {
    return transposed ? std::pair(columns, rows) : std::pair(rows, columns);
  };
  const auto [a_rows, a_columns] = side(c.transpose_a, c.m, c.k);
  const auto [b_rows, b_columns] = side(c.transpose_b, c.k, c.n);
  const auto a = widened(c.a, c.factors, a_rows, a_columns, c.a_stride);
  const auto b = widened(c.b, c.factors, b_rows, b_columns, c.b_stride);
  std::vector<float> d(c.m * c.n, 0.0f);
  if (c.beta != 0) d = widened(c.d, c.result, c.m, c.n, c.d_stride);
  kernels::gemm(d.data(), c.n, c.m, c.n, c.k, c.alpha, {a.data(), a_columns, c.transpose_a},
                {b.data(), b_columns, c.transpose_b}, c.beta);
  for (std::size_t i = 0; i < c.m; ++i)
    for (std::size_t j = 0; j < c.n; ++j)
      store(c.d, c.result, i * c.d_stride + j, finished(c, d[i * c.n + j], i, j));
  if (c.epilogue == Epilogue::column_sums_of_b)
    sum_columns(c, b, c.n, c.transpose_b ? c.k : 1, c.transpose_b ? 1 : c.n);
  if (c.epilogue == Epilogue::row_sums_of_a)
    sum_columns(c, a, c.m, c.transpose_a ? 1 : c.k, c.transpose_a ? c.m : 1);
  std::memset(c.workspace, 0xFF, workspace);  // no longer another caller's contents
}

void multiply_all(const GemmCall& c) {
  GemmCall one = c;
  for (std::size_t i = 0; i < c.batch.count; ++i) {
    one.a = static_cast<const std::byte*>(c.a) + i * c.batch.a_step * size_of(c.factors);
    one.b = static_cast<const std::byte*>(c.b) + i * c.batch.b_step * size_of(c.factors);
    one.d = static_cast<std::byte*>(c.d) + i * c.batch.d_step * size_of(c.result);
    multiply(one);
  }
}

/// cuBLASLt rejects unaligned data, and a bias for odd sizes in 16 bits. Sums over an odd number of rows are
/// rejected only to test the callers' fallback.
bool can(const GemmCall& c, Device) {
  if (c.epilogue == Epilogue::bias && size_of(c.factors) == 2 && (c.n % 2 != 0 || c.k % 2 != 0)) return false;
  const auto aligned = [](const void* p) { return reinterpret_cast<std::uintptr_t>(p) % 16 == 0; };
  if (c.epilogue == Epilogue::column_sums_of_b || c.epilogue == Epilogue::row_sums_of_a) return c.k % 2 == 0;
  return !c.aux || (c.d_stride % 8 == 0 && aligned(c.aux));
}

void gemm(const GemmCall& c, Device device, void* stream) {
  if (!can(c, device)) fail(Errc::unsupported, "the emulated BLAS cannot do this call");
  auto* const s = stream ? static_cast<Stream*>(stream) : Machine::instance().null_stream(device.index);
  require(s->device == device.index && c.workspace != nullptr, Errc::system,
          "emulated BLAS: a stream of another device, or no workspace");
  Machine::instance().submit(
      s, [c](std::uint64_t) -> Work { return [c] { return multiply_all(c), Progress::done; }; });
}

}  // namespace

}  // namespace rz::emulated

namespace rz::kernels {

const Blas& blas() {
  static constexpr Blas table{.workspace_bytes = [](Device) { return emulated::workspace; },
                              .can = emulated::can,
                              .gemm = emulated::gemm};
  return table;
}

}  // namespace rz::kernels
