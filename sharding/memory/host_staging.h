#pragma once
/// Lets the host write and read pieces of tensors wherever they are: in place on the host, by a copy else.

#include <cstddef>
#include <span>

#include "tensor/tensor.h"

namespace rz {

/// The same values on the host as elements of another type (f32, f16, bf16); itself if it has that type.
Tensor converted(const Tensor&, DType);

/// f(float*) writes all elements; those of 16 bits are rounded to nearest.
template <class F>
void write_via_host(const Tensor& to, const Stream& stream, const F& f) {
  if (to.device().kind == Device::host && to.dtype() == DType::f32) return f(to.data<float>());
  const Tensor values = Tensor::empty(to.shape());
  f(values.data<float>());
  to.assign(std::as_bytes(std::span(converted(values, to.dtype()).raw(), to.bytes())), stream);
}

/// f(const float*) reads all elements.
template <class F>
void read_via_host(const Tensor& from, const Stream& stream, const F& f) {
  f(static_cast<const float*>(converted(from.on_host(stream), DType::f32).data<float>()));
}

}  // namespace rz
