#pragma once
/// Argument checks of the operators. Messages name the operator and every shape.

#include <cstddef>
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
/// Errc::invalid_argument unless the tensor holds `count` i32 indices. On the host, each must be in [0,
/// limit) or equal to `ignored`; on a device the values are not checked.
void check_indices(const char* op, const Argument&, std::size_t count, std::size_t limit, int ignored = 0);

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
