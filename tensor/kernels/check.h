#pragma once
/// Argument checks of the operators. Messages name the operator and every shape.

#include <cstddef>
#include <cstdint>
#include <initializer_list>

#include "tensor/tensor.h"

namespace rz::ops {

struct Argument {
  const char* name;
  const Tensor& tensor;
};

/// What an operator reads and writes: contiguous tensors, or any Tensor::row_stride().
enum class Rows { contiguous, any_stride };
enum class DTypes { floats, any };
/// f32, f16 or bf16.
bool is_float(DType);
/// Errc::invalid_argument unless `fits` holds, and every tensor is defined, on the first one's device, f32,
/// f16 or bf16 or `dtypes` allows all, and contiguous, or `rows` allows a stride.
void check(const char* op, std::initializer_list<Argument>, bool fits, Rows rows = Rows::contiguous,
           DTypes dtypes = DTypes::floats);
/// For operators on the host. Errc::invalid_argument unless every defined tensor is of this dtype.
void check_dtype(const char* op, DType, std::initializer_list<Argument>);
/// The same for gradients of parameters of this dtype, which may be f32 too.
void check_gradient_dtype(const char* op, DType, std::initializer_list<Argument>);
/// Checks a norm over `channels` channels: weight and bias are vectors of the dtype of x, as is out;
/// statistics are f32. `fit`: the shapes of out and of the statistics fit.
void check_norm(const char* op, const Tensor& out, const Tensor& mean, const Tensor& inverse_deviation,
                const Tensor& x, const Tensor& weight, const Tensor& bias, std::size_t channels, bool fit);
/// Checks its backward; `fit`: the shapes of d_x, d_out and the statistics fit.
void check_norm_backward(const char* op, const Tensor& d_x, const Tensor& d_out, const Tensor& x,
                         const Tensor& weight, const Tensor& mean, const Tensor& inverse_deviation,
                         std::size_t channels, bool fit);
/// The gradients of its weight and bias, those that are defined.
void check_norm_gradients(const char* op, const Tensor& d_weight, const Tensor& d_bias, const Tensor& x,
                          std::size_t channels);
/// Errc::invalid_argument unless the tensor holds `count` i32 indices. On the host, each must be in [0,
/// limit) or one of `others`; on a device the values are not checked.
void check_indices(const char* op, const Argument&, std::size_t count, std::size_t limit,
                   std::initializer_list<std::int32_t> others = {});

/// The last dimension; 1 for a scalar.
inline std::size_t last(const Tensor& t) { return t.shape().dims() ? t.shape()[-1] : 1; }
/// The product of all dimensions but the last.
inline std::size_t rows(const Tensor& t) { return last(t) ? t.count() / last(t) : 0; }
inline bool same_rows(const Tensor& a, const Tensor& b) {
  return last(a) == last(b) && a.count() == b.count();
}
inline bool is_vector(const Tensor& t, std::size_t n) { return t.shape() == Shape{n}; }
inline bool optional_vector(const Tensor& t, std::size_t n) { return !t.defined() || is_vector(t, n); }

}  // namespace rz::ops
