// Sums and multiples of losses, one thread each.

#include "comm/device/launch.h"
#include "tensor/kernels/device_ops.h"
#include "tensor/kernels/losses/loss_sums.h"

namespace rz::ops::device {

namespace {

__global__ void add_two(float* loss, double* sums, float* ratio, const double* a, const double* b) {
  losses::add_losses(loss, sums, ratio, a, b);
}

__global__ void add_one(float* loss, double* sums, float* terms, const double* a, const float* b) {
  losses::add_scalar(loss, sums, terms, a, b);
}

__global__ void scale_one(float* loss, double* sums, const double* a, double factor) {
  losses::scale_loss(loss, sums, a, factor);
}

}  // namespace

void add_losses(const Tensor& loss, const Tensor& sums, const Tensor& ratio, const Tensor& a, const Tensor& b,
                const Stream& stream) {
  cuda::launch("add_losses", add_two, {{1}, {1}}, stream, loss.data<float>(), sums.data<double>(),
               ratio.data<float>(), a.data<double>(), b.data<double>());
}

void add_scalar(const Tensor& loss, const Tensor& sums, const Tensor& terms, const Tensor& a, const Tensor& b,
                const Stream& stream) {
  cuda::launch("add_scalar", add_one, {{1}, {1}}, stream, loss.data<float>(), sums.data<double>(),
               terms.data<float>(), a.data<double>(), b.data<float>());
}

void scale_loss(const Tensor& loss, const Tensor& sums, const Tensor& a, double factor,
                const Stream& stream) {
  cuda::launch("scale_loss", scale_one, {{1}, {1}}, stream, loss.data<float>(), sums.data<double>(),
               a.data<double>(), factor);
}

}  // namespace rz::ops::device
