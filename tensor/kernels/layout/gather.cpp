// One element of each row.

#include "tensor/kernels/check.h"
#include "tensor/kernels/device_ops.h"
#include "tensor/kernels/dtype_dispatch.h"

namespace rz::ops {

namespace {

constexpr std::size_t rows_per_thread = 1024;

void check_gather(const char* op, const Argument& elements, const Argument& all, const Tensor& index) {
  const Shape &few = elements.tensor.shape(), &shape = all.tensor.shape();
  bool fits = shape.dims() == few.dims() + 1 && elements.tensor.contiguous() &&
              elements.tensor.dtype() == all.tensor.dtype();
  for (int d = 0; d < few.dims(); ++d) fits = fits && few[d] == shape[d];
  check(op, {elements, all}, fits, Rows::any_stride);
  check_indices(op, {"index", index}, few.count(), shape[-1]);
}

/// Calls f(row, place of its element in `all`).
template <class F>
void each_place(const Tensor& all, const Tensor& index, const Stream& stream, const F& f) {
  const std::int32_t* const column = index.data<std::int32_t>();
  const std::size_t stride = all.row_stride();
  stream.parallel_for(index.count(), rows_per_thread, [&](std::size_t begin, std::size_t end) {
    for (std::size_t r = begin; r < end; ++r) f(r, r * stride + static_cast<std::size_t>(column[r]));
  });
}

}  // namespace

void gather(const Tensor& out, const Tensor& in, const Tensor& index, const Stream& stream) {
  check_gather("gather", {"out", out}, {"in", in}, index);
  if (const auto* d = on_device("gather", out, stream)) return d->gather(out, in, index, stream);
  dispatch_dtype(out.dtype(), [&](auto t) {
    auto *const to = out.data<decltype(t)>(), *const from = in.data<decltype(t)>();
    each_place(in, index, stream, [=](std::size_t r, std::size_t place) { to[r] = from[place]; });
  });
}

void gather_backward(const Tensor& d_in, const Tensor& d_out, const Tensor& index, Into into,
                     const Stream& stream) {
  check_gather("gather_backward", {"d_out", d_out}, {"d_in", d_in}, index);
  if (into == Into::overwrite) fill(d_in, 0, stream);
  if (const auto* d = on_device("gather_backward", d_in, stream))
    return d->gather_backward(d_in, d_out, index, into, stream);
  dispatch_dtype(d_in.dtype(), [&](auto t) {
    using T = decltype(t);
    T *const to = d_in.data<T>(), *const from = d_out.data<T>();
    each_place(d_in, index, stream, [=](std::size_t r, std::size_t place) {
      to[place] = from_f32<T>(to_f32(to[place]) + to_f32(from[r]));
    });
  });
}

}  // namespace rz::ops
