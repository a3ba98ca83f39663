// Runs: ci computes host operators
// Not under sanitizers: ConvolutionsOfLargeSizes Types/ImageOps[.].*/f16$

// Operators of images in f32, f16 and bf16, on the host and on a device, against their definitions in double:
// storing and adding, at addresses that are not aligned.

#include "tensor/image_ops.h"

#include <cmath>

#include "tests/operators/operator.h"
#include "tests/support/error_of.h"
#include "tests/support/reference_image.h"

namespace rz::test {
namespace {

using ops::Into;

constexpr Bound close{4e-6};

class ImageOps : public Operators {
 protected:
  using Backward = std::function<void(const Tensor&, Into)>;
  void expect_gradient(const Values& expected, const Shape& shape, DType t, const std::string& what,
                       const Backward& f, std::size_t shift = 0) const {
    const Tensor stored = place(Values(expected.size(), NAN), shape, t, shift),
                 added = place(random_values(expected.size(), 99), shape, t, shift);
    Values sum = from_device(added, stream);
    f(stored, Into::overwrite);
    f(added, Into::accumulate);
    expect_close(stored, expected, close, what);
    for (std::size_t i = 0; i < sum.size(); ++i) sum[i] += expected[i];
    expect_close(added, sum, close, what);
  }
  /// Of a parameter: in the type of the values and in f32.
  void expect_parameter_gradient(const Values& expected, const Shape& shape, const std::string& what,
                                 const Backward& f) const {
    expect_gradient(expected, shape, dtype, what, f);
    if (dtype != DType::f32) expect_gradient(expected, shape, DType::f32, what, f);
  }

