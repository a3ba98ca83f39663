// Runs: ci host operators

// The memory-bound operators on a device, in f32, f16 and bf16, against their reference in double: storing
// and adding, at sizes that no pack, warp or block divides, at addresses that are not aligned, and in place.

#include "tensor/ops.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "comm/device/cuda_runtime.h"
#include "tests/gpu/on_device.h"
#include "tests/support/error_of.h"
#include "tests/support/reference.h"

namespace rz::test {
namespace {

using ops::Into;

constexpr double close = 2e-6;  // as on the host: relative to the largest element

class DeviceOps : public OnDevice, public testing::WithParamInterface<DType> {
 protected:
  const DType dtype = GetParam();

  /// Maximum error of rounding to nearest, relative to the value.
  double rounding(DType t) const { return t == DType::f16 ? 0x1p-11 : t == DType::bf16 ? 0x1p-8 : 0; }

  /// The same where f16 is subnormal.
  double smallest(DType t) const { return t == DType::f16 ? 0x1p-25 : 0; }

  /// Not aligned to more than an element if `shift` is odd.
  Tensor place(const Values& values, const Shape& shape, DType t, std::size_t shift = 0) const {
    Values shifted(shift, NAN);
    shifted.insert(shifted.end(), values.begin(), values.end());
    return to_device(shifted, {shifted.size()}, t, stream).view(shift, shape);
  }
  Tensor place(const Values& values, const Shape& shape, std::size_t shift = 0) const {
    return place(values, shape, dtype, shift);
  }
  Tensor statistics(const Shape& shape) const { return empty_on(stream, shape); }
  Tensor empty(const Shape& shape) const { return empty_on(stream, shape, dtype); }
  /// As the device holds them.
  Values rounded(const Values& values) const { return from_device(place(values, {values.size()}), stream); }
  Values random(std::size_t n, unsigned seed, double range = 1) const {
    return rounded(random_values(n, seed, range));
  }

  void expect_close(const Tensor& got, const Values& expected, double tolerance, const char* what) const {
    ASSERT_EQ(got.count(), expected.size()) << what;
    const Values values = from_device(got, stream);
    double max = 1e-30;
    for (const double e : expected) max = std::max(max, std::abs(e));
    for (std::size_t i = 0; i < values.size(); ++i)
      ASSERT_LE(std::abs(values[i] - expected[i]),
                tolerance * max + rounding(got.dtype()) * (std::abs(expected[i]) + tolerance * max) +
                    smallest(got.dtype()))
          << what << " of " << name(got.dtype()) << ": element " << i << " is " << values[i] << ", expected "
          << expected[i];
  }

