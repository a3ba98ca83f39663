#pragma once
/// The operators of tensor/image_ops.h again, in double and by their definitions, nothing shared with the
/// library.

#include <algorithm>
#include <cmath>
#include <random>
#include <string>

#include "comm/core/text.h"
#include "tensor/image_ops.h"
#include "tests/support/reference.h"

namespace rz::test {

/// A convolution.
struct Convolution {
  std::size_t images = 1, channels = 1, h = 1, w = 1, outputs = 1;
  ops::Size2 kernel = 1;
  ops::Conv2d options{};

  std::size_t out(std::size_t in, std::size_t k, std::size_t stride, std::size_t padding,
                  std::size_t dilation) const {
    return (in + 2 * padding - dilation * (k - 1) - 1) / stride + 1;
  }
  std::size_t out_h() const {
    return out(h, kernel.h, options.stride.h, options.padding.h, options.dilation.h);
  }
  std::size_t out_w() const {
    return out(w, kernel.w, options.stride.w, options.padding.w, options.dilation.w);
  }
  Shape x() const { return {images, channels, h, w}; }
  Shape weight() const { return {outputs, channels / options.groups, kernel.h, kernel.w}; }
  Shape result() const { return {images, outputs, out_h(), out_w()}; }
  std::string text() const {
    const auto pair = [](ops::Size2 s) { return concat(s.h, "x", s.w); };
    return concat("x ", name(x()), ", weight ", name(weight()), ", stride ", pair(options.stride),
                  ", padding ", pair(options.padding), ", dilation ", pair(options.dilation), ", groups ",
                  options.groups);
  }
};

/// Of any sizes, a function of the seed: odd images, strides larger than the kernel, kernels of the size of
/// the image, groups, depthwise, and 1 x 1.
inline Convolution random_convolution(unsigned seed) {
  std::mt19937 random(seed);
  const auto draw = [&](std::size_t min, std::size_t max) { return min + random() % (max - min + 1); };
  const auto pair = [&](std::size_t min, std::size_t max) {
    const std::size_t h = draw(min, max), w = draw(min, max);
    return ops::Size2(h, w);
  };
  Convolution c;
  c.options.groups = draw(1, 3);
  c.channels = c.options.groups * draw(1, 5), c.outputs = c.options.groups * draw(1, 5);
  if (seed % 4 == 3) {
    c.channels = c.options.groups = draw(2, 6);
    c.outputs = c.channels * draw(1, 2);
  }
  c.images = draw(1, 3), c.kernel = seed % 5 == 4 ? ops::Size2(1) : pair(1, 5);
  c.options.stride = pair(1, 3), c.options.dilation = pair(1, 2), c.options.padding = pair(0, 3);
  if (seed % 10 == 4) c.options.stride = 1, c.options.padding = 0;
  const auto min_extent = [](std::size_t k, std::size_t dilation, std::size_t padding) {
    const std::size_t reach = dilation * (k - 1) + 1;
    return reach > 2 * padding ? reach - 2 * padding : 1;
  };
  c.h = min_extent(c.kernel.h, c.options.dilation.h, c.options.padding.h) + (seed % 3 ? draw(0, 9) : 0);
  c.w = min_extent(c.kernel.w, c.options.dilation.w, c.options.padding.w) + (seed % 3 ? draw(0, 29) : 0);
  return c;
}

namespace reference {

/// Calls f(out, in, weight, o) for the indices of each product of a convolution.
template <class F>
void each_product(const Convolution& c, const F& f) {
  const std::size_t of_group = c.channels / c.options.groups, out_of_group = c.outputs / c.options.groups;
  std::size_t out = 0;
  for (std::size_t n = 0; n < c.images; ++n)
    for (std::size_t o = 0; o < c.outputs; ++o)
      for (std::size_t y = 0; y < c.out_h(); ++y)
        for (std::size_t x = 0; x < c.out_w(); ++x, ++out)
          for (std::size_t k = 0; k < of_group; ++k)
            for (std::size_t i = 0; i < c.kernel.h; ++i)
              for (std::size_t j = 0; j < c.kernel.w; ++j) {
                const std::size_t h = y * c.options.stride.h + i * c.options.dilation.h,
                                  w = x * c.options.stride.w + j * c.options.dilation.w;
                if (h < c.options.padding.h || h >= c.h + c.options.padding.h || w < c.options.padding.w ||
                    w >= c.w + c.options.padding.w)
                  continue;
                const std::size_t channel = o / out_of_group * of_group + k;
                f(out,
                  ((n * c.channels + channel) * c.h + h - c.options.padding.h) * c.w + w -
                      c.options.padding.w,
                  ((o * of_group + k) * c.kernel.h + i) * c.kernel.w + j, o);
              }
}

/// The bias may be empty.
inline Values conv2d(const Values& x, const Values& weight, const Values& bias, const Convolution& c) {
  Values out(c.result().count());
  const std::size_t positions = c.out_h() * c.out_w();
  for (std::size_t i = 0; i < out.size() && !bias.empty(); ++i) out[i] = bias[i / positions % c.outputs];
  each_product(
      c, [&](std::size_t o, std::size_t in, std::size_t w, std::size_t) { out[o] += x[in] * weight[w]; });
  return out;
}

/// Of x, the weight or the bias: input 0, 1 or 2.
inline Values conv2d_gradient(std::size_t of, const Values& d_out, const Values& x, const Values& weight,
                              const Convolution& c) {
  Values d(of == 0 ? x.size() : of == 1 ? weight.size() : c.outputs);
  const std::size_t positions = c.out_h() * c.out_w();
  if (of == 0)
    each_product(
        c, [&](std::size_t o, std::size_t in, std::size_t w, std::size_t) { d[in] += d_out[o] * weight[w]; });
  else if (of == 1)
    each_product(
        c, [&](std::size_t o, std::size_t in, std::size_t w, std::size_t) { d[w] += d_out[o] * x[in]; });
  else
    for (std::size_t i = 0; i < d_out.size(); ++i) d[i / positions % c.outputs] += d_out[i];
  return d;
}

// ---- pooling: f(out, begin and end of rows, begin and end of columns) for each window of one plane

struct Window {
  std::size_t top, bottom, left, right;  ///< within the image
  double terms;                          ///< padding among them
};
/// The windows of a plane, in order. A kernel of 0: adaptive, to out_h x out_w.
inline std::vector<Window> windows(std::size_t h, std::size_t w, const ops::Pool2d& p, std::size_t out_h = 0,
                                   std::size_t out_w = 0) {
  std::vector<Window> all;
  if (out_h) {
    for (std::size_t y = 0; y < out_h; ++y)
      for (std::size_t x = 0; x < out_w; ++x) {
        const auto begin = [](std::size_t i, std::size_t in, std::size_t out) {
          return static_cast<std::size_t>(std::floor(static_cast<double>(i * in) / static_cast<double>(out)));
        };
        const auto end = [](std::size_t i, std::size_t in, std::size_t out) {
          return static_cast<std::size_t>(
              std::ceil(static_cast<double>((i + 1) * in) / static_cast<double>(out)));
        };
        Window v{begin(y, h, out_h), end(y, h, out_h), begin(x, w, out_w), end(x, w, out_w), 0};
        v.terms = static_cast<double>((v.bottom - v.top) * (v.right - v.left));
        all.push_back(v);
      }
    return all;
  }
  const std::size_t step_h = p.stride.h ? p.stride.h : p.kernel.h,
                    step_w = p.stride.w ? p.stride.w : p.kernel.w;
  for (std::size_t y = 0; y + p.kernel.h <= h + 2 * p.padding.h; y += step_h)
    for (std::size_t x = 0; x + p.kernel.w <= w + 2 * p.padding.w; x += step_w) {
      const auto inside = [](std::size_t at, std::size_t padding, std::size_t in) {
        return at < padding ? 0 : std::min(at - padding, in);
      };
      all.push_back({inside(y, p.padding.h, h), inside(y + p.kernel.h, p.padding.h, h),
                     inside(x, p.padding.w, w), inside(x + p.kernel.w, p.padding.w, w),
                     static_cast<double>(p.kernel.h * p.kernel.w)});
    }
  return all;
}

inline Values mean_pool(const Values& x, std::size_t h, std::size_t w, const std::vector<Window>& windows) {
  Values out;
  for (std::size_t plane = 0; plane < x.size(); plane += h * w)
    for (const Window& v : windows) {
      double sum = 0;
      for (std::size_t i = v.top; i < v.bottom; ++i)
        for (std::size_t j = v.left; j < v.right; ++j) sum += x[plane + i * w + j];
      out.push_back(sum / v.terms);
    }
  return out;
}
inline Values mean_pool_backward(const Values& d_out, std::size_t planes, std::size_t h, std::size_t w,
                                 const std::vector<Window>& windows) {
  Values d_x(planes * h * w);
  for (std::size_t plane = 0; plane < planes; ++plane)
    for (std::size_t k = 0; k < windows.size(); ++k)
      for (std::size_t i = windows[k].top; i < windows[k].bottom; ++i)
        for (std::size_t j = windows[k].left; j < windows[k].right; ++j)
          d_x[(plane * h + i) * w + j] += d_out[plane * windows.size() + k] / windows[k].terms;
  return d_x;
}
/// Positions of the maxima within their planes, as torch finds them.
inline std::vector<std::int32_t> max_positions(const Values& x, std::size_t h, std::size_t w,
                                               const std::vector<Window>& windows) {
  std::vector<std::int32_t> out;
  for (std::size_t plane = 0; plane < x.size(); plane += h * w)
    for (const Window& v : windows) {
      std::size_t argmax = v.top * w + v.left;
      double value = -INFINITY;
      for (std::size_t i = v.top; i < v.bottom; ++i)
        for (std::size_t j = v.left; j < v.right; ++j)
          if (const double here = x[plane + i * w + j]; here > value || std::isnan(here))
            value = here, argmax = i * w + j;
      out.push_back(static_cast<std::int32_t>(argmax));
    }
  return out;
}

// ---- norms of x[n, c, p]: set(n, c) numbers the sets of terms that are normalized together

struct Moments {
  double mean = 0, variance = 0, count = 0;
};
template <class Set>
std::vector<Moments> moments(const Values& x, std::size_t n, std::size_t c, std::size_t sets,
                             const Set& set) {
  std::vector<Moments> all(sets);
  const std::size_t p = x.size() / (n * c);
  const auto of = [&](std::size_t i) -> Moments& { return all[set(i / p / c, i / p % c)]; };
  for (std::size_t i = 0; i < x.size(); ++i) of(i).mean += x[i], of(i).count += 1;
  for (Moments& m : all) m.mean /= m.count;
  for (std::size_t i = 0; i < x.size(); ++i) of(i).variance += (x[i] - of(i).mean) * (x[i] - of(i).mean);
  for (Moments& m : all) m.variance /= m.count;
  return all;
}
template <class Set>
Values normalize(const Values& x, const Values& weight, const Values& bias, std::size_t n, std::size_t c,
                 const std::vector<Moments>& of, const Set& set, double epsilon) {
  Values out(x.size());
  const std::size_t p = x.size() / (n * c);
  for (std::size_t i = 0; i < x.size(); ++i) {
    const std::size_t channel = i / p % c;
    const Moments& m = of[set(i / p / c, channel)];
    out[i] = (x[i] - m.mean) / std::sqrt(m.variance + epsilon) * weight[channel] + bias[channel];
  }
  return out;
}

}  // namespace reference
}  // namespace rz::test
