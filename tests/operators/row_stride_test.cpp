// Runs: ci host operators

// Operators that accept a row stride, against the same call on contiguous tensors: operands with strides of
// their own, in f32, f16 and bf16. What lies between the rows is NaN and stays so.

#include <cmath>
#include <cstring>

#include "autograd_lite/ops.h"
#include "comm/core/integer_math.h"
#include "tensor/ops.h"
#include "tests/gpu/on_device.h"
#include "tests/support/reference.h"

namespace rz::test {
namespace {

using ops::Into;
using ops::WeightLayout;

class RowStrides : public OnDevice, public testing::WithParamInterface<DType> {
 protected:
  const DType dtype = GetParam();

  /// A matrix in the middle of rows of NaN.
  Tensor strided(const Values& values, std::size_t rows, std::size_t columns, std::size_t stride) {
    Values all(rows * stride, NAN);
    for (std::size_t i = 0; i < values.size(); ++i) all[i / columns * stride + 1 + i % columns] = values[i];
    const Tensor whole = to_device(all, {rows, stride}, dtype, stream);
    wholes_.push_back(whole);
    return whole.columns(1, columns);
  }
  Tensor plain(const Values& values, std::size_t rows, std::size_t columns) const {
    return to_device(values, {rows, columns}, dtype, stream);
  }
  /// Nothing was written between rows; `columns` were in every row of the tensors so far.
  void expect_gaps(std::size_t columns) {
    for (const Tensor& whole : std::exchange(wholes_, {})) {
      const Values all = from_device(whole, stream);
      for (std::size_t i = 0; i < all.size(); ++i) {
        const std::size_t j = i % whole.shape()[-1];
        if (j == 0 || j > columns) {
          ASSERT_TRUE(std::isnan(all[i])) << i;
        }
      }
    }
  }
  /// Sums may be in another order where addresses have another alignment.
  void expect_near(const Tensor& got, const Tensor& expected) const {
    const Values a = from_device(got, stream), b = from_device(expected, stream);
    ASSERT_EQ(a.size(), b.size());
    const double u = dtype == DType::bf16 ? 0x1p-7 : dtype == DType::f16 ? 0x1p-10 : 1e-6;
    for (std::size_t i = 0; i < a.size(); ++i) ASSERT_NEAR(a[i], b[i], u * (std::abs(b[i]) + 1e-3)) << i;
  }

