// Sums by channel in double. A task is some channels, whose planes are added image by image; where planes are
// single elements, whose rows are added. So the order does not depend on the number of threads.

#include "tensor/kernels/image/batch_norm.h"

#include <algorithm>
#include <array>
#include <vector>

#include "tensor/kernels/check.h"
#include "tensor/kernels/device_ops.h"
#include "tensor/kernels/image/planes.h"

namespace rz::ops {

namespace image {

namespace {

/// Errc::invalid_argument unless the tensor is of this dtype and shape, contiguous, and where `like` is.
void check_buffer(const char* op, const char* what, const Tensor& t, DType dtype, std::size_t n,
                  const Tensor& like) {
  require(
      t.defined() && t.dtype() == dtype && t.count() == n && t.contiguous() && t.device() == like.device(),
      Errc::invalid_argument, op, ": ", what, " must be ", name(dtype), " [", n, "] on ", name(like.device()),
      ", and is ",
      t.defined() ? concat(name(t.dtype()), " ", name(t.shape()), " on ", name(t.device())) : "undefined");
}

/// The same of running statistics that are defined.
void check_running(const char* op, const RunningStatistics& r, const Tensor& like) {
  if (r.mean.defined()) check_buffer(op, "running mean", r.mean, DType::f32, like.count(), like);
  if (r.variance.defined()) check_buffer(op, "running variance", r.variance, DType::f32, like.count(), like);
  if (r.batches.defined()) check_buffer(op, "number of batches", r.batches, DType::i64, 1, like);
  require(r.momentum >= 0 || r.batches.defined(), Errc::invalid_argument, op,
          ": the mean of all batches needs their number");
}

/// Calls of_plane(at, n) -> Sums for the planes of a channel, or of_row(first, second, at, n) for parts of
/// rows of channels, and stores the sums.
template <class Plane, class Row>
void sum_channels(double* first, double* second, const ChannelSizes& s, const Stream& stream,
                  const Plane& of_plane, const Row& of_row) {
  constexpr std::size_t tile = 64;
  if (s.positions == 1)
    return stream.parallel_for(s.channels, tile, [&](std::size_t begin, std::size_t end) {
      for (std::size_t c = begin; c < end; c += tile) {
        const std::size_t n = std::min(tile, end - c);
        std::fill_n(first + c, n, 0.0);
        std::fill_n(second + c, n, 0.0);
        for (std::size_t image = 0; image < s.images; ++image)
          of_row(first + c, second + c, c, image * s.channels + c, n);
      }
    });
  stream.parallel_for(s.channels, 1, [&](std::size_t begin, std::size_t end) {
    for (std::size_t c = begin; c < end; ++c) {
      Sums total;
      for (std::size_t image = 0; image < s.images; ++image) {
        const Sums sums = of_plane(c, (image * s.channels + c) * s.positions, s.positions);
        total.first += sums.first, total.second += sums.second;
      }
      first[c] = total.first, second[c] = total.second;
    }
  });
}

/// Calls of_plane(c, at, n) for all planes, or of_row(at, n) for all rows of channels.
template <class Plane, class Row>
void each_channel(const ChannelSizes& s, const Stream& stream, const Plane& of_plane, const Row& of_row) {
  if (s.positions == 1)
    return stream.parallel_for(s.images,
                               std::max<std::size_t>(1, 4096 / std::max<std::size_t>(1, s.channels)),
                               [&](std::size_t begin, std::size_t end) {
                                 for (std::size_t image = begin; image < end; ++image)
                                   of_row(image * s.channels, s.channels);
                               });
  const std::size_t grain = std::max<std::size_t>(1, 4096 / std::max<std::size_t>(1, s.positions));
  stream.parallel_for(s.images * s.channels, grain, [&](std::size_t begin, std::size_t end) {
    for (std::size_t plane = begin; plane < end; ++plane)
      of_plane(plane % s.channels, plane * s.positions, s.positions);
  });
}

std::vector<float> floats(const Tensor& t) {
  std::vector<float> values(t.count());
  load_floats(values.data(), t, 0, t.count());
  return values;
}

}  // namespace

ChannelSizes channel_sizes(const char* op, const Tensor& x) {
  const Shape& shape = x.shape();
  require(shape.dims() >= 2, Errc::invalid_argument, op, ": x ", name(shape),
          " has no channels: they are the second of two to four extents");
  std::size_t positions = 1;
  for (int i = 2; i < shape.dims(); ++i) positions *= shape[i];
  return {shape[0], shape[1], positions};
}

}  // namespace image

void batch_norm_sums(const Tensor& sums, const Tensor& x, const Stream& stream) {
  constexpr const char* op = "batch_norm_sums";
  const auto s = image::channel_sizes(op, x);
  check(op, {{"x", x}}, true);
  image::check_buffer(op, "sums", sums, DType::f64, 2 * s.channels + 1, x);
  if (const auto* d = on_device(op, x, stream)) return d->batch_norm_sums(sums, x, stream);
  double* const to = sums.data<double>();
  to[2 * s.channels] = static_cast<double>(s.images * s.positions);
  image::sum_channels(
      to, to + s.channels, s, stream,
      [&](std::size_t, std::size_t at, std::size_t n) { return image::sums_of(x, at, n); },
      [&](double* first, double* second, std::size_t, std::size_t at, std::size_t n) {
        image::add_row_sums(first, second, x, at, n);
      });
}

void batch_norm_statistics(const Tensor& mean, const Tensor& inverse_deviation,
                           const RunningStatistics& running, const Tensor& sums, float epsilon,
                           const Stream& stream) {
  constexpr const char* op = "batch_norm_statistics";
  const std::size_t channels = mean.count();
  check(op, {{"mean", mean}, {"inverse_deviation", inverse_deviation}},
        is_vector(mean, channels) && is_vector(inverse_deviation, channels));
  check_dtype(op, DType::f32, {{"mean", mean}, {"inverse_deviation", inverse_deviation}});
  image::check_buffer(op, "sums", sums, DType::f64, 2 * channels + 1, mean);
  image::check_running(op, running, mean);
  if (const auto* d = on_device(op, mean, stream))
    return d->batch_norm_statistics(mean, inverse_deviation, running, sums, epsilon, stream);
  const auto r = image::pointers(running);
  const std::int64_t batches = r.batches ? ++*r.batches : 0;
  for (std::size_t c = 0; c < channels; ++c)
    image::statistics_of_channel(c, channels, sums.data<double>(), epsilon, mean.data<float>(),
                                 inverse_deviation.data<float>(), r, batches);
}

void batch_norm_running(const Tensor& mean, const Tensor& inverse_deviation, const RunningStatistics& running,
                        float epsilon, const Stream& stream) {
  constexpr const char* op = "batch_norm_running";
  check(op,
        {{"mean", mean},
         {"inverse_deviation", inverse_deviation},
         {"running mean", running.mean},
         {"running variance", running.variance}},
        inverse_deviation.shape() == mean.shape() && running.mean.shape() == mean.shape() &&
            running.variance.shape() == mean.shape());
  check_dtype(op, DType::f32,
              {{"mean", mean},
               {"inverse_deviation", inverse_deviation},
               {"running mean", running.mean},
               {"running variance", running.variance}});
  if (const auto* d = on_device(op, mean, stream))
    return d->batch_norm_running(mean, inverse_deviation, running, epsilon, stream);
  const auto r = image::pointers(running);
  for (std::size_t c = 0; c < mean.count(); ++c) {
    mean.data<float>()[c] = r.mean[c];
    inverse_deviation.data<float>()[c] =
        image::inverse_deviation(static_cast<double>(r.variance[c]), epsilon);
  }
}

void batch_norm(const Tensor& out, const Tensor& x, const Tensor& mean, const Tensor& inverse_deviation,
                const Tensor& weight, const Tensor& bias, const Stream& stream) {
  constexpr const char* op = "batch_norm";
  const auto s = image::channel_sizes(op, x);
  check_norm(
      op, out, mean, inverse_deviation, x, weight, bias, s.channels,
      out.shape() == x.shape() && is_vector(mean, s.channels) && is_vector(inverse_deviation, s.channels));
  if (const auto* d = on_device(op, out, stream))
    return d->batch_norm(out, x, mean, inverse_deviation, weight, bias, stream);
  const float *const m = mean.data<float>(), *const r = inverse_deviation.data<float>();
  const std::vector<float> w = image::floats(weight), b = image::floats(bias);
  image::each_channel(
      s, stream,
      [&](std::size_t c, std::size_t at, std::size_t n) {
        image::normalize(out, x, at, n, m[c], r[c], w[c], b[c]);
      },
      [&](std::size_t at, std::size_t n) { image::normalize_row(out, x, at, n, m, r, w.data(), b.data()); });
}

void batch_norm_backward_sums(const Tensor& sums, const Tensor& d_out, const Tensor& x, const Tensor& mean,
                              const Tensor& inverse_deviation, const Stream& stream) {
  constexpr const char* op = "batch_norm_backward_sums";
  const auto s = image::channel_sizes(op, x);
  check(
      op, {{"d_out", d_out}, {"x", x}, {"mean", mean}, {"inverse_deviation", inverse_deviation}},
      d_out.shape() == x.shape() && is_vector(mean, s.channels) && is_vector(inverse_deviation, s.channels));
  check_dtype(op, x.dtype(), {{"d_out", d_out}});
  check_dtype(op, DType::f32, {{"mean", mean}, {"inverse_deviation", inverse_deviation}});
  image::check_buffer(op, "sums", sums, DType::f64, 2 * s.channels, x);
  if (const auto* d = on_device(op, x, stream))
    return d->batch_norm_backward_sums(sums, d_out, x, mean, inverse_deviation, stream);
  double* const to = sums.data<double>();
  const float *const m = mean.data<float>(), *const r = inverse_deviation.data<float>();
  image::sum_channels(
      to, to + s.channels, s, stream,
      [&](std::size_t c, std::size_t at, std::size_t n) {
        return image::gradient_sums(d_out, x, at, n, m[c], r[c]);
      },
      [&](double* first, double* second, std::size_t c, std::size_t at, std::size_t n) {
        image::add_row_gradient_sums(first, second, d_out, x, at, n, m + c, r + c);
      });
}

void batch_norm_parameters_backward(const Tensor& d_weight, const Tensor& d_bias, const Tensor& sums,
                                    Into into, const Stream& stream) {
  constexpr const char* op = "batch_norm_parameters_backward";
  const std::size_t channels = sums.count() / 2;
  const Tensor& any = d_weight.defined() ? d_weight : d_bias;
  if (!any.defined()) return;
  if (d_weight.defined()) check(op, {{"d_weight", d_weight}}, is_vector(d_weight, channels));
  if (d_bias.defined()) check(op, {{"d_bias", d_bias}}, is_vector(d_bias, channels));
  image::check_buffer(op, "sums", sums, DType::f64, 2 * channels, any);
  if (const auto* d = on_device(op, any, stream))
    return d->batch_norm_parameters_backward(d_weight, d_bias, sums, into, stream);
  const double* const from = sums.data<double>();
  for (std::size_t c = 0; c < channels; ++c) {
    if (d_bias.defined()) image::store_number(d_bias, c, from[c], into);
    if (d_weight.defined()) image::store_number(d_weight, c, from[channels + c], into);
  }
}

void batch_norm_backward(const Tensor& d_x, const Tensor& d_out, const Tensor& x, const Tensor& weight,
                         const Tensor& mean, const Tensor& inverse_deviation, const Tensor& forward_sums,
                         const Tensor& backward_sums, Into into, const Stream& stream) {
  constexpr const char* op = "batch_norm_backward";
  const auto s = image::channel_sizes(op, x);
  check_norm_backward(op, d_x, d_out, x, weight, mean, inverse_deviation, s.channels,
                      d_x.shape() == x.shape() && d_out.shape() == x.shape() && is_vector(mean, s.channels) &&
                          is_vector(inverse_deviation, s.channels));
  const bool training = forward_sums.defined() || backward_sums.defined();
  if (training) {
    image::check_buffer(op, "forward sums", forward_sums, DType::f64, 2 * s.channels + 1, x);
    image::check_buffer(op, "backward sums", backward_sums, DType::f64, 2 * s.channels, x);
  }
  if (const auto* d = on_device(op, x, stream))
    return d->batch_norm_backward(d_x, d_out, x, weight, mean, inverse_deviation, forward_sums, backward_sums,
                                  into, stream);
  const float *const m = mean.data<float>(), *const r = inverse_deviation.data<float>();
  const std::vector<float> w = image::floats(weight);
  std::vector<float> g(s.channels), gn(s.channels);
  for (std::size_t c = 0; training && c < s.channels; ++c) {
    const double *const sums = backward_sums.data<double>(),
                        count = forward_sums.data<double>()[2 * s.channels];
    g[c] = static_cast<float>(static_cast<double>(w[c]) * (sums[c] / count));
    gn[c] = static_cast<float>(static_cast<double>(w[c]) * (sums[s.channels + c] / count));
  }
  image::each_channel(
      s, stream,
      [&](std::size_t c, std::size_t at, std::size_t n) {
        if (training)
          image::normalize_backward(d_x, d_out, x, at, n, {m[c], r[c], w[c], g[c], gn[c]}, into);
        else
          image::scale_gradient(d_x, d_out, at, n, r[c] * w[c], into);
      },
      [&](std::size_t at, std::size_t n) {
        image::normalize_row_backward(d_x, d_out, x, at, n, {m, r, w.data(), g.data(), gn.data()}, into);
      });
}

}  // namespace rz::ops
