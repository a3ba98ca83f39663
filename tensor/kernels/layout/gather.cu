// One thread per row.

#include "comm/device/launch.h"
#include "tensor/kernels/device_ops.h"
#include "tensor/kernels/dtype_dispatch.h"

namespace rz::ops::device {

namespace {

template <class T>
struct Rows {
  T* data;
  std::size_t columns, stride;
};

template <class T>
Rows<T> rows_of(const Tensor& t) {
  return {t.data<T>(), t.shape()[-1], t.row_stride()};
}

template <class T>
__global__ void gather_elements(T* out, Rows<T> in, const std::int32_t* index, std::size_t rows) {
  const std::size_t r = std::size_t{blockIdx.x} * blockDim.x + threadIdx.x;
  if (r >= rows) return;
  const bool inside = index[r] >= 0 && static_cast<std::size_t>(index[r]) < in.columns;
  out[r] = inside ? in.data[r * in.stride + static_cast<std::size_t>(index[r])]
                  : from_f32<T>(detail::float_of(0x7fc00000u));
}

template <class T>
__global__ void add_to_elements(Rows<T> d_in, const T* d_out, const std::int32_t* index, std::size_t rows) {
  const std::size_t r = std::size_t{blockIdx.x} * blockDim.x + threadIdx.x;
  if (r >= rows || index[r] < 0 || static_cast<std::size_t>(index[r]) >= d_in.columns) return;
  T& to = d_in.data[r * d_in.stride + static_cast<std::size_t>(index[r])];
  to = from_f32<T>(to_f32(to) + to_f32(d_out[r]));
}

}  // namespace

void gather(const Tensor& out, const Tensor& in, const Tensor& index, const Stream& stream) {
  const std::size_t rows = out.count();
  dispatch_dtype(out.dtype(), [&](auto t) {
    using T = decltype(t);
    cuda::launch("gather", gather_elements<T>, cuda::grid_for(rows, 256, ~std::size_t{0}), stream,
                 out.data<T>(), rows_of<T>(in), index.data<std::int32_t>(), rows);
  });
}

/// The gradient has been zeroed with Into::overwrite.
void gather_backward(const Tensor& d_in, const Tensor& d_out, const Tensor& index, Into,
                     const Stream& stream) {
  const std::size_t rows = d_out.count();
  dispatch_dtype(d_in.dtype(), [&](auto t) {
    using T = decltype(t);
    cuda::launch("gather_backward", add_to_elements<T>, cuda::grid_for(rows, 256, ~std::size_t{0}), stream,
                 rows_of<T>(d_in), d_out.data<T>(), index.data<std::int32_t>(), rows);
  });
}

}  // namespace rz::ops::device