 private:
  std::vector<Tensor> wholes_;
};

INSTANTIATE_TEST_SUITE_P(Types, RowStrides, testing::Values(DType::f32, DType::f16, DType::bf16),
                         [](const auto& info) { return std::string(name(info.param)); });

/// -1, 0 and 1: products and sums are exact in every type.
Values units(std::size_t n, unsigned seed) {
  Values values = random_values(n, seed, 1.5);
  for (double& v : values) v = std::round(v);
  return values;
}

TEST_P(RowStrides, ElementWise) {
  constexpr std::size_t r = 5, c = 11;
  const Values a = units(r * c, 1), b = units(r * c, 2);
  const Tensor x = strided(a, r, c, 16), y = strided(b, r, c, 13), flat = plain(b, r, c);
  const Tensor out = strided(units(r * c, 3), r, c, 20), contiguous = empty_on(stream, {r, c}, dtype);
  const auto expect = [&](const Tensor& t, auto f) {
    const Values got = from_device(t, stream);
    for (std::size_t i = 0; i < r * c; ++i) ASSERT_EQ(got[i], f(a[i], b[i])) << i;
  };
  ops::add(out, x, y, stream);
  expect(out, [](double p, double q) { return p + q; });
  ops::binary(contiguous, x, flat, ops::Binary::mul, stream);
  expect(contiguous, [](double p, double q) { return p * q; });
  ops::scale(out, flat, 4, stream);
  expect(out, [](double, double q) { return 4 * q; });
  ops::add_scaled(out, x, 2, stream);
  expect(out, [](double p, double q) { return 4 * q + 2 * p; });
  ops::copy(out, y, stream);
  expect(out, [](double, double q) { return q; });
  ops::copy(contiguous, x, stream);
  expect(contiguous, [](double p, double) { return p; });
  const Tensor wide = empty_on(stream, {r, c});
  ops::copy(wide, y, stream);
  expect(wide, [](double, double q) { return q; });
  ops::fill(out, 3, stream);
  expect(out, [](double, double) { return 3; });
  expect_gaps(c);
}

TEST_P(RowStrides, Products) {
  constexpr std::size_t n = 7, in = 6, out = 9;
  const Values x = units(n * in, 1), b = units(out, 2), w = units(in * out, 3), dy = units(n * out, 4);
  const Tensor bias = to_device(b, {out}, dtype, stream);
  for (const WeightLayout layout : {WeightLayout::in_out, WeightLayout::out_in}) {
    const bool in_out = layout == WeightLayout::in_out;
    const std::size_t rows = in_out ? in : out, columns = in_out ? out : in;
    for (const Tensor& with : {bias, Tensor()}) {
      const Tensor y = strided(dy, n, out, 16), expected = plain(dy, n, out);
      ops::linear(y, strided(x, n, in, 8), strided(w, rows, columns, 11), with, layout, stream);
      ops::linear(expected, plain(x, n, in), plain(w, rows, columns), with, layout, stream);
      EXPECT_EQ(from_device(y, stream), from_device(expected, stream));
      const Values whole = from_device(y, stream);
      EXPECT_EQ(whole.size(), n * out);
    }
    for (const Into into : {Into::overwrite, Into::accumulate}) {
      const Tensor d_x = strided(x, n, in, 10), d_w = strided(w, rows, columns, 12),
                   d_b = to_device(b, {out}, dtype, stream);
      const Tensor to_x = plain(x, n, in), to_w = plain(w, rows, columns),
                   to_b = to_device(b, {out}, dtype, stream);
      ops::linear_backward(d_x, d_w, d_b, strided(dy, n, out, 16), strided(x, n, in, 8),
                           strided(w, rows, columns, 11), layout, into, into, stream);
      ops::linear_backward(to_x, to_w, to_b, plain(dy, n, out), plain(x, n, in), plain(w, rows, columns),
                           layout, into, into, stream);
      EXPECT_EQ(from_device(d_x, stream), from_device(to_x, stream));
      EXPECT_EQ(from_device(d_w, stream), from_device(to_w, stream));
      EXPECT_EQ(from_device(d_b, stream), from_device(to_b, stream));
    }
  }
  const Tensor product = strided(dy, n, out, 16), expected = plain(dy, n, out);
  ops::matmul(product, strided(x, n, in, 9), false, strided(w, in, out, 13), false, Into::accumulate, stream);
  ops::matmul(expected, plain(x, n, in), false, plain(w, in, out), false, Into::accumulate, stream);
  EXPECT_EQ(from_device(product, stream), from_device(expected, stream));
}

TEST_P(RowStrides, SoftmaxAndCrossEntropy) {
  for (const std::size_t c : {std::size_t{5}, std::size_t{37}, std::size_t{1030}}) {
    constexpr std::size_t r = 4;
    const Values x = random_values(r * c, 1, 4), dy = random_values(r * c, 2);
    const Tensor in = strided(x, r, c, c + 3), out = strided(x, r, c, c + 9), same = plain(x, r, c),
                 expected = plain(x, r, c);
    ops::softmax(out, in, stream);
    ops::softmax(expected, same, stream);
    expect_near(out, expected);
    const Tensor d = strided(x, r, c, c + 4), d_expected = plain(x, r, c);
    ops::softmax_backward(d, strided(dy, r, c, c + 2), out, Into::accumulate, stream);
    ops::softmax_backward(d_expected, plain(dy, r, c), expected, Into::accumulate, stream);
    expect_near(d, d_expected);

    const Tensor targets = to_device({1, -100, 0, static_cast<std::int32_t>(c - 1)}, {r}, stream);
    const auto statistics = [&](const Shape& s) { return empty_on(stream, s); };
    const Tensor loss = statistics({}), losses = statistics({r}), log_sum = statistics({r}),
                 sums = empty_on(stream, {2}, DType::f64), d_loss = to_device({0.5}, {}, DType::f32, stream);
    ops::cross_entropy(loss, sums, losses, log_sum, same, targets, stream);
    const double plain_loss = from_device(loss, stream)[0];
    ops::cross_entropy_backward(same, same, log_sum, targets, d_loss, stream);
    ops::cross_entropy(loss, sums, losses, log_sum, in, targets, stream);
    EXPECT_NEAR(from_device(loss, stream)[0], plain_loss, 1e-6 * plain_loss);
    ops::cross_entropy_backward(in, in, log_sum, targets, d_loss, stream);  // in place
    expect_near(in, same);
    expect_gaps(c);
  }
}

TEST_P(RowStrides, LinearAlignedHasTheValuesAndGradientsOfLinear) {
  const auto run = [&](bool aligned) {
    Tape tape(stream);
    const Var x = tape.variable(to_device(random_values(6 * 8, 1), {2, 3, 8}, dtype, stream)),
              w = tape.variable(to_device(random_values(37 * 8, 2), {37, 8}, dtype, stream));
    const Tensor targets = to_device({1, 36, -100, 0, 7, 20}, {2, 3}, stream);
    const Var y = aligned ? nn::linear_aligned(tape, x, w, WeightLayout::out_in)
                          : nn::linear(tape, x, w, Var(), WeightLayout::out_in);
    const Tensor logits = tape.value(y);
    EXPECT_EQ(logits.contiguous(), !aligned || on_host());
    EXPECT_TRUE(logits.contiguous() || logits.row_stride() * size_of(dtype) % 128 == 0);
    const Values values = from_device(logits, stream);
    EXPECT_EQ(from_device(tape.value(nn::contiguous(tape, y)), stream), values);
    const Var loss = nn::cross_entropy(tape, y, targets).sum;
    tape.backward(loss);
    return std::vector<Values>{values, from_device(tape.grad(x), stream), from_device(tape.grad(w), stream)};
  };
  const auto a = run(true), b = run(false);
  for (std::size_t k = 0; k < a.size(); ++k) {
    ASSERT_EQ(a[k].size(), b[k].size());
    const double u = dtype == DType::bf16 ? 0x1p-6 : dtype == DType::f16 ? 0x1p-9 : 1e-5;
    for (std::size_t i = 0; i < a[k].size(); ++i) EXPECT_NEAR(a[k][i], b[k][i], u) << k << " " << i;
  }
}

}  // namespace
}  // namespace rz::test
