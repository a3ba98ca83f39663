#include "sharding/model/host_memory.h"

#include <algorithm>

#include "comm/core/error.h"
#include "comm/core/math.h"
#include "comm/device/allocate.h"
#include "tensor/kernels/dtype_dispatch.h"

namespace rz {

Allocator offload_allocator(const OffloadOptions& options, Device device) {
  if (!options.pin_memory) return allocate_host;
  return [device](std::size_t bytes) { return allocate_pinned(device, bytes); };
}

void require_may_copy(const OffloadOptions& options, const Stream& stream) {
  require(options.pin_memory || !stream.capturing(), Errc::unsupported,
          "offloaded memory that is not pinned cannot be copied in a graph; set pin_memory, or run without "
          "graphs");
}

Tensor converted(const Tensor& from, DType dtype) {
  if (from.dtype() == dtype) return from;
  const Tensor to = Tensor::empty(from.shape(), dtype);
  ops::dispatch_dtype(from.dtype(), [&](auto in) {
    ops::dispatch_dtype(dtype, [&](auto out) {
      using In = decltype(in);
      using Out = decltype(out);
      std::transform(from.data<In>(), from.data<In>() + from.count(), to.data<Out>(),
                     [](In x) { return from_f32<Out>(to_f32(x)); });
    });
  });
  return to;
}

}  // namespace rz
