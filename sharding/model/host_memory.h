#pragma once
/// Host memory: of what a strategy on a CUDA device keeps there, and copies by which the host accesses
/// tensors.

#include <cstddef>
#include <span>

#include "comm/core/types.h"
#include "comm/device/stream.h"
#include "sharding/model/options.h"
#include "tensor/tensor.h"

namespace rz {

// ---- offloaded memory

/// Allocates host memory for copies from and to `device`.
Allocator offload_allocator(const OffloadOptions&, Device device);
/// Errc::unsupported if a capture of the stream would have to contain copies of memory that is not pinned.
void require_may_copy(const OffloadOptions&, const Stream&);

/// Bytes in memory of the strategy's device, and in host memory beside it. On the host all are the former.
struct HeldBytes {
  std::size_t on_device = 0, on_host = 0;
  void add(const Tensor& held, Device own) {
    if (held.defined()) (held.device() == own ? on_device : on_host) += held.bytes();
  }
};

// ---- access to the elements of tensors on any device: in place on the host, through a copy otherwise

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
