#pragma once
/// Statistics of a channel, for both compilers.

#include <cmath>

#include "comm/core/math.h"
#include "tensor/image_ops.h"

namespace rz::ops::image {

/// Sizes of x[N, C], [N, C, L] or [N, C, H, W].
struct ChannelSizes {
  std::size_t images, channels, positions;
};
/// Errc::invalid_argument unless x has two to four extents.
ChannelSizes channel_sizes(const char* op, const Tensor& x);

/// Where the statistics of a layer are; null: nowhere.
struct RunningPointers {
  float *mean, *variance;
  std::int64_t* batches;
  float momentum;
};
inline RunningPointers pointers(const RunningStatistics& r) {
  const auto of = [](const Tensor& t) { return t.defined() ? t.data<float>() : nullptr; };
  return {of(r.mean), of(r.variance), r.batches.defined() ? r.batches.data<std::int64_t>() : nullptr,
          r.momentum};
}

RZ_HOST_DEVICE inline float inverse_deviation(double variance, float epsilon) {
  return static_cast<float>(1 / sqrt(variance + static_cast<double>(epsilon)));
}

/// Channel c of {Σ x, Σ x², number}; `batches` counts this one.
RZ_HOST_DEVICE inline void statistics_of_channel(std::size_t c, std::size_t channels, const double* sums,
                                                 float epsilon, float* mean, float* inverse,
                                                 const RunningPointers& r, std::int64_t batches) {
  const double count = sums[2 * channels], average = sums[c] / count;
  const double spread = sums[channels + c] / count - average * average;
  const double variance = spread < 0 ? 0 : spread;  // rounding; NaN stays
  mean[c] = static_cast<float>(average);
  inverse[c] = inverse_deviation(variance, epsilon);
  const double weight = r.momentum < 0 ? 1 / static_cast<double>(batches) : static_cast<double>(r.momentum);
  const auto update = [weight](float& running, double value) {
    running = static_cast<float>((1 - weight) * static_cast<double>(running) + weight * value);
  };
  if (r.mean) update(r.mean[c], average);
  if (r.variance) update(r.variance[c], count > 1 ? variance * (count / (count - 1)) : variance);
}

}  // namespace rz::ops::image
