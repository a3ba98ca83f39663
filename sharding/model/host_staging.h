#pragma once
/// Host access to the elements of tensors on any device: in place on the host, through a copy otherwise.

#include <cstddef>
#include <span>

#include "tensor/tensor.h"

namespace rz {

/// The values of a host tensor in another dtype (f32, f16, bf16); the tensor itself if it has that dtype.
Tensor converted(const Tensor&, DType);

/// Calls f(float*), which writes all elements; 16-bit elements are rounded to nearest.
template <class F>
void write_via_host(const Tensor& to, const Stream& stream, const F& f) {
  if (to.device().kind == Device::host && to.dtype() == DType::f32) return f(to.data<float>());
  const Tensor values = Tensor::empty(to.shape());
  f(values.data<float>());
  to.assign(std::as_bytes(std::span(converted(values, to.dtype()).raw(), to.bytes())), stream);
}

/// Calls f(const float*), which reads all elements.
template <class F>
void read_via_host(const Tensor& from, const Stream& stream, const F& f) {
  f(static_cast<const float*>(converted(from.on_host(stream), DType::f32).data<float>()));
}

}  // namespace rz
