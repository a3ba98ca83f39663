// Sums and multiples of losses.

#include "tensor/kernels/losses/loss_sums.h"

#include "tensor/kernels/device_ops.h"
#include "tensor/kernels/losses/row_sums.h"
#include "tensor/loss_ops.h"

namespace rz::ops {

void add_losses(const Tensor& loss, const Tensor& sums, const Tensor& ratio, const Tensor& a, const Tensor& b,
                const Stream& stream) {
  constexpr const char* op = "add_losses";
  check(op, {{"loss", loss}, {"ratio", ratio}}, loss.count() == 1 && ratio.count() == 1);
  check_dtype(op, DType::f32, {{"loss", loss}, {"ratio", ratio}});
  losses::check_pair(op, "sums", sums, loss);
  losses::check_pair(op, "a", a, loss);
  losses::check_pair(op, "b", b, loss);
  if (const auto* d = on_device(op, loss, stream)) return d->add_losses(loss, sums, ratio, a, b, stream);
  losses::add_losses(loss.data<float>(), sums.data<double>(), ratio.data<float>(), a.data<double>(),
                     b.data<double>());
}

void add_scalar(const Tensor& loss, const Tensor& sums, const Tensor& terms, const Tensor& a, const Tensor& b,
                const Stream& stream) {
  constexpr const char* op = "add_scalar";
  check(op, {{"loss", loss}, {"terms", terms}, {"b", b}},
        loss.count() == 1 && terms.count() == 1 && b.count() == 1);
  check_dtype(op, DType::f32, {{"loss", loss}, {"terms", terms}, {"b", b}});
  losses::check_pair(op, "sums", sums, loss);
  losses::check_pair(op, "a", a, loss);
  if (const auto* d = on_device(op, loss, stream)) return d->add_scalar(loss, sums, terms, a, b, stream);
  losses::add_scalar(loss.data<float>(), sums.data<double>(), terms.data<float>(), a.data<double>(),
                     b.data<float>());
}

void scale_loss(const Tensor& loss, const Tensor& sums, const Tensor& a, double factor,
                const Stream& stream) {
  constexpr const char* op = "scale_loss";
  check(op, {{"loss", loss}}, loss.count() == 1);
  check_dtype(op, DType::f32, {{"loss", loss}});
  losses::check_pair(op, "sums", sums, loss);
  losses::check_pair(op, "a", a, loss);
  if (const auto* d = on_device(op, loss, stream)) return d->scale_loss(loss, sums, a, factor, stream);
  losses::scale_loss(loss.data<float>(), sums.data<double>(), a.data<double>(), factor);
}

}  // namespace rz::ops
