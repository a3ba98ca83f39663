#include "sharding/model/host_staging.h"

#include <algorithm>

#include "comm/core/math.h"
#include "tensor/kernels/dtype_dispatch.h"

namespace rz {

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
