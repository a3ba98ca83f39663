#pragma once
/// The checks at the operators' face, with messages that name the operator and every shape.

#include <cstddef>
#include <initializer_list>

#include "tensor/tensor.h"

namespace rz::ops {

struct Argument {
  const char* name;
  const Tensor& tensor;
};

/// Errc::invalid_argument unless `fits`, and every tensor is defined, on the first one's device, and f32, or
/// on a CUDA device f32, f16 or bf16.
void check(const char* op, std::initializer_list<Argument>, bool fits);
/// The same for indices: i32, as many as `count`; each must lie in [0, limit) or be `ignored`, which is
/// looked at on the host only.
void check_indices(const char* op, const Argument&, std::size_t count, std::size_t limit, int ignored = 0);

/// The last extent; 1 for a scalar.
inline std::size_t last(const Tensor& t) { return t.shape().dims() ? t.shape()[-1] : 1; }
/// All extents but the last, taken together.
inline std::size_t rows(const Tensor& t) { return last(t) ? t.count() / last(t) : 0; }
inline bool is_vector(const Tensor& t, std::size_t n) { return t.shape() == Shape{n}; }
inline bool optional_vector(const Tensor& t, std::size_t n) { return !t.defined() || is_vector(t, n); }

}  // namespace rz::ops
