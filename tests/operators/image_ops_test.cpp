// Runs: ci computes host operators
// Not under sanitizers: ConvolutionsOfLargeSizes Types/ImageOps[.].*/f16$

// Operators of images in f32, f16 and bf16, on the host and on a device, against their definitions in double;
// with the same bits for every number of threads.

#include "tensor/image_ops.h"

#include <cmath>

#include "comm/device/allocate.h"
#include "comm/device/meta.h"
#include "tests/operators/operator.h"
#include "tests/support/error_of.h"
#include "tests/support/reference_image.h"

namespace rz::test {
namespace {

using ops::Into;

constexpr Bound close{4e-6};

using ImageOps = Operators;
using ImageErrors = OnDevice;
INSTANTIATE_TEST_SUITE_P(Types, ImageOps, float_types, type_name);

/// A gradient is stored alone, or `together` with the two others, and added beside them.
Operator convolution(const Convolution& c, bool together = false) {
  const auto gradient = [=](std::size_t of) {
    return Gradient{.of = of,
                    .backward =
                        [=](const Operands& o, const Tensor& d, Into into) {
                          Tensor all[3];
                          for (std::size_t k = 0; k < 3 && (together || into == Into::accumulate); ++k)
                            all[k] = empty_on(o.stream, o.in[k].shape(), k ? d.dtype() : o.in[0].dtype());
                          all[of] = d;
                          ops::conv2d_backward(all[0], all[1], all[2], o.d_out, o.in[0], o.in[1], c.options,
                                               into, into, o.stream);
                        },
                    .parameter = of > 0,
                    .bound = close,
                    .formula =
                        [=](const std::vector<Values>& in, const Values&, const Values& d_out) {
                          return reference::conv2d_gradient(of, d_out, in[0], in[1], c);
                        }};
  };
  return {.name = c.text(),
          .in = {{random_values(c.x().count(), 1), c.x()},
                 {random_values(c.weight().count(), 2), c.weight()},
                 {random_values(c.outputs, 3), {c.outputs}}},
          .out = ops::conv2d_shape(c.x(), c.weight(), c.options),
          .forward =
              [=](const Operands& o) {
                const Tensor bias = o.in.size() > 2 ? o.in[2] : Tensor();
                ops::conv2d(o.out, o.in[0], o.in[1], bias, c.options, o.stream);
              },
          .value =
              [=](const std::vector<Values>& in) {
                return reference::conv2d(in[0], in[1], in.size() > 2 ? in[2] : Values(), c);
              },
          .gradients = {gradient(0), gradient(1), gradient(2)},
          .bound = close,
          .bits_of_threads = true};
}
Operator without_bias(Operator op) {
  op.name += ", without a bias";
  op.in.pop_back(), op.gradients.clear();
  return op;
}

TEST_P(ImageOps, Convolutions) {
  for (unsigned seed = 1; seed <= (on_host() ? 60 : 20); ++seed) {
    SCOPED_TRACE(seed);
    const Convolution c = random_convolution(seed);
    EXPECT_EQ(ops::conv2d_shape(c.x(), c.weight(), c.options), c.result()) << c.text();
    expect_right(convolution(c, seed % 2));
    expect_right(without_bias(convolution(c)));
    if (HasFatalFailure()) return;
  }
  if (on_host()) expect_right(convolution({3, 24, 31, 29, 10, 3, {.padding = 1}}));  // of several tiles
}

/// Several tiles of positions, blocks of channels and parts of images, none of them whole.
TEST_P(ImageOps, ConvolutionsOfLargeSizes) {
  const auto test = [&](const Convolution& c) {
    expect_right(convolution(c));
    expect_right(without_bias(convolution(c)));
  };
  if (!on_host()) return test({2, 11, 111, 97, 1, 5, {.padding = 2}});
  for (const Convolution& c : {Convolution{2, 50, 33, 37, 17, 3, {.padding = 1}},
                               {2, 50, 33, 37, 34, 3, {.stride = {2, 1}, .padding = 1, .groups = 2}},
                               {2, 5, 100, 99, 3, 5, {.padding = 2}},
                               {2, 6, 20, 41, 12, 3, {.padding = {2, 1}, .dilation = {2, 1}, .groups = 2}},
                               {2, 300, 21, 23, 6, 1, {}},
                               {2, 35, 70, 67, 35, 3, {.stride = {1, 2}, .padding = 1, .groups = 35}},
                               {2, 9, 40, 67, 9, 3, {.padding = {1, 2}, .dilation = {1, 2}, .groups = 9}},
                               {3, 48, 31, 29, 20, 3, {.padding = 1}},
                               {2, 6, 60, 61, 4, {5, 3}, {.stride = {2, 1}, .padding = 2}},
                               {3, 40, 19, 23, 12, 1, {.groups = 2}}})
    test(c);
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

/// The mean of each window, of which the gradient is shared among its elements.
Operator mean_pool(const char* name, const Shape& x, const Shape& out,
                   const std::vector<reference::Window>& windows,
                   const std::function<void(const Operands&)>& forward,
                   const decltype(Gradient::backward)& backward) {
  return {.name = concat(name, " of ", rz::name(x)),
          .in = {{random_values(x.count(), 1), x}},
          .out = out,
          .forward = forward,
          .value =
              [=](const std::vector<Values>& in) { return reference::mean_pool(in[0], x[2], x[3], windows); },
          .gradients = {{.of = 0,
                         .backward = backward,
                         .bound = close,
                         .formula =
                             [=](const std::vector<Values>&, const Values&, const Values& d_out) {
                               return reference::mean_pool_backward(d_out, x[0] * x[1], x[2], x[3], windows);
                             }}},
          .bound = close,
          .bits_of_threads = true};
}

/// A large one, and others.
std::vector<Pooling> poolings(unsigned count) {
  std::vector<Pooling> all{Pooling(1)};
  all[0].p = {.kernel = 3, .stride = 2, .padding = 1}, all[0].planes = {3, 5}, all[0].h = 33, all[0].w = 45;
  for (unsigned seed = 1; seed <= count; ++seed) all.emplace_back(seed);
  return all;
}

TEST_P(ImageOps, MeansOfWindows) {
  for (const Pooling& c : poolings(on_host() ? 40 : 15))
    expect_right(mean_pool(
        "avg_pool2d", c.x(), ops::pool2d_shape("avg_pool2d", c.x(), c.p), reference::windows(c.h, c.w, c.p),
        [=](const Operands& o) { ops::avg_pool2d(o.out, o.in[0], c.p, o.stream); },
        [=](const Operands& o, const Tensor& d, Into into) {
          ops::avg_pool2d_backward(d, o.d_out, c.p, into, o.stream);
        }));
}

TEST_P(ImageOps, AdaptiveMeans) {
  for (const auto& [h, w, out_h, out_w] : std::vector<std::array<std::size_t, 4>>{
           {7, 7, 1, 1}, {7, 5, 3, 2}, {10, 33, 7, 6}, {3, 4, 5, 9}, {6, 8, 6, 4}, {33, 45, 4, 7}})
    expect_right(mean_pool(
        "adaptive_avg_pool2d", {2, 3, h, w}, {2, 3, out_h, out_w}, reference::windows(h, w, {}, out_h, out_w),
        [](const Operands& o) { ops::adaptive_avg_pool2d(o.out, o.in[0], o.stream); },
        [](const Operands& o, const Tensor& d, Into into) {
          ops::adaptive_avg_pool2d_backward(d, o.d_out, into, o.stream);
        }));
}

/// Whole numbers, so that windows have several maxima, infinities and NaN among them.
Values few_numbers(std::size_t n, unsigned seed) {
  Values x = random_values(n, seed, 3);
  for (double& v : x) {
    v = std::round(v);
    if (seed % 3 == 1 && v == 2) v = NAN;
    if (seed % 3 != 0 && v == -2) v = -INFINITY;
    if (seed % 3 == 2 && v > -2) v = -INFINITY;
  }
  return x;
}

/// The maximum is the element at a position that does not move with it.
TEST_P(ImageOps, MaximaOfWindows) {
  const std::vector<Pooling> all = poolings(on_host() ? 60 : 20);
  for (unsigned seed = 0; seed < all.size(); ++seed) {
    SCOPED_TRACE(seed);
    const Pooling& c = all[seed];
    const auto windows = reference::windows(c.h, c.w, c.p);
    const Shape shape = ops::pool2d_shape("max_pool2d", c.x(), c.p);
    const Values x = few_numbers(c.x().count(), seed);
    const auto positions = reference::max_positions(x, c.h, c.w, windows);
    std::vector<std::size_t> from;
    for (std::size_t i = 0; i < positions.size(); ++i)
      from.push_back(i / windows.size() * c.h * c.w + static_cast<std::size_t>(positions[i]));
    expect_right(
        {.name = concat("max_pool2d of ", name(c.x())),
         .in = {{x, c.x()}},
         .out = shape,
         .forward =
             [&](const Operands& o) {
               ops::max_pool2d(o.out, o.kept[0], o.in[0], c.p, o.stream);
               const Tensor at = o.kept[0].on_host(o.stream);
               EXPECT_TRUE(std::ranges::equal(positions, std::span(at.data<std::int32_t>(), at.count())));
             },
         .value = [&](const std::vector<Values>& in) { return moved(in[0], from); },
         .gradients = {{.of = 0,
                        .backward =
                            [&](const Operands& o, const Tensor& d, Into into) {
                              ops::max_pool2d_backward(d, o.d_out, o.kept[0], c.p, into, o.stream);
                            },
                        .bound = close,
                        .formula = [&](const std::vector<Values>&, const Values&,
                                       const Values& d_out) { return moved_back(d_out, from, x.size()); }}},
         .kept = {{shape, DType::i32}},
         .bound = {0},
         .bits_of_threads = true});
    if (HasFatalFailure()) return;
  }
}

// ---- norms

const std::vector<Shape> norm_shapes{{5, 6},         {64, 130},    {3, 4, 9}, {2, 6, 7, 5},
                                     {4, 2, 33, 17}, {1, 8, 1, 1}, {7, 150},  {3, 6, 40, 41}};
constexpr float epsilon = 1e-3f;

Values numbers_of_image(std::size_t n, unsigned seed, double mean) {
  Values values = random_values(n, seed, 2);
  for (double& v : values) v += mean;
  return values;
}

/// A norm of x [n, c, …], weight and bias in sets of terms that are normalized together: set(n, c) numbers
/// them. `fixed`: with these moments, through which there is no gradient.
struct NormOfSets {
  Shape shape;
  std::size_t sets;
  std::function<std::size_t(std::size_t, std::size_t)> set;
  std::vector<reference::Moments> fixed = {};

  std::vector<reference::Moments> moments(const Values& x) const {
    return fixed.empty() ? reference::moments(x, shape[0], shape[1], sets, set) : fixed;
  }
  Values value(const std::vector<Values>& in) const {
    return reference::normalize(in[0], in[1], in[2], shape[0], shape[1], moments(in[0]), set, epsilon);
  }
  /// Of input k.
  Values gradient(std::size_t k, const std::vector<Values>& in, const Values& d_out) const {
    const Values &x = in[0], &w = in[1];
    const auto m = moments(x);
    const std::size_t c = shape[1], p = x.size() / (shape[0] * c);
    Values d_x(x.size()), d_w(c), d_b(c), g(sets), gn(sets);
    const auto of = [&](std::size_t i) { return set(i / p / c, i / p % c); };
    const auto deviation = [&](std::size_t i) { return std::sqrt(m[of(i)].variance + epsilon); };
    const auto normal = [&](std::size_t i) { return (x[i] - m[of(i)].mean) / deviation(i); };
    for (std::size_t i = 0; i < x.size(); ++i) {
      const std::size_t j = i / p % c;
      d_b[j] += d_out[i], d_w[j] += d_out[i] * normal(i);
      if (!fixed.empty()) continue;
      g[of(i)] += d_out[i] * w[j] / m[of(i)].count;
      gn[of(i)] += d_out[i] * w[j] * normal(i) / m[of(i)].count;
    }
    for (std::size_t i = 0; i < x.size(); ++i)
      d_x[i] = (d_out[i] * w[i / p % c] - g[of(i)] - normal(i) * gn[of(i)]) / deviation(i);
    return k == 0 ? d_x : k == 1 ? d_w : d_b;
  }
};

/// backward(operands, input, its gradient, into)
Operator norm(const std::string& name, const NormOfSets& of, const Values& x,
              const std::function<void(const Operands&)>& forward,
              const std::function<void(const Operands&, std::size_t, const Tensor&, Into)>& backward,
              const std::vector<Kept>& kept) {
  const std::size_t c = of.shape[1];
  Operator op{.name = concat(name, " of ", rz::name(of.shape)),
              .in = {{x, of.shape}, {random_values(c, 2), {c}}, {random_values(c, 3), {c}}},
              .out = of.shape,
              .forward = forward,
              .value = [=](const std::vector<Values>& in) { return of.value(in); },
              .kept = kept,
              .bound = close,
              .bits_of_threads = true};
  for (std::size_t k = 0; k < 3; ++k)
    op.gradients.push_back(
        {.of = k,
         .backward = [=](const Operands& o, const Tensor& d, Into into) { backward(o, k, d, into); },
         .parameter = k > 0,
         .bound = close,
         .formula = [=](const std::vector<Values>& in, const Values&,
                        const Values& d_out) { return of.gradient(k, in, d_out); }});
  return op;
}

/// Through the statistics, and without.
TEST_P(ImageOps, BatchNorms) {
  for (const Shape& shape : norm_shapes) {
    const std::size_t c = shape[1];
    if (shape.count() == c) continue;
    const Values x = numbers_of_image(shape.count(), 1, 1.5);
    const auto channel = [](std::size_t, std::size_t c) { return c; };
    for (const bool training : {true, false}) {
      NormOfSets of{shape, c, channel};
      if (!training) of.fixed = of.moments(rounded(x));
      expect_right(norm(
          training ? "batch_norm" : "batch_norm with given statistics", of, x,
          [=](const Operands& o) {
            ops::batch_norm_sums(o.kept[2], o.in[0], o.stream);
            ops::batch_norm_statistics(o.kept[0], o.kept[1], {}, o.kept[2], epsilon, o.stream);
            ops::batch_norm(o.out, o.in[0], o.kept[0], o.kept[1], o.in[1], o.in[2], o.stream);
          },
          [=](const Operands& o, std::size_t k, const Tensor& d, Into into) {
            const Tensor &mean = o.kept[0], &inverse = o.kept[1], &sums = o.kept[3];
            ops::batch_norm_backward_sums(sums, o.d_out, o.in[0], mean, inverse, o.stream);
            if (k == 0)
              ops::batch_norm_backward(d, o.d_out, o.in[0], o.in[1], mean, inverse,
                                       training ? o.kept[2] : Tensor(), training ? sums : Tensor(), into,
                                       o.stream);
            else
              ops::batch_norm_parameters_backward(k == 1 ? d : Tensor(), k == 2 ? d : Tensor(), sums, into,
                                                  o.stream);
          },
          {{{c}}, {{c}}, {{2 * c + 1}, DType::f64}, {{2 * c}, DType::f64}}));
    }
  }
}

TEST_P(ImageOps, GroupNorms) {
  for (const Shape& shape : norm_shapes) {
    if (!on_host() && shape.count() > 5000) continue;  // a block per plane
    for (const std::size_t groups : {std::size_t{1}, std::size_t{2}, shape[1]}) {
      const std::size_t n = shape[0], of_group = shape[1] / groups;
      if (of_group * shape.count() == n * shape[1])
        continue;  // the gradient is 0, and its digits are rounding
      const auto set = [=](std::size_t i, std::size_t channel) { return i * groups + channel / of_group; };
      expect_right(norm(
          concat("group_norm in ", groups), {shape, n * groups, set}, random_values(shape.count(), 1),
          [](const Operands& o) {
            ops::group_norm(o.out, o.kept[0], o.kept[1], o.in[0], o.in[1], o.in[2], epsilon, o.stream);
          },
          [](const Operands& o, std::size_t k, const Tensor& d, Into into) {
            const Tensor d_x = k == 0 ? d : empty_on(o.stream, o.out.shape(), o.out.dtype());
            ops::group_norm_backward(d_x, k == 1 ? d : Tensor(), k == 2 ? d : Tensor(), o.d_out, o.in[0],
                                     o.in[1], o.kept[0], o.kept[1], k == 0 ? into : Into::overwrite, into,
                                     o.stream);
          },
          {{{n, groups}}, {{n, groups}}}));
    }
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

// ---- errors

TEST_F(ImageErrors, NameTheOperatorAndTheShapes) {
  const auto make = [&](const Shape& shape, DType t = DType::f32) { return empty_on(stream, shape, t); };
  const auto refused = [](const auto& call, std::initializer_list<std::string> parts) {
    expect_refused(call, Errc::invalid_argument, parts);
  };
  const Tensor x = make({1, 4, 5, 6}), w = make({2, 4, 3, 3}), out = make({1, 2, 3, 4});
  const auto shape = [](const Shape& of_x, const Shape& of_w, const ops::Conv2d& options = {}) {
    return [=] { ops::conv2d_shape(of_x, of_w, options); };
  };
  refused(shape(x.shape(), {2, 3, 3, 3}), {"conv2d", "[1, 4, 5, 6]", "[2, 3, 3, 3]", "groups 1"});
  refused(shape(x.shape(), {2, 4, 6, 3}), {"conv2d", "larger than the padded image", "[2, 4, 6, 3]"});
  refused(shape(x.shape(), w.shape(), {.stride = {1, 0}}), {"at least 1", "stride 1 x 0"});
  refused(shape({4, 5, 6}, w.shape()), {"four extents", "[4, 5, 6]"});
  const auto conv = [&](const Tensor& to, const Tensor& weight, const Tensor& bias) {
    return [=, this] { ops::conv2d(to, x, weight, bias, {}, stream); };
  };
  refused(conv(make({1, 2, 3, 3}), w, {}),
          {"conv2d", "out [1, 2, 3, 3]", "x [1, 4, 5, 6]", "weight [2, 4, 3, 3]"});
  refused(conv(out, w, make({3})), {"conv2d", "bias [3]"});
  refused(conv(out, make({2, 4, 3, 3}, DType::bf16), {}), {"conv2d", "weight is bf16"});
  refused(
      [&] {
        ops::conv2d_backward({}, make({2, 4, 3, 2}), {}, out, x, w, {}, {}, {}, stream);
      },
      {"conv2d_backward", "d_weight [2, 4, 3, 2]"});

  const auto pool = [&](const char* op, const ops::Pool2d& p) {
    return [=] { ops::pool2d_shape(op, {1, 4, 5, 6}, p); };
  };
  refused(pool("max_pool2d", {.kernel = 3, .padding = 2}),
          {"max_pool2d", "half of the kernel", "kernel 3 x 3", "padding 2 x 2", "[1, 4, 5, 6]"});
  refused(pool("avg_pool2d", {.kernel = {3, 7}}), {"avg_pool2d", "larger than the padded image"});
  refused(
      [&] {
        ops::max_pool2d(make({1, 4, 2, 3}), make({1, 4, 2, 3}), x, {}, stream);
      },
      {"max_pool2d", "indices must be i32 [1, 4, 2, 3]"});
  refused(
      [&] {
        ops::adaptive_avg_pool2d(make({1, 3, 1, 1}), x, stream);
      },
      {"adaptive_avg_pool2d", "[1, 3, 1, 1]", "[1, 4, 5, 6]"});

  const Tensor eight = make({8}, DType::f64), four = make({4}), groups = make({1, 3});
  refused([&] { ops::batch_norm_sums(eight, x, stream); }, {"batch_norm_sums", "sums must be f64 [9]"});
  refused([&] { ops::batch_norm_sums(eight, four, stream); }, {"batch_norm_sums", "no channels", "[4]"});
  refused([&] { ops::group_norm(x, groups, groups, x, four, four, 0, stream); },
          {"group_norm", "mean [1, 3]", "x [1, 4, 5, 6]"});
}

TEST_F(ImageErrors, AreThoseOfTheMetaDevice) {
  if (!on_host()) GTEST_SKIP() << "the meta device is the host's";
  const Stream meta_stream = Stream::create(meta_device);
  const auto meta = [&](const Shape& shape) {
    return Tensor::zeros(shape, DType::f32, allocator_on(meta_device));
  };
  const Tensor x = meta({1 << 20, 4, 64, 64}), w = meta({2, 4, 3, 3});
  ops::conv2d(meta({1 << 20, 2, 62, 62}), x, w, {}, {}, meta_stream);
  expect_refused(
      [&] {
        ops::conv2d(meta({1 << 20, 2, 62, 61}), x, w, {}, {}, meta_stream);
      },
      Errc::invalid_argument, {});
}

}  // namespace
}  // namespace rz::test
