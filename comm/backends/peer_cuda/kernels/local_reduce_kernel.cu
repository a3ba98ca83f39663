// Reduction and scaling on one device, for NCCL's deterministic mode and for tests of the arithmetic. Bound
// by memory bandwidth: (sources + 1) * bytes.

#include "comm/backends/peer_cuda/kernels/peer_kernels.h"
#include "comm/backends/peer_cuda/kernels/reduce_elements.cuh"
#include "comm/device/launch.h"

namespace rz::peer {

namespace {

struct Sources {
  const void* at[PeerKernels::max_sources];
  int count;
};

__device__ ThreadIndex grid_thread() {
  return {std::size_t{blockIdx.x} * blockDim.x + threadIdx.x, std::size_t{gridDim.x} * blockDim.x};
}

template <class Op, class T>
__global__ void __launch_bounds__(256)
    reduce_kernel(T* dst, const __grid_constant__ Sources sources, std::size_t count, int divisor, Op op) {
  reduce_elements(op, dst, reinterpret_cast<const T* const*>(sources.at), sources.count, count, divisor,
                  grid_thread());
}

template <class T>
__global__ void __launch_bounds__(256) scale_kernel(T* dst, const T* src, std::size_t count, double factor) {
  scale_elements(dst, src, count, factor, grid_thread());
}

}  // namespace

void reduce(void* dst, std::span<const void* const> sources, std::size_t count, DType dtype,
            ReduceOp::Kind kind, int divide, const Stream& stream) {
  require(!sources.empty(), Errc::invalid_argument, "reduce() of ", name(dtype), " without a source");
  require(sources.size() <= PeerKernels::max_sources, Errc::unsupported, "reduce() of ", sources.size(),
          " sources on ", name(stream.device()), ": at most ", PeerKernels::max_sources,
          " are combined at once");
  Sources all{};
  for (const void* source : sources) all.at[all.count++] = source;
  const int divisor = kind == ReduceOp::avg ? divide : 1;
  dispatch_op(kind, dtype, [&](auto op, auto element) {
    using Op = decltype(op);
    using T = decltype(element);
    const std::size_t words = (count + Word<T>::count - 1) / Word<T>::count;
    cuda::launch("reduce", reduce_kernel<Op, T>, cuda::grid_for(words, 256, 8192), stream,
                 static_cast<T*>(dst), all, count, divisor, op);
  });
}

void scale(void* dst, const void* src, std::size_t count, DType dtype, double factor, const Stream& stream) {
  dispatch_dtype(dtype, [&](auto element) {
    using T = decltype(element);
    cuda::launch("scale", scale_kernel<T>, cuda::grid_for(count, 256, 8192), stream, static_cast<T*>(dst),
                 static_cast<const T*>(src), count, factor);
  });
}

}  // namespace rz::peer
