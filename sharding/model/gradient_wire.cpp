#include "sharding/model/gradient_wire.h"

#include <cmath>
#include <utility>

#include "comm/core/error.h"
#include "comm/core/math.h"
#include "comm/device/meta.h"
#include "sharding/model/flat_layout.h"
#include "tensor/kernels/dtype_dispatch.h"
#include "tensor/ops.h"

namespace rz {

namespace {

/// out = factor · in, rounded once on the host.
void convert(const Tensor& out, const Tensor& in, float factor, const Stream& stream) {
  if (in.device().kind == Device::cuda) {
    if (factor != 1) ops::scale(in, in, factor, stream);
    if (out.raw() != in.raw()) ops::copy(out, in, stream);
    return;
  }
  if (is_meta(in.device())) return;
  ops::dispatch_dtype(in.dtype(), [&](auto from) {
    ops::dispatch_dtype(out.dtype(), [&](auto to) {
      const auto* x = in.data<decltype(from)>();
      auto* y = out.data<decltype(to)>();
      for (std::size_t i = 0; i < in.count(); ++i) y[i] = from_f32<decltype(to)>(factor * to_f32(x[i]));
    });
  });
}

}  // namespace

void check(const WireFormat& format) {
  const DType type = format.communication_data_type.value_or(DType::f32);
  require(type == DType::f32 || type == DType::bf16 || type == DType::f16, Errc::invalid_argument,
          "communication_data_type is ", name(type), "; choose f32, bf16 or f16");
  const double factor = format.gradient_predivide_factor;
  require(factor > 0 && std::isfinite(factor), Errc::invalid_argument, "gradient_predivide_factor is ",
          factor, ", expected a finite number above 0");
}

GradientWire::GradientWire(const WireFormat& format, ReduceOp result, Runtime& runtime)
    : format_(format), result_(result), runtime_(runtime) {
  const int ranks = runtime.communicator.size();
  const double factor = format.gradient_predivide_factor;
  if (format.prescale_gradients) {
    before_ = 1 / static_cast<float>(ranks);
  } else if (factor != 1) {
    before_ = static_cast<float>(1 / factor);
    after_ = static_cast<float>(factor / ranks);
  }
}

ReduceOp GradientWire::op() const {
  const bool scaled = format_.prescale_gradients || format_.gradient_predivide_factor != 1;
  return scaled ? ReduceOp::sum : result_;
}

bool GradientWire::is_plain(DType gradients) const {
  const bool scaled = format_.prescale_gradients || format_.gradient_predivide_factor != 1;
  return format_.communication_data_type.value_or(gradients) == gradients && !scaled;
}

Tensor GradientWire::encoded(const Tensor& gradients, const Stream& stream) {
  const DType type = format_.communication_data_type.value_or(gradients.dtype());
  const Tensor out =
      type == gradients.dtype() ? gradients : runtime_.transient.allocate(gradients.shape(), type);
  convert(out, gradients, before_, stream);
  return out;
}

GradientWire::Reduction GradientWire::all_reduce(const Tensor& in_out, const Stream& stream) {
  if (is_plain(in_out.dtype())) return {runtime_.all_reduce(in_out, result_, stream), {}};
  const Tensor sum = encoded(in_out, stream);
  return {runtime_.all_reduce(sum, op(), stream), sum};
}

GradientWire::Reduction GradientWire::reduce_scatter(const Tensor& in, const Tensor& out,
                                                     const Stream& stream) {
  if (is_plain(in.dtype())) return {runtime_.reduce_scatter(in, out, result_, stream), {}};
  const Tensor whole = encoded(in, stream);
  const Communicator& group = runtime_.shard_group;
  const Range own = shard_range(in.count(), group.rank(), group.size());
  const Tensor sum = whole.view(own.begin, {own.count()});
  return {runtime_.reduce_scatter(whole, sum, op(), stream), sum};
}

void GradientWire::finish(Reduction& reduction, const Tensor& out, const Stream& stream) {
  runtime_.exposed.wait(std::exchange(reduction.work, {}), runtime_.stream);
  if (const Tensor sum = std::exchange(reduction.sum, {}); sum.defined()) convert(out, sum, after_, stream);
}

}  // namespace rz
