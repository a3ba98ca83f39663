// Sums over any extents, in double, in an order that depends on the shapes only. A sum of rows takes a block;
// of columns, a block takes 32 sums, and adds slices of the terms.

#include "tensor/kernels/block_sum.h"
#include "tensor/kernels/broadcast.h"
#include "tensor/kernels/device_ops.h"
#include "tensor/kernels/dtype_dispatch.h"

namespace rz::ops::device {

namespace {

constexpr unsigned max_blocks = 65536, slices = 16;

template <class T>
struct Output {
  T* data;
  double divisor;
  bool accumulate;
  __device__ void write(std::size_t i, double sum) const {
    const double value = sum / divisor;
    data[i] =
        from_f32<T>(static_cast<float>(accumulate ? static_cast<double>(to_f32(data[i])) + value : value));
  }
};

template <class T>
__global__ void sum_rows(Output<T> out, const T* in, Reduction r, std::size_t outputs, std::size_t terms) {
  for (std::size_t i = blockIdx.x; i < outputs; i += gridDim.x) {
    const T* const first = in + r.outputs.offset(i);
    double part = 0;
    for (std::size_t term = threadIdx.x; term < terms; term += blockDim.x)
      part += static_cast<double>(to_f32(first[r.terms.offset(term)]));
    const double sum = block_sum(part);
    if (threadIdx.x == 0) out.write(i, sum);
  }
}

template <class T>
__global__ void sum_columns(Output<T> out, const T* in, Reduction r, std::size_t outputs, std::size_t terms) {
  RZ_SHARED(double, parts, slices* warp_size);
  const unsigned lane = threadIdx.x % warp_size, slice = threadIdx.x / warp_size;
  for (std::size_t group = blockIdx.x; group * warp_size < outputs; group += gridDim.x) {
    const std::size_t i = group * warp_size + lane;
    double part = 0;
    if (i < outputs) {
      const T* const first = in + r.outputs.offset(i);
      for (std::size_t term = slice; term < terms; term += slices)
        part += static_cast<double>(to_f32(first[r.terms.offset(term)]));
    }
    parts[threadIdx.x] = part;
    __syncthreads();
    if (slice == 0 && i < outputs) {
      double sum = 0;
      for (unsigned s = 0; s < slices; ++s) sum += parts[s * warp_size + lane];
      out.write(i, sum);
    }
    __syncthreads();  // the parts have been read
  }
}

unsigned at_most(std::size_t blocks) {
  return static_cast<unsigned>(blocks < max_blocks ? blocks : max_blocks);
}

}  // namespace

void sum_to_size(const Tensor& out, const Tensor& in, double divisor, Into into, const Stream& stream) {
  const Reduction r = reduction(out.shape(), in.shape());
  const std::size_t outputs = out.count(), terms = outputs ? in.count() / outputs : 0;
  dispatch_dtype(out.dtype(), [&](auto t) {
    using T = decltype(t);
    const Output<T> to{out.data<T>(), divisor, into == Into::accumulate};
    const T* const from = in.data<T>();
    if (r.by_rows || terms == 0)
      cuda::launch("sum_to_size", sum_rows<T>, {{at_most(outputs)}, {threads_for_row(terms, 1024)}}, stream,
                   to, from, r, outputs, terms);
    else
      cuda::launch("sum_to_size", sum_columns<T>,
                   {{at_most(ceil_div(outputs, warp_size))}, {slices * warp_size}}, stream, to, from, r,
                   outputs, terms);
  });
}

}  // namespace rz::ops::device
