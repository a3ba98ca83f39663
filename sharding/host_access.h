#pragma once
/// Lets the host write and read pieces of tensors wherever they are: in place on the host, by a copy else.

#include <vector>

#include "tensor/tensor.h"

namespace rz {

/// f(float*) writes all elements of an f32 tensor.
template <class F>
void write_from_host(const Tensor& to, const Stream& stream, const F& f) {
  if (to.device().kind == Device::host) return f(to.data<float>());
  std::vector<float> values(to.count());
  f(values.data());
  to.assign(std::span<const float>(values), stream);
}

/// f(const float*) reads all elements of an f32 tensor.
template <class F>
void read_on_host(const Tensor& from, const Stream& stream, const F& f) {
  f(static_cast<const float*>(from.on_host(stream).data<float>()));
}

}  // namespace rz
