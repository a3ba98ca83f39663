#pragma once
/// Macros for writing kernels (.cu files), and launch(). nvcc compiles a kernel for the GPU. For the emulated
/// device a host compiler compiles the same source, after a header that defines the CUDA keywords
/// (RZ_EMULATED_GPU).

#include <tuple>
#include <utility>

#include "comm/core/integer_math.h"
#include "comm/device/cuda_runtime.h"
#include "comm/device/stream.h"

#ifdef __CUDACC__
/// `T name[count]` in static shared memory of the block.
#define RZ_SHARED(T, name, count) __shared__ T name[count]
/// `T* name`: the dynamic shared memory of the launch.
#define RZ_DYNAMIC_SHARED(T, name)                            \
  extern __shared__ __align__(16) unsigned char rz_shared_[]; \
  T* const name = reinterpret_cast<T*>(rz_shared_)
#endif

namespace rz::cuda {

/// One thread per element in blocks of `threads`. Limited to `max_blocks`, for kernels with a grid-stride
/// loop.
inline Grid grid_for(std::size_t elements, unsigned threads = 256, std::size_t max_blocks = 1 << 20) {
  const std::size_t blocks = ceil_div(elements, threads);
  return {{static_cast<unsigned>(blocks < max_blocks ? blocks : max_blocks)}, {threads}, 0};
}

namespace detail {

template <class... P, std::size_t... i>
void launch_packed(const char* name, void (*kernel)(P...), const Grid& grid, const Stream& stream,
                   std::tuple<P...>& values, std::index_sequence<i...>) {
  void* pointers[] = {static_cast<void*>(&std::get<i>(values))..., nullptr};
  KernelCall call{name, reinterpret_cast<const void*>(kernel), pointers, nullptr, 0, nullptr};
#ifdef RZ_EMULATED_GPU
  struct Packed {
    void (*kernel)(P...);
    std::tuple<P...> values;
  } packed{kernel, values};
  call.packed = &packed;
  call.packed_bytes = sizeof packed;
  call.run_thread = [](const void* p) {
    const auto& it = *static_cast<const Packed*>(p);
    std::apply(it.kernel, it.values);
  };
#endif
  check(runtime().launch(call, grid, stream.native()), name, stream.device());
}

}  // namespace detail

/// Launches kernel(args…) in the stream. An empty grid launches nothing. Errc::system names the kernel and
/// the device.
template <class... P, class... A>
void launch(const char* name, void (*kernel)(P...), const Grid& grid, const Stream& stream, A&&... args) {
  static_assert((std::is_trivially_copyable_v<P> && ...), "a kernel's arguments are copied as bytes");
  if (grid.blocks.count() == 0 || grid.threads.count() == 0) return;
  const DeviceGuard guard(stream.device());
  std::tuple<P...> values(static_cast<P>(std::forward<A>(args))...);
  detail::launch_packed(name, kernel, grid, stream, values, std::index_sequence_for<P...>());
}

}  // namespace rz::cuda