  void expect_convolution(const Convolution& c, std::size_t shift);
};

INSTANTIATE_TEST_SUITE_P(Types, ImageOps, float_types, type_name);

void ImageOps::expect_convolution(const Convolution& c, std::size_t shift) {
  const Values x = random(c.x().count(), 1), w = random(c.weight().count(), 2), b = random(c.outputs, 3),
               d_out = random(c.result().count(), 4);
  const Tensor in = place(x, c.x(), shift), weight = place(w, c.weight(), shift),
               bias = place(b, {c.outputs}, shift), gradient = place(d_out, c.result(), shift);
  EXPECT_EQ(ops::conv2d_shape(c.x(), c.weight(), c.options), c.result()) << c.text();
  for (const bool with_bias : {true, false}) {
    const Tensor out = place(Values(c.result().count(), NAN), c.result(), shift);
    ops::conv2d(out, in, weight, with_bias ? bias : Tensor(), c.options, stream);
    expect_close(out, reference::conv2d(x, w, with_bias ? b : Values(), c), close, c.text());
  }
  // Each gradient alone, stored; and all at once, added and stored.
  const auto expected = reference::conv2d_backward(d_out, x, w, c);
  const Shape shapes[] = {c.x(), c.weight(), {c.outputs}};
  const Values* const values[] = {&expected.x, &expected.weight, &expected.bias};
  const auto backward = [&](const Tensor(&d)[3], Into into) {
    ops::conv2d_backward(d[0], d[1], d[2], gradient, in, weight, c.options, into, into, stream);
  };
  const auto target = [&](std::size_t k, DType parameters, const Values& before) {
    return place(before, shapes[k], k == 0 ? dtype : parameters, shift);
  };
  for (std::size_t k = 0; k < 3; ++k) {
    Tensor d[3];
    d[k] = target(k, dtype, Values(values[k]->size(), NAN));
    backward(d, Into::overwrite);
    expect_close(d[k], *values[k], close, concat(c.text(), ": gradient ", k));
  }
  for (const Into into : {Into::accumulate, Into::overwrite}) {
    const DType parameters = into == Into::accumulate ? dtype : DType::f32;
    Tensor d[3];
    Values sums[3];
    for (std::size_t k = 0; k < 3; ++k) {
      const std::size_t n = values[k]->size();
      d[k] = target(k, parameters, into == Into::accumulate ? random_values(n, 99) : Values(n, NAN));
      sums[k] = into == Into::accumulate ? get(d[k]) : Values(n);
      for (std::size_t i = 0; i < n; ++i) sums[k][i] += (*values[k])[i];
    }
    backward(d, into);
    for (std::size_t k = 0; k < 3; ++k)
      expect_close(d[k], sums[k], close, concat(c.text(), ": all gradients, ", k));
  }
  if (dtype == DType::f32) return;
  for (std::size_t k = 1; k < 3; ++k) {  // added to f32
    Tensor d[3];
    Values sum = random_values(values[k]->size(), 99);
    d[k] = target(k, DType::f32, sum);
    for (std::size_t i = 0; i < sum.size(); ++i) sum[i] += (*values[k])[i];
    backward(d, Into::accumulate);
    expect_close(d[k], sum, close, concat(c.text(), ": f32 gradient ", k));
  }
}

TEST_P(ImageOps, Convolutions) {
  for (unsigned seed = 1; seed <= (on_host() ? 60 : 20); ++seed) {
    SCOPED_TRACE(seed);
    expect_convolution(random_convolution(seed), seed % 3 == 1 ? 1 : 0);
    if (HasFatalFailure()) return;
  }
}

/// Several tiles of positions, blocks of channels and parts of images, none of them whole.
TEST_P(ImageOps, ConvolutionsOfLargeSizes) {
  const auto test = [&](std::size_t channels, std::size_t outputs, std::size_t h, std::size_t w,
                        const ops::Conv2d& options, std::size_t kernel) {
    expect_convolution({2, channels, h, w, outputs, kernel, options}, 0);
  };
  if (!on_host()) return test(11, 1, 111, 97, {.padding = 2}, 5);
  test(50, 17, 33, 37, {.padding = 1}, 3);
  test(50, 34, 33, 37, {.stride = {2, 1}, .padding = 1, .groups = 2}, 3);
  test(5, 3, 100, 99, {.padding = 2}, 5);
  test(6, 12, 20, 41, {.padding = {2, 1}, .dilation = {2, 1}, .groups = 2}, 3);
  test(300, 6, 21, 23, {}, 1);
  test(35, 35, 70, 67, {.stride = {1, 2}, .padding = 1, .groups = 35}, 3);
  test(9, 9, 40, 67, {.padding = {1, 2}, .dilation = {1, 2}, .groups = 9}, 3);
}

/// Small integers: each sum is exact.
TEST_P(ImageOps, ConvolutionsAreExact) {
  const Convolution c{1, 1, 3, 3, 1, 2, {.padding = {1, 0}}};
  const Tensor out = empty(c.result());
  ops::conv2d(out, place({1, 2, 3, 4, 5, 6, 7, 8, 9}, c.x()), place({1, 2, 4, -1}, c.weight()),
              place({1}, {1}), c.options, stream);
  EXPECT_EQ(from_device(out, stream), (Values{3, 6, 17, 23, 35, 41, 24, 27}));
}

// ---- pooling

/// A pool and the size of an image, a function of the seed.
struct Pooling {
  explicit Pooling(unsigned seed) {
    std::mt19937 random(seed);
    const auto draw = [&](std::size_t min, std::size_t max) { return min + random() % (max - min + 1); };
    p.kernel = {draw(1, 5), draw(1, 5)};
    p.stride = seed % 4 ? ops::Size2(draw(1, 6), draw(1, 6)) : ops::Size2(0);
    p.padding = {draw(0, p.kernel.h / 2), draw(0, p.kernel.w / 2)};
    h = p.kernel.h + (seed % 5 ? draw(0, 9) : 0), w = p.kernel.w + (seed % 5 ? draw(0, 40) : 0);
    planes = Shape{draw(1, 2), draw(1, 4)};
  }
  Shape x() const { return {planes[0], planes[1], h, w}; }
  ops::Pool2d p;
  std::size_t h, w;
  Shape planes;
};

TEST_P(ImageOps, MeansOfWindows) {
  for (unsigned seed = 1; seed <= (on_host() ? 40 : 15); ++seed) {
    SCOPED_TRACE(seed);
    const Pooling c(seed);
    const std::size_t shift = seed % 2;
    const auto windows = reference::windows(c.h, c.w, c.p);
    const Shape shape = ops::pool2d_shape("avg_pool2d", c.x(), c.p);
    const Values x = random(c.x().count(), 1), d_out = random(shape.count(), 2);
    const Tensor out = empty(shape);
    ops::avg_pool2d(out, place(x, c.x(), shift), c.p, stream);
    expect_close(out, reference::mean_pool(x, c.h, c.w, windows), close, "avg_pool2d");
    expect_gradient(
        reference::mean_pool_backward(d_out, c.planes.count() ? c.planes[0] * c.planes[1] : 0, c.h, c.w,
                                      windows),
        c.x(), dtype, "avg_pool2d_backward",
        [&](const Tensor& d_x, Into into) {
          ops::avg_pool2d_backward(d_x, place(d_out, shape, shift), c.p, into, stream);
        },
        shift);
  }
}

TEST_P(ImageOps, AdaptiveMeans) {
  for (const auto& [h, w, out_h, out_w] : std::vector<std::array<std::size_t, 4>>{
           {7, 7, 1, 1}, {7, 5, 3, 2}, {10, 33, 7, 6}, {3, 4, 5, 9}, {6, 8, 6, 4}}) {
    const Shape in{2, 3, h, w}, shape{2, 3, out_h, out_w};
    const auto windows = reference::windows(h, w, {}, out_h, out_w);
    const Values x = random(in.count(), 1), d_out = random(shape.count(), 2);
    const Tensor out = empty(shape);
    ops::adaptive_avg_pool2d(out, place(x, in), stream);
    expect_close(out, reference::mean_pool(x, h, w, windows), close, "adaptive_avg_pool2d");
    expect_gradient(reference::mean_pool_backward(d_out, 6, h, w, windows), in, dtype,
                    "adaptive_avg_pool2d_backward", [&](const Tensor& d_x, Into into) {
                      ops::adaptive_avg_pool2d_backward(d_x, place(d_out, shape), into, stream);
                    });
  }
}

/// Few different numbers, so that windows have several maxima, infinities and NaN among them.
TEST_P(ImageOps, MaximaOfWindows) {
  for (unsigned seed = 1; seed <= (on_host() ? 60 : 20); ++seed) {
    SCOPED_TRACE(seed);
    const Pooling c(seed);
    const std::size_t shift = seed % 2, planes = c.planes[0] * c.planes[1];
    const auto windows = reference::windows(c.h, c.w, c.p);
    const Shape shape = ops::pool2d_shape("max_pool2d", c.x(), c.p);
    Values x = random_values(c.x().count(), seed, 3);
    for (double& v : x) {
      v = std::round(v);
      if (seed % 3 == 1 && v == 2) v = NAN;
      if (seed % 3 != 0 && v == -2) v = -INFINITY;
      if (seed % 3 == 2 && v > -2) v = -INFINITY;
    }
    const auto positions = reference::max_positions(x, c.h, c.w, windows);
    const Tensor out = place(Values(shape.count(), 7), shape, shift),
                 indices = to_device(std::vector<std::int32_t>(shape.count(), -1), shape, stream);
    ops::max_pool2d(out, indices, place(x, c.x(), shift), c.p, stream);
    const Values got = from_device(out, stream);
    const Tensor at = indices.on_host(stream);
    Values expected(c.x().count());
    const Values d_out = random(shape.count(), 2);
    for (std::size_t i = 0; i < got.size(); ++i) {
      ASSERT_EQ(at.data<std::int32_t>()[i], positions[i]) << i;
      const std::size_t from = i / windows.size() * c.h * c.w + static_cast<std::size_t>(positions[i]);
      ASSERT_TRUE(got[i] == x[from] || (std::isnan(got[i]) && std::isnan(x[from]))) << i << ": " << got[i];
      expected[from] += d_out[i];
    }
    EXPECT_EQ(got.size(), planes * windows.size());
    expect_gradient(
        expected, c.x(), dtype, "max_pool2d_backward",
        [&](const Tensor& d_x, Into into) {
          ops::max_pool2d_backward(d_x, place(d_out, shape, shift), indices, c.p, into, stream);
        },
        shift);
  }
}

// ---- norms

const std::vector<Shape> norm_shapes{{5, 6},       {64, 130},      {3, 4, 9},
                                     {2, 6, 7, 5}, {4, 2, 33, 17}, {1, 8, 1, 1}};

Values numbers_of_image(std::size_t n, unsigned seed, double mean) {
  Values values = random_values(n, seed, 2);
  for (double& v : values) v += mean;
  return values;
}

TEST_P(ImageOps, BatchNorms) {
  constexpr float epsilon = 1e-3f;
  for (const Shape& shape : norm_shapes) {
    const std::size_t n = shape[0], c = shape[1];
    if (shape.count() == c) continue;
    const auto channel = [](std::size_t, std::size_t c) { return c; };
    const Values x = from_device(place(numbers_of_image(shape.count(), 1, 1.5), shape), stream),
                 w = random(c, 2), b = random(c, 3), d_out = random(shape.count(), 4);
    const Tensor in = place(x, shape), weight = place(w, {c}), gradient = place(d_out, shape),
                 out = empty(shape), mean = empty_on(stream, {c}), inverse = empty_on(stream, {c}),
                 sums = empty_on(stream, {2 * c + 1}, DType::f64),
                 d_sums = empty_on(stream, {2 * c}, DType::f64);
    const auto m = reference::moments(x, n, c, c, channel);
    ops::batch_norm_sums(sums, in, stream);
    ops::batch_norm_statistics(mean, inverse, {}, sums, epsilon, stream);
    ops::batch_norm(out, in, mean, inverse, weight, place(b, {c}), stream);
    expect_close(out, reference::normalize(x, w, b, n, c, m, channel, epsilon), close, name(shape));

    // The gradient of <out, d_out> by x, through the statistics or without.
    Values through(x.size()), alone(x.size()), d_w(c), d_b(c);
    const std::size_t p = x.size() / (n * c);
    std::vector<double> g(c), gn(c);
    const auto normal = [&](std::size_t i) {
      const auto& of = m[i / p % c];
      return (x[i] - of.mean) / std::sqrt(of.variance + epsilon);
    };
    for (std::size_t i = 0; i < x.size(); ++i) {
      const std::size_t k = i / p % c;
      d_b[k] += d_out[i], d_w[k] += d_out[i] * normal(i);
    }
    for (std::size_t i = 0; i < x.size(); ++i) {
      const std::size_t k = i / p % c;
      const double scale = w[k] / std::sqrt(m[k].variance + epsilon);
      alone[i] = scale * d_out[i];
      through[i] = scale * (d_out[i] - d_b[k] / m[k].count - normal(i) * d_w[k] / m[k].count);
    }
    ops::batch_norm_backward_sums(d_sums, gradient, in, mean, inverse, stream);
    for (const bool training : {true, false})
      expect_gradient(training ? through : alone, shape, dtype,
                      name(shape) + (training ? " d_x" : " d_x alone"), [&](const Tensor& d_x, Into into) {
                        ops::batch_norm_backward(d_x, gradient, in, weight, mean, inverse,
                                                 training ? sums : Tensor(), training ? d_sums : Tensor(),
                                                 into, stream);
                      });
    expect_parameter_gradient(d_w, {c}, name(shape) + " d_weight", [&](const Tensor& d, Into into) {
      ops::batch_norm_parameters_backward(d, {}, d_sums, into, stream);
    });
    expect_parameter_gradient(d_b, {c}, name(shape) + " d_bias", [&](const Tensor& d, Into into) {
      ops::batch_norm_parameters_backward({}, d, d_sums, into, stream);
    });
  }
}

/// A mean much larger than the deviation.
TEST_P(ImageOps, BatchStatisticsAreThoseOfDouble) {
  const Values x =
      from_device(to_device(numbers_of_image(1200, 5, 1000), {4, 3, 10, 10}, DType::f32, stream), stream);
  const auto m = reference::moments(x, 4, 3, 3, [](std::size_t, std::size_t c) { return c; });
  const Tensor sums = empty_on(stream, {7}, DType::f64), mean = empty_on(stream, {3}),
               inverse = empty_on(stream, {3});
  ops::batch_norm_sums(sums, to_device(x, {4, 3, 10, 10}, DType::f32, stream), stream);
  ops::batch_norm_statistics(mean, inverse, {}, sums, 0, stream);
  for (std::size_t c = 0; c < 3; ++c) {
    EXPECT_NEAR(from_device(mean, stream)[c], m[c].mean, 1e-4);
    EXPECT_NEAR(from_device(inverse, stream)[c] * std::sqrt(m[c].variance), 1, 1e-6);
  }
}

/// Exact: two batches of {0, 2} and {2, 6}, so the means are 1 and 4, the unbiased variances 2 and 8.
TEST_P(ImageOps, RunningStatisticsFollowTheBatches) {
  for (const float momentum : {0.5f, -1.0f}) {
    const Tensor mean = empty_on(stream, {1}), inverse = empty_on(stream, {1}),
                 sums = empty_on(stream, {3}, DType::f64), batches = empty_on(stream, {}, DType::i64);
    const std::int64_t none = 0;
    batches.assign(std::span(&none, 1), stream);
    const ops::RunningStatistics running{to_device({0.0}, {1}, DType::f32, stream),
                                         to_device({1.0}, {1}, DType::f32, stream), batches, momentum};
    const auto expect = [&](double of_mean, double of_variance, std::int64_t count) {
      EXPECT_EQ(from_device(running.mean, stream)[0], of_mean);
      EXPECT_EQ(from_device(running.variance, stream)[0], of_variance);
      EXPECT_EQ(*batches.on_host(stream).data<std::int64_t>(), count);
    };
    ops::batch_norm_sums(sums, place({0, 2}, {2, 1}), stream);
    ops::batch_norm_statistics(mean, inverse, running, sums, 0, stream);
    EXPECT_EQ(from_device(mean, stream)[0], 1);
    EXPECT_EQ(from_device(inverse, stream)[0], 1);
    momentum > 0 ? expect(0.5, 1.5, 1) : expect(1, 2, 1);
    ops::batch_norm_sums(sums, place({2, 6}, {2, 1}), stream);
    ops::batch_norm_statistics(mean, inverse, running, sums, 0, stream);
    momentum > 0 ? expect(2.25, 4.75, 2) : expect(2.5, 5, 2);
    ops::batch_norm_running(mean, inverse, running, momentum > 0 ? 11.25f : 11.0f, stream);
    EXPECT_EQ(from_device(mean, stream)[0], momentum > 0 ? 2.25 : 2.5);
    EXPECT_EQ(from_device(inverse, stream)[0], 0.25);
  }
}

TEST_P(ImageOps, GroupNorms) {
  constexpr float epsilon = 1e-3f;
  for (const Shape& shape : norm_shapes) {
    if (!on_host() && shape.count() > 5000) continue;  // a block per plane
    for (const std::size_t groups : {std::size_t{1}, std::size_t{2}, shape[1]}) {
      const std::size_t n = shape[0], c = shape[1], p = shape.count() / (n * c);
      if (c / groups * p == 1) continue;  // the gradient is 0, and all its digits are rounding
      const auto set = [&](std::size_t i, std::size_t channel) {
        return i * groups + channel / (c / groups);
      };
      const Values x = random(shape.count(), 1), w = random(c, 2), b = random(c, 3),
                   d_out = random(shape.count(), 4);
      const Tensor in = place(x, shape), weight = place(w, {c}), gradient = place(d_out, shape),
                   out = empty(shape), mean = empty_on(stream, {n, groups}),
                   inverse = empty_on(stream, {n, groups});
      const auto m = reference::moments(x, n, c, n * groups, set);
      ops::group_norm(out, mean, inverse, in, weight, place(b, {c}), epsilon, stream);
      const std::string what = concat(name(shape), " in ", groups, " groups");
      expect_close(out, reference::normalize(x, w, b, n, c, m, set, epsilon), close, what);

      Values d_x(x.size()), d_w(c), d_b(c), g(n * groups), gn(n * groups);
      const auto normal = [&](std::size_t i) {
        const auto& of = m[set(i / p / c, i / p % c)];
        return (x[i] - of.mean) / std::sqrt(of.variance + epsilon);
      };
      for (std::size_t i = 0; i < x.size(); ++i) {
        const std::size_t k = i / p % c, at = set(i / p / c, k);
        d_b[k] += d_out[i], d_w[k] += d_out[i] * normal(i);
        g[at] += d_out[i] * w[k] / m[at].count, gn[at] += d_out[i] * w[k] * normal(i) / m[at].count;
      }
      for (std::size_t i = 0; i < x.size(); ++i) {
        const std::size_t k = i / p % c, at = set(i / p / c, k);
        d_x[i] = (d_out[i] * w[k] - g[at] - normal(i) * gn[at]) / std::sqrt(m[at].variance + epsilon);
      }
      const auto backward = [&](const Tensor& to, const Tensor& of_weight, const Tensor& of_bias, Into into) {
        ops::group_norm_backward(to.defined() ? to : empty(shape), of_weight, of_bias, gradient, in, weight,
                                 mean, inverse, into, into, stream);
      };
      expect_gradient(d_x, shape, dtype, what + ": d_x",
                      [&](const Tensor& d, Into into) { backward(d, {}, {}, into); });
      expect_parameter_gradient(d_w, {c}, what + ": d_weight", [&](const Tensor& d, Into into) {
        ops::group_norm_backward(empty(shape), d, {}, gradient, in, weight, mean, inverse, Into::overwrite,
                                 into, stream);
      });
      expect_parameter_gradient(d_b, {c}, what + ": d_bias", [&](const Tensor& d, Into into) {
        ops::group_norm_backward(empty(shape), {}, d, gradient, in, weight, mean, inverse, Into::overwrite,
                                 into, stream);
      });
    }
  }
}

}  // namespace
}  // namespace rz::test
