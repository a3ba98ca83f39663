// A task is some groups of images. Statistics in double, in one pass over a group: of the differences from
// its first element, so that they are as accurate far from 0.

#include <algorithm>
#include <cmath>
#include <vector>

#include "tensor/kernels/check.h"
#include "tensor/kernels/device_ops.h"
#include "tensor/kernels/image/batch_norm.h"
#include "tensor/kernels/image/planes.h"

namespace rz::ops {

namespace {

using image::ChannelSizes;

std::size_t groups_of_thread(std::size_t elements) {
  return std::max<std::size_t>(1, 4096 / std::max<std::size_t>(1, elements));
}

bool fits(const ChannelSizes& s, const Tensor& mean, const Tensor& inverse_deviation) {
  const std::size_t groups = last(mean);
  return groups > 0 && s.channels % groups == 0 && mean.shape() == Shape{s.images, groups} &&
         inverse_deviation.shape() == mean.shape();
}

std::vector<float> floats_of(const Tensor& t) {
  std::vector<float> all(t.count());
  image::load_floats(all.data(), t, 0, all.size());
  return all;
}

/// Stores the sums over images of {Σ d_out, Σ d_out · n} of planes.
void sum_over_images(const Tensor& d_weight, const Tensor& d_bias, const std::vector<image::Sums>& planes,
                     const ChannelSizes& s, Into into) {
  for (std::size_t c = 0; c < s.channels; ++c) {
    image::Sums total;
    for (std::size_t n = 0; n < s.images; ++n)
      total.first += planes[n * s.channels + c].first, total.second += planes[n * s.channels + c].second;
    if (d_bias.defined()) image::store_number(d_bias, c, total.first, into);
    if (d_weight.defined()) image::store_number(d_weight, c, total.second, into);
  }
}

}  // namespace

void group_norm(const Tensor& out, const Tensor& mean, const Tensor& inverse_deviation, const Tensor& x,
                const Tensor& weight, const Tensor& bias, float epsilon, const Stream& stream) {
  constexpr const char* op = "group_norm";
  const ChannelSizes s = image::channel_sizes(op, x);
  check_norm(op, out, mean, inverse_deviation, x, weight, bias, s.channels,
             out.shape() == x.shape() && fits(s, mean, inverse_deviation));
  if (const auto* d = on_device(op, out, stream))
    return d->group_norm(out, mean, inverse_deviation, x, weight, bias, epsilon, stream);
  const std::size_t channels = s.channels / last(mean), n = channels * s.positions;
  float *const m = mean.data<float>(), *const r = inverse_deviation.data<float>();
  const std::vector<float> weights = floats_of(weight), biases = floats_of(bias);
  stream.parallel_for(mean.count(), groups_of_thread(n), [&](std::size_t begin, std::size_t end) {
    for (std::size_t i = begin; i < end; ++i) {
      const double count = static_cast<double>(n), centre = n ? image::load_number(x, i * n) : 0;
      const image::Sums sums = image::centred_sums(x, i * n, n, static_cast<float>(centre));
      const double average = sums.first / count;
      const double spread = sums.second / count - average * average;
      const double variance = spread < 0 ? 0 : spread;  // rounding; NaN stays
      m[i] = static_cast<float>(centre + average), r[i] = image::inverse_deviation(variance, epsilon);
      const std::size_t first = i * channels % s.channels;
      image::normalize_group(out, x, i * n, s.positions, channels, m[i], r[i], &weights[first],
                             &biases[first]);
    }
  });
}

void group_norm_backward(const Tensor& d_x, const Tensor& d_weight, const Tensor& d_bias, const Tensor& d_out,
                         const Tensor& x, const Tensor& weight, const Tensor& mean,
                         const Tensor& inverse_deviation, Into into_x, Into into_parameters,
                         const Stream& stream) {
  constexpr const char* op = "group_norm_backward";
  const ChannelSizes s = image::channel_sizes(op, x);
  check_norm_backward(
      op, d_x, d_out, x, weight, mean, inverse_deviation, s.channels,
      d_x.shape() == x.shape() && d_out.shape() == x.shape() && fits(s, mean, inverse_deviation));
  check_norm_gradients(op, d_weight, d_bias, x, s.channels);
  if (const auto* d = on_device(op, d_x, stream))
    return d->group_norm_backward(d_x, d_weight, d_bias, d_out, x, weight, mean, inverse_deviation, into_x,
                                  into_parameters, stream);
  const std::size_t channels = s.channels / last(mean), n = channels * s.positions;
  const float *const m = mean.data<float>(), *const r = inverse_deviation.data<float>();
  const std::vector<float> weights = floats_of(weight);
  std::vector<image::Sums> planes(s.images * s.channels);
  stream.parallel_for(mean.count(), groups_of_thread(n), [&](std::size_t begin, std::size_t end) {
    for (std::size_t i = begin; i < end; ++i) {
      const std::size_t first = i * channels % s.channels;
      image::Sums* const sums = &planes[i * channels];
      image::group_sums_of_gradients(sums, d_out, x, i * n, s.positions, channels, m[i], r[i]);
      double g = 0, gn = 0;
      for (std::size_t c = 0; c < channels; ++c) {
        const double w = weights[first + c];
        g += w * sums[c].first, gn += w * sums[c].second;
      }
      const double count = static_cast<double>(n);
      image::normalize_group_backward(
          d_x, d_out, x, i * n, s.positions, channels,
          {m[i], r[i], 1, static_cast<float>(g / count), static_cast<float>(gn / count)}, &weights[first],
          into_x);
    }
  });
  sum_over_images(d_weight, d_bias, planes, s, into_parameters);
}

}  // namespace rz::ops