  using Backward = std::function<void(const Tensor&, Into)>;
  /// Calls f twice, with a gradient to overwrite and one to accumulate into, and compares both.
  void expect_gradient(const Values& expected, const Shape& shape, DType t, double tolerance,
                       const char* what, const Backward& f, std::size_t shift = 0) const {
    const Tensor stored = place(Values(expected.size(), NAN), shape, t, shift),
                 added = place(random_values(expected.size(), 99), shape, t, shift);
    Values sum = from_device(added, stream);
    f(stored, Into::overwrite);
    f(added, Into::accumulate);
    expect_close(stored, expected, tolerance, what);
    for (std::size_t i = 0; i < sum.size(); ++i) sum[i] += expected[i];
    expect_close(added, sum, tolerance, what);
  }
  /// Of a parameter: in the type of the values and in f32.
  void expect_parameter_gradient(const Values& expected, const Shape& shape, double tolerance,
                                 const char* what, const Backward& f) const {
    expect_gradient(expected, shape, dtype, tolerance, what, f);
    if (dtype != DType::f32) expect_gradient(expected, shape, DType::f32, tolerance, what, f);
  }
};

INSTANTIATE_TEST_SUITE_P(Types, DeviceOps, testing::Values(DType::f32, DType::f16, DType::bf16),
                         [](const auto& info) { return std::string(name(info.param)); });

/// Operators of the list as functions of these types.
template <ops::Unary op>
void forward(const Tensor& out, const Tensor& in, const Stream& stream) {
  ops::unary(out, in, op, stream);
}
template <ops::Unary op>
void backward(const Tensor& d_in, const Tensor& d_out, const Tensor& saved, Into into, const Stream& stream) {
  ops::unary_backward(d_in, d_out, saved, op, into, stream);
}

TEST_P(DeviceOps, ArithmeticIsExact) {
  for (const std::size_t n : {std::size_t{1}, std::size_t{7}, std::size_t{4099}})
    for (const std::size_t shift : {std::size_t{0}, std::size_t{1}, std::size_t{4}}) {
      Values a(n), b(n);
      for (std::size_t i = 0; i < n; ++i)
        a[i] = static_cast<double>(i % 40), b[i] = static_cast<double>(i % 7) - 3;
      const Tensor x = place(a, {n}, shift), y = place(b, {n}, shift % 2),
                   out = empty({n + 2}).view(shift % 2, {n});
      const auto expect = [&](auto f) {
        const Values got = from_device(out, stream);
        for (std::size_t i = 0; i < n; ++i) ASSERT_EQ(got[i], f(a[i], b[i])) << i;
      };
      ops::add(out, x, y, stream);
      expect([](double p, double q) { return p + q; });
      ops::binary(out, x, y, ops::Binary::mul, stream);
      expect([](double p, double q) { return p * q; });
      ops::scale(out, x, 0.5f, stream);
      expect([](double p, double) { return p * 0.5; });
      ops::add_scaled(out, y, 2, stream);
      expect([](double p, double q) { return p * 0.5 + q * 2; });
      ops::copy(out, y, stream);
      ops::add(out, out, x, stream);  // out may be an input
      expect([](double p, double q) { return p + q; });
      ops::unary(out, y, ops::Unary::relu, stream);
      expect([](double, double q) { return std::max(q, 0.0); });
      ops::fill(out, -2, stream);
      expect([](double, double) { return -2; });
    }
}

TEST_P(DeviceOps, CopyConverts) {
  const Values values = random_values(1003, 1, 1000);
  for (const DType to : {DType::f32, DType::f16, DType::bf16})
    for (const std::size_t shift : {std::size_t{0}, std::size_t{1}, std::size_t{4}}) {
      const Tensor in = place(values, {1003}, shift), out = place(Values(1003, NAN), {1003}, to, shift);
      ops::copy(out, in, stream);
      EXPECT_EQ(from_device(out, stream),
                from_device(to_device(from_device(in, stream), {1003}, to, stream), stream));
    }
}

TEST_P(DeviceOps, MeanSquaredError) {
  for (const std::size_t n : {std::size_t{1}, std::size_t{37}, std::size_t{5001}}) {
    const Values a = random(n, 1), b = random(n, 2);
    double squares = 0;
    for (std::size_t i = 0; i < n; ++i) squares += (a[i] - b[i]) * (a[i] - b[i]);
    const Tensor x = place(a, {n}, 3), y = place(b, {n}, 3), loss = statistics({});
    ops::mean_squared_error(loss, x, y, stream);
    EXPECT_EQ(from_device(loss, stream)[0], static_cast<float>(squares / static_cast<double>(n)));
    Values gradient(n);
    for (std::size_t i = 0; i < n; ++i) gradient[i] = 2 * (a[i] - b[i]) * 0.5 / static_cast<double>(n);
    const Tensor d_loss = to_device({0.5}, {}, DType::f32, stream);
    expect_gradient(
        gradient, {n}, dtype, 1e-7, "mean_squared_error_backward",
        [&](const Tensor& d, Into into) { ops::mean_squared_error_backward(d, d_loss, x, y, into, stream); });
  }
}

TEST_P(DeviceOps, Activations) {
  struct Case {
    const char* name;
    void (*forward)(const Tensor&, const Tensor&, const Stream&);
    void (*backward)(const Tensor&, const Tensor&, const Tensor&, Into, const Stream&);
    Values (*expected)(const Values&);
    bool of_output;
  };
  for (const Case& c :
       {Case{"gelu", ops::gelu, ops::gelu_backward, reference::gelu, false},
        Case{"relu", forward<ops::Unary::relu>, backward<ops::Unary::relu>, reference::relu, false},
        Case{"tanh", forward<ops::Unary::tanh>, backward<ops::Unary::tanh>, reference::tanh, true}})
    for (const std::size_t n : {1, 13, 2051})
      for (const std::size_t shift : {std::size_t{0}, std::size_t{1}}) {
        const Values x = random(n, 3, 5), dy = random(n, 4);
        const Tensor in = place(x, {n}, shift), d_out = place(dy, {n}, shift), out = empty({n});
        c.forward(out, in, stream);
        expect_close(out, c.expected(x), 2e-7, c.name);
        Values gradient(n);
        const Values y = from_device(out, stream);
        for (std::size_t i = 0; i < n; ++i)
          gradient[i] = c.of_output ? dy[i] * (1 - y[i] * y[i])
                                    : numeric_gradient([&](const Values& v) { return c.expected(v); }, {x[i]},
                                                       {dy[i]})[0];
        const auto backward = [&](const Tensor& d_in, Into into) {
          c.backward(d_in, d_out, c.of_output ? out : in, into, stream);
        };
        expect_gradient(gradient, {n}, dtype, 1e-6, c.name, backward, shift);
        const Tensor stored = empty({n});
        backward(stored, Into::overwrite);
        backward(d_out, Into::overwrite);  // in place
        EXPECT_EQ(from_device(d_out, stream), from_device(stored, stream)) << c.name;
      }
}

TEST_P(DeviceOps, ActivationsOfExtremes) {
  const double inf = std::numeric_limits<double>::infinity(), large = dtype == DType::f16 ? 6e4 : 1e30;
  const Tensor in = place({-inf, -large, -100, -30, 0, 100, large, inf, NAN}, {9}), out = empty({9});
  const auto values = [&] { return from_device(out, stream); };
  ops::unary(out, in, ops::Unary::tanh, stream);
  for (std::size_t i = 0; i < 8; ++i) EXPECT_EQ(values()[i], i < 4 ? -1 : i == 4 ? 0 : 1) << i;
  EXPECT_TRUE(std::isnan(values()[8]));
  ops::gelu(out, in, stream);
  for (std::size_t i = 1; i < 5; ++i) EXPECT_NEAR(values()[i], 0, 1e-7) << i;
  EXPECT_EQ(values()[5], 100);
  EXPECT_TRUE(std::isnan(values()[8]));
  ops::gelu_backward(out, place(Values(9, 1.0), {9}), in, Into::overwrite, stream);
  for (std::size_t i = 1; i < 7; ++i) EXPECT_NEAR(values()[i], i < 4 ? 0 : i == 4 ? 0.5 : 1, 1e-7) << i;
  for (const std::size_t i : {0, 7, 8}) EXPECT_TRUE(std::isnan(values()[i])) << i << ": as in PyTorch";
  ops::unary(out, in, ops::Unary::relu, stream);
  EXPECT_TRUE(std::isnan(values()[8]));
}

TEST_P(DeviceOps, TanhIsAccurateToTheLastBits) {
  for (const double range : {1e-2, 0.3, 1.0, 9.0}) {
    const Values x = random(1001, 8, range);
    const Tensor out = empty({x.size()});
    ops::unary(out, place(x, {x.size()}), ops::Unary::tanh, stream);
    const Values got = from_device(out, stream);
    for (std::size_t i = 0; i < x.size(); ++i)
      ASSERT_NEAR(got[i], std::tanh(x[i]),
                  (4e-7 + rounding(dtype)) * std::abs(std::tanh(x[i])) + smallest(dtype));
  }
}

TEST_P(DeviceOps, DropoutMatchesTheHost) {
  for (const std::size_t n : {std::size_t{1}, std::size_t{5003}})
    for (const std::size_t shift : {std::size_t{0}, std::size_t{1}, std::size_t{2}})
      for (const std::uint64_t skip : {0, 1, 2, 3})
        for (const float p : {0.0f, 0.25f}) {
          const ops::DropoutMask mask{p, 0x123456789abcdefull, (1ull << 34) - 776 + skip};
          const Values x = random(n, 5);
          const Tensor host = tensor_of(x, {n}), in = place(x, {n}, shift),
                       out = empty({n + 3}).view(shift, {n});
          ops::dropout(host, host, mask, {});
          ops::dropout(out, in, mask, stream);
          ASSERT_EQ(from_device(out, stream), rounded(values_of(host)));
          if (n > 1 && skip) continue;
          ops::dropout(in, in, mask, stream);  // in place
          ASSERT_EQ(from_device(in, stream), from_device(out, stream));
        }
}

/// Runs of 5 elements, so that a pack of elements is in several.
TEST_P(DeviceOps, DropoutOfAPartIsThatOfTheWhole) {
  constexpr std::size_t run = 5, parts = 3, rows = 41;
  const Values x = random(run * parts * rows, 5);
  const Tensor whole = empty({rows, parts, run}), part = empty({rows, run});
  ops::dropout(whole, place(x, whole.shape()), {.p = 0.25f, .seed = 3, .offset = 7}, stream);
  const Values all = from_device(whole, stream);
  for (std::size_t p = 0; p < parts; ++p) {
    Values in, expected;
    for (std::size_t i = 0; i < rows * run; ++i) {
      const std::size_t at = (i / run * parts + p) * run + i % run;
      in.push_back(x[at]), expected.push_back(all[at]);
    }
    ops::dropout(part, place(in, part.shape()),
                 {.p = 0.25f, .seed = 3, .offset = 7 + p * run, .run = run, .stride = parts * run}, stream);
    EXPECT_EQ(from_device(part, stream), expected);
  }
}

/// The seed is read when the kernel runs, not when it is put into its stream.
TEST_P(DeviceOps, DropoutReadsItsSeedLate) {
  const std::size_t n = 1000;
  const auto seed = std::reinterpret_pointer_cast<std::uint64_t>(allocate_on(stream.device(), 8));
  const Tensor in = place(random(n, 5), {n}), late = empty({n}), early = empty({n});
  std::vector<Values> all;
  for (const std::uint64_t s : {7, 8}) {
    memcpy_async(seed.get(), &s, sizeof s, stream);
    ops::dropout(late, in, {.p = 0.25f, .seed = 1, .offset = 3, .seed_at = seed.get()}, stream);
    ops::dropout(early, in, {.p = 0.25f, .seed = s, .offset = 3}, stream);
    all.push_back(from_device(late, stream));
    EXPECT_EQ(all.back(), from_device(early, stream));
  }
  EXPECT_NE(all[0], all[1]);
}

constexpr float epsilon = 1e-5f;
// Packs of four or eight in a lane, rows that are not aligned, and rows that are not kept in registers.
constexpr std::array<std::size_t, 2> norm_shapes[] = {{1, 1},    {1, 5},   {3, 8},    {9, 67},
                                                      {70, 136}, {2, 768}, {3, 1600}, {2, 2056}};

Values with_a_mean(std::size_t count) {
  Values x = random_values(count, 1, 2);
  for (double& v : x) v = v + 3;
  return x;
}

TEST_P(DeviceOps, LayerNorm) {
  for (const auto& [n, c] : norm_shapes) {
    const Values x = rounded(with_a_mean(n * c)), w = random(c, 2), b = random(c, 3);
    const Tensor xt = place(x, {n, c}), wt = place(w, {c}), bt = place(b, {c}), out = empty({n, c}),
                 mean = statistics({n}), inverse = statistics({n}), sum = empty({n, c});
    ops::layer_norm(out, mean, inverse, xt, wt, bt, epsilon, stream);
    expect_close(out, reference::layer_norm(x, w, b, epsilon), close, "layer_norm");

    const Tensor other = place(random(n * c, 5), {n, c});
    ops::add(out, xt, other, stream);
    const Values both = from_device(out, stream);
    ops::fill(out, 0, stream);
    ops::add_layer_norm(sum, out, mean, inverse, xt, other, wt, bt, epsilon, stream);
    EXPECT_EQ(from_device(sum, stream), both);
    expect_close(out, reference::layer_norm(both, w, b, epsilon), close, "add_layer_norm");
  }
}

struct NormGradient {
  Values dx, dw, db;
};

/// By the formula, which finite differences confirm where they are fast.
NormGradient norm_gradient(const Values& x, const Values& w, const Values& dy, const Values& mean,
                           const Values& inverse) {
  const std::size_t n = mean.size(), c = w.size();
  NormGradient d{Values(n * c), Values(c), Values(c)};
  for (std::size_t i = 0; i < n; ++i) {
    double g = 0, gn = 0;
    const auto normal = [&](std::size_t j) { return (x[i * c + j] - mean[i]) * inverse[i]; };
    for (std::size_t j = 0; j < c; ++j) {
      g += dy[i * c + j] * w[j] / static_cast<double>(c);
      gn += dy[i * c + j] * w[j] * normal(j) / static_cast<double>(c);
      d.dw[j] += dy[i * c + j] * normal(j), d.db[j] += dy[i * c + j];
    }
    for (std::size_t j = 0; j < c; ++j)
      d.dx[i * c + j] = inverse[i] * (dy[i * c + j] * w[j] - g - normal(j) * gn);
  }
  return d;
}

TEST_P(DeviceOps, LayerNormBackward) {
  for (const auto& [n, c] : norm_shapes) {
    if (c == 1) continue;  // no variance: the gradient is 0 / 0
    const Values x = rounded(with_a_mean(n * c)), w = random(c, 2), b = random(c, 3), dy = random(n * c, 4);
    const Tensor xt = place(x, {n, c}), wt = place(w, {c}), bt = place(b, {c}), d_out = place(dy, {n, c}),
                 out = empty({n, c}), mean = statistics({n}), inverse = statistics({n});
    ops::layer_norm(out, mean, inverse, xt, wt, bt, epsilon, stream);
    const NormGradient right =
        norm_gradient(x, w, dy, from_device(mean, stream), from_device(inverse, stream));
    if (n * c < 1000) {
      const auto of = [&](const Values& v) { return reference::layer_norm(v, w, b, epsilon); };
      rz::test::expect_close(tensor_of(right.dx, {n, c}), numeric_gradient(of, x, dy), close,
                             "d_x by its formula");
    }
    const auto backward = [&](const Tensor& d_x, const Tensor& d_w, const Tensor& d_b, Into x_into,
                              Into into) {
      ops::layer_norm_backward(d_x, d_w, d_b, d_out, xt, wt, mean, inverse, x_into, into, stream);
    };
    expect_gradient(right.dx, {n, c}, dtype, close, "d_x",
                    [&](const Tensor& d, Into into) { backward(d, {}, {}, into, Into::overwrite); });
    const Tensor scratch = empty({n, c});
    expect_parameter_gradient(right.dw, {c}, close, "d_weight", [&](const Tensor& d, Into into) {
      backward(scratch, d, {}, Into::overwrite, into);
    });
    expect_parameter_gradient(right.db, {c}, close, "d_bias", [&](const Tensor& d, Into into) {
      backward(scratch, {}, d, Into::overwrite, into);
    });
    const Tensor d_weight = empty_on(stream, {c}), d_bias = empty_on(stream, {c});
    backward(d_out, d_weight, d_bias, Into::overwrite, Into::overwrite);  // in place, everything at once
    expect_close(d_out, right.dx, close, "d_x in place");
    expect_close(d_weight, right.dw, close, "d_weight");
    expect_close(d_bias, right.db, close, "d_bias");
  }
}

/// Sums over more rows than a block has, of integers, which are exact.
TEST_P(DeviceOps, NormGradientsOfManyRowsAreExact) {
  for (const auto& [n, c] :
       {std::pair<std::size_t, std::size_t>{1025, 24}, {2600, 24}, {700, 23}, {2100, 130}}) {
    Values x(n * c), dy(n * c), dw(c), db(c);
    for (std::size_t i = 0; i < n * c; ++i) {
      x[i] = static_cast<double>(i * 7 % 13) - 6, dy[i] = static_cast<double>(i * 5 % 11) - 5;
      dw[i % c] += x[i] * dy[i], db[i % c] += dy[i];
    }
    const Tensor mean = statistics({n}), inverse = statistics({n}), scratch = empty({n, c});
    ops::fill(mean, 0, stream), ops::fill(inverse, 1, stream);
    const Tensor d_weight = empty_on(stream, {c}), d_bias = empty_on(stream, {c}),
                 weight = place(Values(c, 1.0), {c});
    for (const double times : {1.0, 2.0}) {
      ops::layer_norm_backward(scratch, d_weight, d_bias, place(dy, {n, c}), place(x, {n, c}), weight, mean,
                               inverse, Into::overwrite, times == 1 ? Into::overwrite : Into::accumulate,
                               stream);
      for (std::size_t j = 0; j < c; ++j) dw[j] *= times, db[j] *= times;
      EXPECT_EQ(from_device(d_weight, stream), dw) << n << " x " << c;
      EXPECT_EQ(from_device(d_bias, stream), db) << n << " x " << c;
    }
  }
}

TEST_P(DeviceOps, LayerNormOfRowsThatAreNotAligned) {
  const std::size_t n = 3, c = 16;
  const Values x = random(n * c, 1), w = random(c, 2), b = random(c, 3);
  const Tensor out = empty({n, c}), mean = statistics({n}), inverse = statistics({n});
  ops::layer_norm(out, mean, inverse, place(x, {n, c}, 1), place(w, {c}), place(b, {c}, 2), 1e-5f, stream);
  expect_close(out, reference::layer_norm(x, w, b, 1e-5f), close, "layer_norm");
}

TEST_P(DeviceOps, RmsNorm) {
  for (const auto& [n, c] : norm_shapes) {
    const Values x = rounded(with_a_mean(n * c)), w = random(c, 2), dy = random(n * c, 4);
    const Tensor xt = place(x, {n, c}), wt = place(w, {c}), d_out = place(dy, {n, c}), out = empty({n, c}),
                 inverse = statistics({n}), sum = empty({n, c}), other = place(random(n * c, 5), {n, c});
    ops::add(out, xt, other, stream);
    const Values both = from_device(out, stream);
    ops::fill(out, 0, stream);
    ops::add_rms_norm(sum, out, inverse, xt, other, wt, epsilon, stream);
    EXPECT_EQ(from_device(sum, stream), both);
    expect_close(out, reference::rms_norm(both, w, epsilon), close, "add_rms_norm");

    ops::rms_norm(out, inverse, xt, wt, epsilon, stream);
    expect_close(out, reference::rms_norm(x, w, epsilon), close, "rms_norm");
    // As a layer norm whose mean is 0, without its gradient.
    const Values r = from_device(inverse, stream);
    Values dx(n * c), dw(c);
    for (std::size_t i = 0; i < n; ++i) {
      double gn = 0;
      for (std::size_t j = 0; j < c; ++j) {
        const double normal = x[i * c + j] * r[i];
        gn += dy[i * c + j] * w[j] * normal / static_cast<double>(c);
        dw[j] += dy[i * c + j] * normal;
      }
      for (std::size_t j = 0; j < c; ++j)
        dx[i * c + j] = r[i] * (dy[i * c + j] * w[j] - x[i * c + j] * r[i] * gn);
    }
    if (c > 1 && n * c < 1000) {
      const auto of = [&](const Values& v) { return reference::rms_norm(v, w, epsilon); };
      rz::test::expect_close(tensor_of(dx, {n, c}), numeric_gradient(of, x, dy), close, "d_x by its formula");
    }
    const auto backward = [&](const Tensor& d_x, const Tensor& d_w, Into x_into, Into into) {
      ops::rms_norm_backward(d_x, d_w, d_out, xt, wt, inverse, x_into, into, stream);
    };
    if (c > 1)  // of one element only the part by epsilon is left, below the rounding of the terms
      expect_gradient(dx, {n, c}, dtype, close, "d_x",
                      [&](const Tensor& d, Into into) { backward(d, {}, into, Into::overwrite); });
    const Tensor scratch = empty({n, c}), d_weight = empty_on(stream, {c});
    expect_parameter_gradient(dw, {c}, close, "d_weight", [&](const Tensor& d, Into into) {
      backward(scratch, d, Into::overwrite, into);
    });
    backward(d_out, d_weight, Into::overwrite, Into::overwrite);  // in place
    EXPECT_EQ(from_device(d_out, stream), from_device(scratch, stream));
    expect_close(d_weight, dw, close, "d_weight");
  }
}

TEST_P(DeviceOps, RmsNormOfRowsThatAreNotAligned) {
  const std::size_t n = 3, c = 16;
  const Values x = random(n * c, 1), w = random(c, 2);
  const Tensor out = empty({n, c}), inverse = statistics({n});
  ops::rms_norm(out, inverse, place(x, {n, c}, 1), place(w, {c}), 1e-5f, stream);
  expect_close(out, reference::rms_norm(x, w, 1e-5f), close, "rms_norm");
}

/// Tokens that repeat within a warp, across warps and across rounds of the kernel's list.
std::vector<std::int32_t> some_tokens(std::size_t n, std::size_t vocabulary) {
  std::vector<std::int32_t> ids(n);
  for (std::size_t i = 0; i < n; ++i)
    ids[i] = static_cast<std::int32_t>(i % 3 == 0 ? 1 : (i * i * 31 + i / 7) % vocabulary);
  return ids;
}

TEST_P(DeviceOps, Embedding) {
  struct Case {
    std::size_t vocabulary, c, batch, length;
  };
  for (const auto& [vocabulary, c, batch, length] :
       {Case{11, 19, 2, 3}, {11, 16, 2, 5}, {300, 264, 3, 17}, {2, 1, 1, 1}, {70, 8, 1, 9000}}) {
    const Values table = random(vocabulary * c, 1), positions = random((length + 2) * c, 2),
                 dy = random(batch * length * c, 3);
    std::vector<std::int32_t> ids = some_tokens(batch * length, vocabulary);
    const Tensor tokens = to_device(ids, {batch, length}, stream), t = place(table, {vocabulary, c}),
                 p = place(positions, {length + 2, c}), out = empty({batch, length, c}),
                 d_out = place(dy, {batch, length, c});
    Values rows, both, d_table(vocabulary * c), d_positions((length + 2) * c);
    for (std::size_t i = 0; i < ids.size(); ++i)
      for (std::size_t j = 0; j < c; ++j) {
        const std::size_t at = static_cast<std::size_t>(ids[i]) * c + j, place = i % length * c + j;
        rows.push_back(table[at]);
        both.push_back(table[at] + positions[place]);
        d_table[at] += dy[i * c + j];
        d_positions[place] += dy[i * c + j];
      }
    ops::embedding(out, tokens, t, stream);
    EXPECT_EQ(from_device(out, stream), rows);
    ops::embedding_with_positions(out, tokens, t, p, stream);
    EXPECT_EQ(from_device(out, stream), rounded(both));
    const double tolerance = length > 1000 ? close : 2e-7;
    expect_parameter_gradient(
        d_positions, {length + 2, c}, tolerance, "d_positions",
        [&](const Tensor& d, Into into) { ops::positions_backward(d, d_out, into, stream); });
    // A table in 16 bits is rounded once per list.
    const auto backward = [&](const Tensor& d, Into into) {
      ops::embedding_backward(d, d_out, tokens, into, stream);
    };
    if (length > 1000)
      expect_gradient(d_table, {vocabulary, c}, DType::f32, tolerance, "d_table", backward);
    else
      expect_parameter_gradient(d_table, {vocabulary, c}, tolerance, "d_table", backward);
  }
}

TEST_P(DeviceOps, EmbeddingBackwardAddsInTheHostsOrder) {
  const std::size_t n = 9000, vocabulary = 5, c = 8;
  const Values dy = random(n * c, 3);
  const std::vector<std::int32_t> ids = some_tokens(n, vocabulary);
  const Tensor host = tensor_of(random_values(vocabulary * c, 4), {vocabulary, c}),
               on_device = to_device(values_of(host), {vocabulary, c}, DType::f32, stream);
  ops::embedding_backward(host, tensor_of(dy, {n, c}), tokens_of(ids, {n}), Into::accumulate, {});
  ops::embedding_backward(on_device, place(dy, {n, c}), to_device(ids, {n}, stream), Into::accumulate,
                          stream);
  EXPECT_EQ(from_device(on_device, stream), values_of(host));
}

/// In f32, 2^15 - 2^15 + 2^-10 is 2^-10, and 0 in the opposite order.
TEST_P(DeviceOps, EmbeddingBackwardAddsRowsOfOneTokenInOrder) {
  const std::size_t c = 3;
  Values dy;
  for (const double v : {0x1p15, 5.0, -0x1p15, 0x1p-10}) dy.insert(dy.end(), c, v);
  const Tensor d_out = place(dy, {4, c}), tokens = to_device({1, 0, 1, 1}, {4}, stream);
  for (const DType t : {dtype, DType::f32}) {
    const Tensor d_table = empty_on(stream, {2, c}, t);
    ops::embedding_backward(d_table, d_out, tokens, Into::overwrite, stream);
    EXPECT_EQ(from_device(d_table, stream), (Values{5, 5, 5, 0x1p-10, 0x1p-10, 0x1p-10}));
  }
}

TEST_P(DeviceOps, AnotherRanksTokensAreZero) {
  constexpr std::size_t c = 9;
  const std::vector<std::int32_t> ids{4, 2, 6, 0, 3};
  const Tensor own = to_device({0, 0, 0, 0, 0}, {5}, stream), out = empty({5, c}), d_table = empty({3, c});
  ops::local_indices(own, to_device(ids, {5}, stream), 2, 3, 7, stream);
  const Values table = random(3 * c, 1), dy = random(5 * c, 2);
  ops::embedding(out, own, place(table, {3, c}), stream);
  ops::embedding_backward(d_table, place(dy, {5, c}), own, Into::overwrite, stream);
  Values expected, d_expected(3 * c);
  for (std::size_t i = 0; i < ids.size(); ++i)
    for (std::size_t j = 0; j < c; ++j) {
      const std::size_t row = static_cast<std::size_t>(ids[i]) - 2;
      expected.push_back(row < 3 ? table[row * c + j] : 0);
      if (row < 3) d_expected[row * c + j] += dy[i * c + j];
    }
  EXPECT_EQ(from_device(out, stream), expected);
  EXPECT_EQ(from_device(d_table, stream), d_expected);
}

/// 37 classes as 13, 13 and 11; -100 is ignored.
TEST_P(DeviceOps, CrossEntropyOfPartsIsThatOfTheWhole) {
  constexpr std::size_t n = 5, v = 37, parts = 3, share = 13;
  const Values x = random(n * v, 1, 4);
  const std::vector<std::int32_t> ids{0, 12, -100, 13, 36};
  const Tensor targets = to_device(ids, {n}, stream), all = statistics({parts, n, 2});
  std::vector<Tensor> logits, own;
  for (std::size_t p = 0; p < parts; ++p) {
    const std::size_t width = std::min(share, v - p * share);
    Values part;
    for (std::size_t i = 0; i < n; ++i)
      for (std::size_t j = 0; j < width; ++j) part.push_back(x[i * v + p * share + j]);
    logits.push_back(place(part, {n, width}));
    own.push_back(to_device(ids, {n}, stream));
    ops::local_indices(own[p], targets, p * share, width, v, stream);
    ops::cross_entropy_part(all.view(p * n * 2, {n, 2}), logits[p], own[p], stream);
  }
  const Tensor loss = statistics({}), sums = empty_on(stream, {2}, DType::f64), losses = statistics({n}),
               log_sum = statistics({n}), d_loss = to_device(Values{0.5}, {}, DType::f32, stream);
  ops::cross_entropy_of_parts(loss, sums, losses, log_sum, all, own[1], stream);
  Values expected_losses, d_expected(n * v);
  double sum = 0;
  for (std::size_t i = 0; i < n; ++i) {
    double total = 0;
    for (std::size_t j = 0; j < v; ++j) total += std::exp(x[i * v + j]);
    const bool counts = ids[i] != -100;
    expected_losses.push_back(counts ? std::log(total) - x[i * v + static_cast<std::size_t>(ids[i])] : 0);
    sum += expected_losses.back();
    for (std::size_t j = 0; j < v && counts; ++j)
      d_expected[i * v + j] =
          0.5 * (std::exp(x[i * v + j]) / total - (j == static_cast<std::size_t>(ids[i]) ? 1 : 0));
  }
  expect_close(losses, expected_losses, close, "losses");
  expect_close(loss, {sum}, close, "loss");
  EXPECT_EQ(sums.on_host(stream).data<double>()[1], 4);
  for (std::size_t p = 0; p < parts; ++p) {
    ops::cross_entropy_backward(logits[p], logits[p], log_sum, own[p], d_loss, stream);
    Values part;
    for (std::size_t i = 0; i < n; ++i)
      for (std::size_t j = 0; j < logits[p].shape()[1]; ++j)
        part.push_back(d_expected[i * v + p * share + j]);
    expect_close(logits[p], part, close, "d_logits");
  }
}

TEST_P(DeviceOps, TokensOutOfRangeAreSeenAndDoNoHarm) {
  if (on_host()) GTEST_SKIP() << "the host refuses such tokens";
  const std::size_t c = 8;
  const Values table = random(3 * c, 1), dy(4 * c, 1.0);
  const Tensor tokens = to_device({2, 3, -1, std::numeric_limits<std::int32_t>::min() + 1}, {1, 4}, stream),
               t = place(table, {3, c}), out = empty({1, 4, c}), d_table = empty({3, c});
  const auto expect_rows = [&](double added) {
    const Values got = from_device(out, stream);
    for (std::size_t i = 0; i < got.size(); ++i)
      if (i < c)
        EXPECT_EQ(got[i], rounded({table[2 * c + i] + added})[0]);
      else
        EXPECT_TRUE(std::isnan(got[i])) << i;
  };
  ops::embedding(out, tokens, t, stream);
  expect_rows(0);
  ops::embedding_with_positions(out, tokens, t, place(Values(4 * c, 1.0), {4, c}), stream);
  expect_rows(1);
  ops::embedding_backward(d_table, place(dy, {1, 4, c}), tokens, Into::overwrite, stream);
  Values expected(3 * c);
  std::fill(expected.begin() + 2 * c, expected.end(), 1.0);
  EXPECT_EQ(from_device(d_table, stream), expected);
}

TEST_P(DeviceOps, Softmax) {
  for (const auto& [n, c] : {std::array<std::size_t, 2>{1, 1}, {1, 9}, {5, 33}, {3, 2001}, {2, 4200}}) {
    const Values x = random(n * c, 1, 2), dy = random(n * c, 2);
    const Tensor in = place(x, {n, c}, c % 2), d_out = place(dy, {n, c}), out = empty({n, c});
    ops::softmax(out, in, stream);
    const Values expected = reference::softmax(x, c);
    expect_close(out, expected, close, "softmax");
    const Values y = from_device(out, stream);
    Values dx(n * c);
    for (std::size_t i = 0; i < n; ++i) {
      double mean = 0;
      for (std::size_t j = 0; j < c; ++j) mean += dy[i * c + j] * y[i * c + j];
      for (std::size_t j = 0; j < c; ++j) dx[i * c + j] = y[i * c + j] * (dy[i * c + j] - mean);
    }
    if (n * c < 1000 && c > 1 && dtype == DType::f32) {
      const std::size_t columns = c;
      const auto of = [=](const Values& v) { return reference::softmax(v, columns); };
      rz::test::expect_close(tensor_of(dx, {n, c}), numeric_gradient(of, x, dy), close, "the formula");
    }
    if (c > 1)
      expect_gradient(dx, {n, c}, dtype, close, "softmax_backward", [&](const Tensor& d, Into into) {
        ops::softmax_backward(d, d_out, out, into, stream);
      });
    ops::softmax(in, in, stream);  // in place
    expect_close(in, expected, close, "softmax in place");
  }
}

TEST_P(DeviceOps, SoftmaxOfExtremes) {
  const double inf = std::numeric_limits<double>::infinity();
  Values x(5 * 20, 1.0);
  std::fill(x.begin(), x.begin() + 19, -inf);       // one is left
  std::fill(x.begin() + 20, x.begin() + 40, -inf);  // none is
  x[45] = inf, x[65] = NAN, x[85] = -inf;
  const Tensor out = empty({5, 20});
  ops::softmax(out, place(x, {5, 20}), stream);
  const Values got = from_device(out, stream);
  for (std::size_t j = 0; j < 20; ++j) {
    EXPECT_EQ(got[j], j < 19 ? 0 : 1);
    EXPECT_TRUE(std::isnan(got[20 + j]));
    EXPECT_TRUE(std::isnan(got[60 + j]));
    EXPECT_EQ(got[80 + j], j == 5 ? 0 : rounded({static_cast<float>(1.0 / 19)})[0]);
  }
  EXPECT_TRUE(std::isnan(got[45]));
}

TEST_P(DeviceOps, CrossEntropy) {
  for (const auto& [n, v] : {std::array<std::size_t, 2>{1, 1}, {1, 3}, {9, 33}, {33, 40}, {4, 5003}})
    for (const std::size_t shift : {std::size_t{0}, std::size_t{1}}) {
      const Values x = random(n * v, 1, 8);
      std::vector<std::int32_t> ids(n);
      for (std::size_t i = 0; i < n; ++i)
        ids[i] = i == 2 ? -100 : static_cast<std::int32_t>((i * 31 + v - 1) % v);
      const Tensor logits = place(x, {n, v}, shift), targets = to_device(ids, {n}, stream),
                   losses = statistics({n}), log_sum = statistics({n}), loss = statistics({}),
                   sums = empty_on(stream, {2}, DType::f64);
      ops::cross_entropy(loss, sums, losses, log_sum, logits, targets, stream);
      const double sum = from_device(sums, stream)[0], count = from_device(sums, stream)[1];
      const Values expected = reference::cross_entropy(x, ids), got = from_device(losses, stream);
      double total = 0, of_losses = 0;
      for (const double e : expected) total += e;
      for (const double e : got) of_losses += e;
      for (std::size_t i = 0; i < n; ++i)
        EXPECT_NEAR(got[i], expected[i], 1e-6 * (1 + std::abs(expected[i])));
      EXPECT_NEAR(sum, total, 1e-6 * (1 + total));
      // A device sums the losses that it stores, the host before it rounds them to f32.
      EXPECT_NEAR(sum, of_losses, (on_host() ? 0x1p-24 : 1e-14) * of_losses);
      EXPECT_EQ(count, static_cast<double>(n > 2 ? n - 1 : n));
      EXPECT_EQ(from_device(loss, stream)[0], static_cast<float>(sum));

      Values gradient = reference::softmax(x, v);  // minus one at the target
      for (std::size_t i = 0; i < n; ++i)
        for (std::size_t j = 0; j < v; ++j) {
          double& g = gradient[i * v + j];
          g = ids[i] == -100 ? 0 : 0.25 * (g - (static_cast<std::int32_t>(j) == ids[i]));
        }
      const Tensor d = place(Values(n * v, NAN), {n, v}, shift),
                   d_loss = to_device({0.25}, {}, DType::f32, stream);
      ops::cross_entropy_backward(d, logits, log_sum, targets, d_loss, stream);
      const Values stored = from_device(d, stream);
      for (std::size_t i = 0; i < gradient.size(); ++i)
        ASSERT_NEAR(stored[i], gradient[i], 5e-7 + rounding(dtype) * std::abs(gradient[i]) + smallest(dtype))
            << i;
      ops::cross_entropy_backward(logits, logits, log_sum, targets, d_loss, stream);  // in place
      EXPECT_EQ(from_device(logits, stream), stored);
    }
}

TEST_P(DeviceOps, NothingIsCountedWhereEveryTargetIsIgnored) {
  const Tensor logits = place(random(2 * 5, 1), {2, 5}), targets = to_device({-100, -100}, {2}, stream),
               losses = statistics({2}), log_sum = statistics({2}), loss = statistics({}),
               sums = empty_on(stream, {2}, DType::f64), d_loss = to_device({1}, {}, DType::f32, stream);
  ops::cross_entropy(loss, sums, losses, log_sum, logits, targets, stream);
  EXPECT_EQ(from_device(loss, stream), Values{0});
  EXPECT_EQ(from_device(sums, stream), (Values{0, 0}));
  ops::cross_entropy_backward(logits, logits, log_sum, targets, d_loss, stream);
  EXPECT_EQ(from_device(logits, stream), Values(10, 0.0));
}

TEST_P(DeviceOps, WhatIsWrongInTheLogitsOrTargetsReachesTheLoss) {
  if (on_host()) GTEST_SKIP() << "the host refuses such targets";
  Values x = random_values(4 * 40, 1);
  x[7] = NAN;
  const Tensor logits = place(x, {4, 40}), targets = to_device({1, 2, 40, -1}, {4}, stream),
               losses = statistics({4}), log_sum = statistics({4}), loss = statistics({}),
               sums = empty_on(stream, {2}, DType::f64), d_loss = to_device({1}, {}, DType::f32, stream);
  ops::cross_entropy(loss, sums, losses, log_sum, logits, targets, stream);
  EXPECT_TRUE(std::isnan(from_device(loss, stream)[0]));
  EXPECT_TRUE(std::isnan(from_device(sums, stream)[0]));
  EXPECT_EQ(from_device(sums, stream)[1], 4);
  for (std::size_t i = 0; i < 4; ++i) EXPECT_EQ(std::isnan(from_device(losses, stream)[i]), i != 1) << i;
  ops::cross_entropy_backward(logits, logits, log_sum, targets, d_loss, stream);
  const Values got = from_device(logits, stream);
  for (std::size_t i = 0; i < 4; ++i) EXPECT_EQ(std::isnan(got[i * 40 + 3]), i != 1) << i;
}

TEST_P(DeviceOps, TensorsWithoutElementsAreNoWork) {
  const Tensor none = Tensor::empty({0, 8}, dtype, allocator_on(device)),
               tokens = Tensor::empty({0}, DType::i32, allocator_on(device)),
               statistic = Tensor::empty({0}, DType::f32, allocator_on(device));
  const Tensor w = place(Values(8, 1.0), {8}), table = place(Values(16, 1.0), {2, 8});
  ops::fill(none, 1, stream);
  ops::copy(none, none, stream);
  ops::add(none, none, none, stream);
  ops::gelu_backward(none, none, none, Into::accumulate, stream);
  ops::dropout(none, none, {0.5f, 1, 2}, stream);
  ops::softmax(none, none, stream);
  ops::softmax_backward(none, none, none, Into::overwrite, stream);
  ops::layer_norm(none, statistic, statistic, none, w, w, 1e-5f, stream);
  const Tensor d = place(Values(8, 3.0), {8});
  ops::layer_norm_backward(none, d, {}, none, none, w, statistic, statistic, Into::overwrite,
                           Into::accumulate, stream);
  EXPECT_EQ(from_device(d, stream), Values(8, 3.0));
  ops::layer_norm_backward(none, d, {}, none, none, w, statistic, statistic, Into::overwrite, Into::overwrite,
                           stream);
  EXPECT_EQ(from_device(d, stream), Values(8, 0.0));
  ops::fill(d, 3, stream);
  ops::rms_norm(none, statistic, none, w, 1e-5f, stream);
  ops::rms_norm_backward(none, d, none, none, w, statistic, Into::overwrite, Into::overwrite, stream);
  EXPECT_EQ(from_device(d, stream), Values(8, 0.0));
  ops::embedding(none, tokens, table, stream);
  ops::embedding_backward(table, none, tokens, Into::overwrite, stream);
  EXPECT_EQ(from_device(table, stream), Values(16, 0.0));
  const Tensor loss = statistics({}), sums = empty_on(stream, {2}, DType::f64);
  ops::mean_squared_error(loss, none, none, stream);
  EXPECT_EQ(from_device(loss, stream), Values{0});
  ops::cross_entropy(loss, sums, statistic, statistic, none, tokens, stream);
  EXPECT_EQ(from_device(loss, stream), Values{0});
}

TEST_P(DeviceOps, AGraphOfOperatorsRunsAgain) {
  if (on_host()) GTEST_SKIP() << "graphs are of devices";
  using cuda::check;
  const std::size_t n = 6, c = 40;
  const Tensor x = place(random(n * c, 1), {n, c}), w = place(random(c, 2), {c}), out = empty({n, c}),
               mean = statistics({n}), inverse = statistics({n}), y = empty_on(stream, {n, c}),
               tokens = to_device({0, 1, 2, 1, 1, 0}, {n}, stream), table = empty({3, c});
  const auto run = [&] {
    ops::layer_norm(out, mean, inverse, x, w, w, 1e-5f, stream);
    ops::gelu(out, out, stream);
    ops::embedding_backward(table, out, tokens, Into::overwrite, stream);
    ops::copy(y, out, stream);
  };
  run();
  const Values expected = from_device(table, stream), copied = from_device(y, stream);
  void *graph = nullptr, *executable = nullptr;
  const cuda::Runtime& runtime = cuda::runtime();
  check(runtime.begin_capture(stream.native()), "begin_capture", device);
  run();
  check(runtime.end_capture(stream.native(), &graph), "end_capture", device);
  check(runtime.instantiate(&executable, graph), "instantiate", device);
  for (int i = 0; i < 2; ++i) {
    ops::fill(out, NAN, stream), ops::fill(table, NAN, stream), ops::fill(y, NAN, stream);
    check(runtime.launch_graph(executable, stream.native()), "launch_graph", device);
    EXPECT_EQ(from_device(table, stream), expected);
    EXPECT_EQ(from_device(y, stream), copied);
  }
  check(runtime.destroy_executable(executable), "destroy_executable", device);
  check(runtime.destroy_graph(graph), "destroy_graph", device);
}

/// In f32, whatever the type of the others. Sums are in double, results are rounded once or twice.
TEST_P(DeviceOps, NormsOfMatrices) {
  for (const auto& [n, r] : {std::array<std::size_t, 2>{1, 1}, {7, 1}, {40, 3}, {1203, 4}}) {
    const Values x = random_values(n * r, 1, 2);
    const Tensor in = place(x, {n, r}, DType::f32, n % 2), out = empty_on(stream, {n, r});
    const Values at = from_device(in, stream);
    double squares = 0;
    for (const double v : at) squares += v * v;
    Values expected;
    for (const double v : at) expected.push_back(v / (std::sqrt(squares) + 0.25));
    ops::normalize(out, in, 0.25f, stream);
    expect_close(out, expected, 4e-7, "normalize");
    Values q = at;  // modified Gram-Schmidt
    for (std::size_t k = 0; k < r; ++k) {
      const auto dot = [&](std::size_t a, std::size_t b) {
        double sum = 0;
        for (std::size_t i = 0; i < n; ++i) sum += q[i * r + a] * q[i * r + b];
        return sum;
      };
      for (std::size_t b = 0; b < k; ++b) {
        const double part = dot(b, k);
        for (std::size_t i = 0; i < n; ++i) q[i * r + k] -= part * q[i * r + b];
      }
      const double length = std::sqrt(dot(k, k)) + 1e-8;
      for (std::size_t i = 0; i < n; ++i) q[i * r + k] /= length;
    }
    ops::orthogonalize_columns(in, 1e-8f, stream);
    expect_close(in, q, 2e-6, "orthogonalize_columns");
  }
  const Tensor same = place({3, 6, 4, 8}, {2, 2}, DType::f32);  // the second column is twice the first
  ops::orthogonalize_columns(same, 1e-3f, stream);
  const Values got = from_device(same, stream);
  EXPECT_NEAR(got[0], 3 / 5.001, 1e-6);
  EXPECT_LT(std::abs(got[1]), 0.9) << "small, not random";
  if (dtype != DType::f32) {
    const Tensor a = empty({2, 2});
    EXPECT_THROW(ops::normalize(a, a, 0, stream), Error);
    EXPECT_THROW(ops::orthogonalize_columns(a, 0, stream), Error);
  }
}

TEST_P(DeviceOps, TypesThatDoNotFitAreRefused) {
  const std::size_t n = 1 << 15;  // several threads on the host
  const Tensor a = empty({n}), other = empty_on(stream, {n}, dtype == DType::f32 ? DType::f16 : DType::f32);
  EXPECT_THROW(ops::add(a, a, other, stream), Error);
  EXPECT_THROW(ops::gelu(a, other, stream), Error);
  EXPECT_THROW(ops::unary_backward(a, a, other, ops::Unary::relu, Into::overwrite, stream), Error);
  EXPECT_THROW(ops::dropout(a, other, {.p = 0.5f}, stream), Error);
  EXPECT_THROW(ops::softmax(a, other, stream), Error);
  EXPECT_THROW(ops::softmax_backward(a, a, other, Into::overwrite, stream), Error);
  const Tensor x = a.reshape({n / 8, 8}), w = empty({8}), foreign = other.view(0, {8}),
               mean = statistics({n / 8}),
               ids = to_device(std::vector<std::int32_t>(n / 8, 0), {n / 8}, stream);
  EXPECT_THROW(ops::layer_norm(x, mean, mean, x, w, foreign, 1e-5f, stream), Error);
  EXPECT_THROW(ops::add_layer_norm(x, x, mean, mean, x, other.reshape({n / 8, 8}), w, w, 1e-5f, stream),
               Error);
  EXPECT_THROW(ops::layer_norm_backward(x, {}, {}, x, x, foreign, mean, mean, Into::overwrite,
                                        Into::overwrite, stream),
               Error);
  EXPECT_THROW(ops::rms_norm(x, mean, x, foreign, 1e-5f, stream), Error);
  EXPECT_THROW(ops::add_rms_norm(x, x, mean, other.reshape({n / 8, 8}), x, w, 1e-5f, stream), Error);
  EXPECT_THROW(ops::rms_norm_backward(x, {}, x, x, foreign, mean, Into::overwrite, Into::overwrite, stream),
               Error);
  EXPECT_THROW(ops::embedding(x, ids, other.view(0, {2, 8}), stream), Error);
  if (on_host()) {
    const std::string text = error_of([&] { ops::add(a, a, other, stream); }).what();
    EXPECT_NE(text.find(concat("add: b is ", name(other.dtype()), ", and must be ", name(dtype))),
              std::string::npos)
        << text;
  }
  if (!on_host()) {
    EXPECT_THROW(ops::add(a, a, a, {}), Error);  // a stream of the host
  }
}

}  // namespace
}  // namespace rz::test
