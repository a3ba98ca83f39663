#include "tensor/ops.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "tensor/kernels/elementwise/dropout.cpp"
#include <hwy/foreach_target.h>
#include <hwy/highway.h>

#include "tensor/kernels/check.h"
#include "tensor/kernels/device_ops.h"
#include "tensor/kernels/elementwise/dropout-inl.h"
#include "tensor/kernels/vector-inl.h"

HWY_BEFORE_NAMESPACE();
namespace rz {
namespace HWY_NAMESPACE {

void dropout_range(const Tensor& out, const Tensor& in, std::size_t begin, std::size_t end,
                   const kernels::DropoutParams& d) {
  ops::dispatch_dtype(out.dtype(), [&](auto t) HWY_ATTR {
    using T = decltype(t);
    for (std::size_t i = begin, n; i < end; i += n) {
      n = d.run ? std::min<std::size_t>(end - i, d.run - i % d.run) : end - i;
      drop<T>(elements<T>(out) + i, elements<T>(in) + i, n, d.decision(i), d);
    }
  });
}

}  // namespace HWY_NAMESPACE
}  // namespace rz
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace rz {

HWY_EXPORT(dropout_range);

namespace ops {

void dropout(const Tensor& out, const Tensor& in, const DropoutMask& mask, const Stream& stream) {
  check("dropout", {{"out", out}, {"in", in}}, out.count() == in.count());
  if (const auto* d = on_device("dropout", out, stream)) return d->dropout(out, in, mask, stream);
  kernels::DropoutParams d = kernels::dropout_params("dropout", mask);
  d.read_seed();
  check_dtype("dropout", out.dtype(), {{"in", in}});
  stream.parallel_for(in.count(), 1024, [&](std::size_t begin, std::size_t end) {
    HWY_DYNAMIC_DISPATCH(dropout_range)(out, in, begin, end, d);
  });
}

}  // namespace ops
}  // namespace rz
#endif
