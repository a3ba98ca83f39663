// Runs: ci

// Every operator against its reference in double, and its backward against finite differences of that
// reference, on one and on three threads, storing and adding, at sizes that no vector or tile divides.

#include "tensor/ops.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>

#include "comm/core/math.h"
#include "tensor/attention_ops.h"
#include "tests/support/reference.h"

namespace rz::test {
namespace {

using ops::Into;
using ops::WeightLayout;

constexpr double close = 2e-6;  // relative to the largest element: f32 and short sums

class Ops : public testing::TestWithParam<int> {
 protected:
  const Stream stream = Stream::host(GetParam());
};
INSTANTIATE_TEST_SUITE_P(Threads, Ops, testing::Values(1, 3));

/// Calls f twice, with a gradient to overwrite and one to accumulate into, and compares both.
void expect_gradient(const Values& expected, Shape shape, double tolerance, const char* what,
                     const std::function<void(const Tensor&, Into)>& f) {
  const Values before = random_values(expected.size(), 99);
  const Tensor stored = tensor_of(Values(expected.size(), NAN), shape), added = tensor_of(before, shape);
  f(stored, Into::overwrite);
  f(added, Into::accumulate);
  expect_close(stored, expected, tolerance, what);
  Values sum = before;
  for (std::size_t i = 0; i < sum.size(); ++i) sum[i] += expected[i];
  expect_close(added, sum, tolerance, what);
}

/// Operators of the list as functions of these types.
template <ops::Unary op>
void forward(const Tensor& out, const Tensor& in, const Stream& stream) {
  ops::unary(out, in, op, stream);
}
template <ops::Unary op>
void backward(const Tensor& d_in, const Tensor& d_out, const Tensor& saved, Into into, const Stream& stream) {
  ops::unary_backward(d_in, d_out, saved, op, into, stream);
}

TEST_P(Ops, ArithmeticIsExact) {
  for (const std::size_t n : {std::size_t{1}, std::size_t{7}, std::size_t{20011}}) {
    Values a(n), b(n);
    for (std::size_t i = 0; i < n; ++i)
      a[i] = static_cast<double>(i % 100), b[i] = static_cast<double>(i % 7) - 3;
    const Tensor x = tensor_of(a, {n}), y = tensor_of(b, {n}), out = Tensor::empty({n});
    const auto expect = [&](auto f) {
      for (std::size_t i = 0; i < n; ++i) ASSERT_EQ(out.data<float>()[i], f(a[i], b[i])) << i;
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
    ops::fill(out, -2, stream);
    expect([](double, double) { return -2; });
    double squares = 0;
    for (std::size_t i = 0; i < n; ++i) squares += (a[i] - b[i]) * (a[i] - b[i]);
    const Tensor loss = Tensor::empty({});
    ops::mean_squared_error(loss, x, y, stream);
    EXPECT_EQ(*loss.data<float>(), static_cast<float>(squares / static_cast<double>(n ? n : 1)));
    const Tensor d_loss = tensor_of({0.5}, {}), d = Tensor::empty({n});
    ops::mean_squared_error_backward(d, d_loss, x, y, Into::overwrite, stream);
    ops::mean_squared_error_backward(d, d_loss, x, y, Into::accumulate, stream);
    for (std::size_t i = 0; i < n; ++i)
      EXPECT_FLOAT_EQ(d.data<float>()[i], static_cast<float>(2 * (a[i] - b[i]) / static_cast<double>(n)));
  }
}

/// Rounding to 16 bits changes no NaN to a number, whatever its bits: 0x7fffffff is a device's NaN.
TEST_P(Ops, EveryNaNStaysOneIn16Bits) {
  const std::vector<std::uint32_t> bits = {0x7fffffff, 0xffffffff, 0x7f800001, 0x7f80ffff, 0x7fc00000};
  Tensor in = Tensor::empty({40});
  for (std::size_t i = 0; i < 40; ++i) std::memcpy(in.data<float>() + i, &bits[i % bits.size()], 4);
  const Tensor brain = Tensor::empty({40}, DType::bf16), half = Tensor::empty({40}, DType::f16);
  ops::copy(brain, in, stream);
  ops::copy(half, in, stream);
  for (std::size_t i = 0; i < 40; ++i) {
    EXPECT_TRUE(std::isnan(to_f32(brain.data<bf16>()[i]))) << std::hex << bits[i % bits.size()];
    EXPECT_TRUE(std::isnan(to_f32(half.data<f16>()[i]))) << std::hex << bits[i % bits.size()];
  }
}

TEST_P(Ops, Activations) {
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
    for (const std::size_t n : {1, 13, 4099}) {
      const Values x = random_values(n, 3, 5), dy = random_values(n, 4);
      const Tensor in = tensor_of(x, {n}), d_out = tensor_of(dy, {n}), out = Tensor::empty({n});
      c.forward(out, in, stream);
      expect_close(out, c.expected(x), 2e-7, c.name);
      Values gradient(n);
      for (std::size_t i = 0; i < n; ++i)
        gradient[i] = numeric_gradient([&](const Values& v) { return c.expected(v); }, {x[i]}, {dy[i]})[0];
      expect_gradient(gradient, {n}, 1e-6, c.name, [&](const Tensor& d_in, Into into) {
        c.backward(d_in, d_out, c.of_output ? out : in, into, stream);
      });
    }
}

TEST_P(Ops, ActivationsOfExtremes) {
  const double inf = std::numeric_limits<float>::infinity();
  const Tensor in = tensor_of({-inf, -1e30, -100, -30, 0, 100, 1e30, inf, NAN}, {9}),
               out = Tensor::empty({9});
  ops::unary(out, in, ops::Unary::tanh, stream);
  for (int i = 0; i < 8; ++i) EXPECT_FLOAT_EQ(out.data<float>()[i], i < 4 ? -1.f : i == 4 ? 0.f : 1.f) << i;
  EXPECT_TRUE(std::isnan(out.data<float>()[8]));
  ops::gelu(out, in, stream);
  for (int i = 1; i < 5; ++i) EXPECT_NEAR(out.data<float>()[i], 0, 1e-7) << i;
  EXPECT_EQ(out.data<float>()[5], 100);
  ops::gelu_backward(out, tensor_of(Values(9, 1.0), {9}), in, Into::overwrite, stream);
  for (int i = 1; i < 7; ++i) EXPECT_NEAR(out.data<float>()[i], i < 4 ? 0 : i == 4 ? 0.5 : 1, 1e-7) << i;
  for (const int i : {0, 7, 8}) EXPECT_TRUE(std::isnan(out.data<float>()[i])) << i << ": as in PyTorch";
  ops::gelu(out, in, stream);
  EXPECT_TRUE(std::isnan(out.data<float>()[8]));
  ops::unary(out, in, ops::Unary::relu, stream);
  EXPECT_TRUE(std::isnan(out.data<float>()[8]));
}

TEST_P(Ops, TanhIsAccurateToTheLastBits) {
  for (const double range : {1e-6, 1e-2, 0.3, 1.0, 9.0}) {
    const Values x = random_values(4001, 8, range);
    const Tensor out = Tensor::empty({x.size()});
    ops::unary(out, tensor_of(x, {x.size()}), ops::Unary::tanh, stream);
    for (std::size_t i = 0; i < x.size(); ++i)
      ASSERT_NEAR(out.data<float>()[i] / std::tanh(x[i]), 1, 4e-7) << x[i];
  }
}

/// As the part of a layer that one of several ranks has: an empty sum is 0, or the bias.
TEST_P(Ops, LinearWithoutInputsOrOutputs) {
  for (const DType t : {DType::f32, DType::bf16})
    for (const std::size_t n : {2, 40})
      for (const WeightLayout layout : {WeightLayout::in_out, WeightLayout::out_in}) {
        const bool in_out = layout == WeightLayout::in_out;
        const auto filled = [&](const Shape& shape, float value) {
          const Tensor made = Tensor::empty(shape, t);
          ops::fill(made, value, stream);
          return made;
        };
        const auto expect_all = [&](const Tensor& found, float value, const char* what) {
          const Tensor wide = Tensor::empty(found.shape());
          ops::copy(wide, found, stream);
          for (std::size_t i = 0; i < wide.count(); ++i) EXPECT_EQ(wide.data<float>()[i], value) << what;
        };
        const Tensor none = filled({1, n, 0}, 0), weight = filled(in_out ? Shape{0, 5} : Shape{5, 0}, 0),
                     out = filled({1, n, 5}, NAN);
        ops::linear(out, none, weight, {}, layout, stream);
        expect_all(out, 0, "no inputs");
        ops::linear(out, none, weight, filled({5}, 0.75f), layout, stream);
        expect_all(out, 0.75f, "no inputs, and a bias");
        ops::linear_backward(none, weight, {}, out, none, weight, layout, Into::overwrite, Into::overwrite,
                             stream);

        const Tensor x = filled({1, n, 5}, 1), narrow = filled(in_out ? Shape{5, 0} : Shape{0, 5}, 0),
                     bias = filled({0}, 0), d_x = filled({1, n, 5}, 2);
        ops::linear(none, x, narrow, bias, layout, stream);
        ops::linear_gelu(none, none, x, narrow, bias, layout, stream);
        ops::linear_backward(d_x, narrow, bias, none, x, narrow, layout, Into::accumulate, Into::accumulate,
                             stream);
        expect_all(d_x, 2, "no outputs, added");
        ops::linear_backward(d_x, narrow, bias, none, x, narrow, layout, Into::overwrite, Into::overwrite,
                             stream);
        expect_all(d_x, 0, "no outputs");
      }
}

TEST_P(Ops, Linear) {
  for (const auto& [n, in, out_size] :
       {std::array<std::size_t, 3>{1, 1, 1}, {1, 5, 3}, {7, 9, 20}, {33, 17, 70}})
    for (const WeightLayout layout : {WeightLayout::in_out, WeightLayout::out_in})
      for (const bool with_bias : {false, true}) {
        const bool in_out = layout == WeightLayout::in_out;
        const Values x = random_values(n * in, 1), w = random_values(in * out_size, 2),
                     b = with_bias ? random_values(out_size, 3) : Values{},
                     dy = random_values(n * out_size, 4);
        const Shape shape = in_out ? Shape{in, out_size} : Shape{out_size, in};
        const Tensor weight = tensor_of(in_out ? w : reference::transpose(w, in, out_size), shape);
        const Tensor bias = with_bias ? tensor_of(b, {out_size}) : Tensor();
        const Tensor xt = tensor_of(x, {n, in}), out = tensor_of(Values(n * out_size, NAN), {n, out_size}),
                     d_out = tensor_of(dy, {n, out_size});
        ops::linear(out, xt, weight, bias, layout, stream);
        expect_close(out, reference::linear(x, w, b, n, in, out_size), close, "linear");

        const Values dw = reference::matmul(reference::transpose(x, n, in), dy, in, out_size, n);
        const Values dx = reference::matmul(dy, reference::transpose(w, in, out_size), n, in, out_size);
        if (dw.size() < 200) {
          const std::size_t rows = n, ins = in, outs = out_size;
          const auto of_w = [&](const Values& v) { return reference::linear(x, v, {}, rows, ins, outs); };
          const auto of_x = [&](const Values& v) { return reference::linear(v, w, {}, rows, ins, outs); };
          expect_close(tensor_of(dw, {in, out_size}), numeric_gradient(of_w, w, dy), 1e-7, "d_weight");
          expect_close(tensor_of(dx, {n, in}), numeric_gradient(of_x, x, dy), 1e-7, "d_x");
        }
        const Values db = reference::matmul(Values(n, 1.0), dy, 1, out_size, n);
        expect_gradient(in_out ? dw : reference::transpose(dw, in, out_size), shape, close, "d_weight",
                        [&](const Tensor& d, Into into) {
                          ops::linear_backward({}, d, {}, d_out, xt, weight, layout, Into::overwrite, into,
                                               stream);
                        });
        expect_gradient(dx, {n, in}, close, "d_x", [&](const Tensor& d, Into into) {
          ops::linear_backward(d, {}, {}, d_out, xt, weight, layout, into, Into::overwrite, stream);
        });
        expect_gradient(db, {out_size}, close, "d_bias", [&](const Tensor& d, Into into) {
          ops::linear_backward({}, {}, d, d_out, xt, weight, layout, Into::overwrite, into, stream);
        });
      }
}

TEST_P(Ops, MatmulTransposesEither) {
  const std::size_t m = 5, n = 37, k = 11;
  const Values a = random_values(m * k, 1), b = random_values(k * n, 2),
               ab = reference::matmul(a, b, m, n, k);
  for (const bool ta : {false, true})
    for (const bool tb : {false, true}) {
      const Tensor at = ta ? tensor_of(reference::transpose(a, m, k), {k, m}) : tensor_of(a, {m, k});
      const Tensor bt = tb ? tensor_of(reference::transpose(b, k, n), {n, k}) : tensor_of(b, {k, n});
      expect_gradient(ab, {m, n}, close, "matmul",
                      [&](const Tensor& out, Into into) { ops::matmul(out, at, ta, bt, tb, into, stream); });
    }
}

TEST_P(Ops, LayerNorm) {
  const double epsilon = 1e-5f;
  for (const auto& [n, c] : {std::array<std::size_t, 2>{1, 1}, {1, 5}, {3, 8}, {9, 67}, {5, 130}}) {
    Values x = random_values(n * c, 1, 2), w = random_values(c, 2), b = random_values(c, 3),
           dy = random_values(n * c, 4);
    for (double& v : x) v = static_cast<float>(v + 3);  // a mean that is not near 0
    const Tensor xt = tensor_of(x, {n, c}), wt = tensor_of(w, {c}), bt = tensor_of(b, {c}),
                 d_out = tensor_of(dy, {n, c}), out = Tensor::empty({n, c}), mean = Tensor::empty({n}),
                 inverse = Tensor::empty({n}), sum = Tensor::empty({n, c});
    ops::layer_norm(out, mean, inverse, xt, wt, bt, 1e-5f, stream);
    expect_close(out, reference::layer_norm(x, w, b, epsilon), close, "layer_norm");

    Values half = x;
    for (double& v : half) v /= 2;
    ops::fill(out, 0, stream);
    ops::add_layer_norm(sum, out, mean, inverse, tensor_of(half, {n, c}), tensor_of(half, {n, c}), wt, bt,
                        1e-5f, stream);
    EXPECT_EQ(values_of(sum), x);
    expect_close(out, reference::layer_norm(x, w, b, epsilon), close, "add_layer_norm");
    if (c == 1) continue;  // no variance: the gradient is 0 / 0

    const auto of = [&](const Values& v) { return reference::layer_norm(v, w, b, epsilon); };
    expect_gradient(numeric_gradient(of, x, dy), {n, c}, close, "d_x", [&](const Tensor& d, Into into) {
      ops::layer_norm_backward(d, {}, {}, d_out, xt, wt, mean, inverse, into, Into::overwrite, stream);
    });
    const Tensor scratch = Tensor::empty({n, c});
    const auto of_weight = [&](const Values& v) { return reference::layer_norm(x, v, b, epsilon); };
    expect_gradient(numeric_gradient(of_weight, w, dy), {c}, close, "d_weight",
                    [&](const Tensor& d, Into into) {
                      ops::layer_norm_backward(scratch, d, {}, d_out, xt, wt, mean, inverse, Into::overwrite,
                                               into, stream);
                    });
    expect_gradient(reference::matmul(Values(n, 1.0), dy, 1, c, n), {c}, close, "d_bias",
                    [&](const Tensor& d, Into into) {
                      ops::layer_norm_backward(scratch, {}, d, d_out, xt, wt, mean, inverse, Into::overwrite,
                                               into, stream);
                    });
  }
}

TEST_P(Ops, RmsNorm) {
  const float epsilon = 1e-3f;  // large enough that leaving it out is seen
  for (const auto& [n, c] : {std::array<std::size_t, 2>{1, 1}, {1, 5}, {3, 8}, {9, 67}, {5, 130}}) {
    const Values x = random_values(n * c, 1, 0.5), w = random_values(c, 2), dy = random_values(n * c, 4);
    const Tensor xt = tensor_of(x, {n, c}), wt = tensor_of(w, {c}), d_out = tensor_of(dy, {n, c}),
                 out = Tensor::empty({n, c}), inverse = Tensor::empty({n}), sum = Tensor::empty({n, c});
    const auto of = [&](const Values& v) { return reference::rms_norm(v, w, double{epsilon}); };
    ops::rms_norm(out, inverse, xt, wt, epsilon, stream);
    expect_close(out, of(x), close, "rms_norm");

    Values half = x;
    for (double& v : half) v /= 2;
    ops::fill(out, 0, stream), ops::fill(inverse, 0, stream);
    ops::add_rms_norm(sum, out, inverse, tensor_of(half, {n, c}), tensor_of(half, {n, c}), wt, epsilon,
                      stream);
    EXPECT_EQ(values_of(sum), x);
    expect_close(out, of(x), close, "add_rms_norm");

    if (c > 1)  // of one element only the part by epsilon is left, below the rounding of the terms
      expect_gradient(numeric_gradient(of, x, dy), {n, c}, close, "d_x", [&](const Tensor& d, Into into) {
        ops::rms_norm_backward(d, {}, d_out, xt, wt, inverse, into, Into::overwrite, stream);
      });
    const Tensor scratch = Tensor::empty({n, c});
    const auto of_weight = [&](const Values& v) { return reference::rms_norm(x, v, double{epsilon}); };
    expect_gradient(
        numeric_gradient(of_weight, w, dy), {c}, close, "d_weight", [&](const Tensor& d, Into into) {
          ops::rms_norm_backward(scratch, d, d_out, xt, wt, inverse, Into::overwrite, into, stream);
        });
  }
}

/// The factor of a probability: 0 or 1/(1 - p).
Values dropout_factors(std::size_t n, const ops::DropoutMask& mask, const Stream& stream) {
  const Tensor factors = tensor_of(Values(n, 1.0), {n});
  ops::dropout(factors, factors, mask, stream);
  return values_of(factors);
}

/// Of the thirds of qkv; others of its options in tests/operators/attention_test.cpp.
void causal_attention(const Tensor& out, const Tensor& log_sum, const Tensor& qkv, int heads,
                      const ops::DropoutMask& mask, const Stream& stream) {
  const std::size_t c = out.shape()[-1];
  ops::attention(out, log_sum, qkv.columns(0, c), qkv.columns(c, c), qkv.columns(2 * c, c),
                 {.heads = heads, .causal = true}, mask, stream);
}

void expect_attention(const ops::DropoutMask& mask, const Stream& stream) {
  // batch, tokens, channels, heads: one token, one head, two tiles, a tile and one row, heads of more than a
  // tile
  for (const auto& [b, t, c, h] : {std::array<std::size_t, 4>{1, 1, 3, 1},
                                   {2, 5, 6, 2},
                                   {3, 17, 12, 4},
                                   {1, 64, 8, 2},
                                   {1, 65, 6, 2},
                                   {2, 131, 4, 1},
                                   {1, 6, 140, 2},
                                   {1, 3, 70, 1}}) {
    const Values x = random_values(b * t * 3 * c, 1, 2), dy = random_values(b * t * c, 2);
    const Tensor qkv = tensor_of(x, {b, t, 3 * c}), d_out = tensor_of(dy, {b, t, c}),
                 out = tensor_of(Values(b * t * c, NAN), {b, t, c}), log_sum = Tensor::empty({b, h, t}),
                 d_qkv = tensor_of(Values(x.size(), NAN), {b, t, 3 * c});
    const auto heads = static_cast<int>(h);
    causal_attention(out, log_sum, qkv, heads, mask, stream);
    const std::size_t bb = b, tt = t, cc = c, hh = h;
    const Values factors = dropout_factors(b * h * t * t, mask, stream);
    const auto of = [=](const Values& v) { return reference::causal_attention(v, bb, tt, cc, hh, factors); };
    expect_close(out, of(x), close, "attention");
    ops::attention_backward(d_qkv.columns(0, c), d_qkv.columns(c, c), d_qkv.columns(2 * c, c), d_out, out,
                            log_sum, qkv.columns(0, c), qkv.columns(c, c), qkv.columns(2 * c, c),
                            {.heads = heads, .causal = true}, mask, stream);
    if (t > 17) {  // a few directions, since all differences would take long
      for (const unsigned seed : {5u, 6u, 7u}) {
        const Values direction = random_values(x.size(), seed);
        const auto along = [&](const Values& step) {
          Values v = x;
          for (std::size_t i = 0; i < v.size(); ++i) v[i] += step[0] * direction[i];
          return of(v);
        };
        double got = 0;
        for (std::size_t i = 0; i < x.size(); ++i) got += d_qkv.data<float>()[i] * direction[i];
        EXPECT_NEAR(got, numeric_gradient(along, {0.0}, dy)[0], 1e-4);
      }
    } else {
      expect_close(d_qkv, numeric_gradient(of, x, dy), 5e-6, "d_qkv");
    }
  }
}

TEST_P(Ops, CausalAttention) { expect_attention({}, stream); }

TEST_P(Ops, CausalAttentionWithDropout) { expect_attention({0.25f, 5, (1ull << 34) - 3}, stream); }

TEST_P(Ops, AttentionOfLargeScoresStaysFinite) {
  const std::size_t t = 70, c = 4;
  Values x = random_values(t * 3 * c, 1, 100);
  const Tensor qkv = tensor_of(x, {1, t, 3 * c}), out = Tensor::empty({1, t, c}),
               log_sum = Tensor::empty({1, 1, t});
  causal_attention(out, log_sum, qkv, 1, {}, stream);
  expect_close(out, reference::causal_attention(x, 1, t, c, 1), 1e-3, "attention");
}

TEST_P(Ops, Embedding) {
  const std::size_t vocabulary = 11, c = 19, batch = 2, length = 3;
  const Values table = random_values(vocabulary * c, 1), positions = random_values(5 * c, 2),
               dy = random_values(batch * length * c, 3);
  const std::vector<std::int32_t> ids{4, 10, 4, 0, 4, 7};
  const Tensor tokens = tokens_of(ids, {batch, length}), t = tensor_of(table, {vocabulary, c}),
               p = tensor_of(positions, {5, c}), out = Tensor::empty({batch, length, c}),
               d_out = tensor_of(dy, {batch, length, c});
  Values rows, both, d_table(vocabulary * c), d_positions(5 * c);
  for (std::size_t i = 0; i < ids.size(); ++i)
    for (std::size_t j = 0; j < c; ++j) {
      const std::size_t at = static_cast<std::size_t>(ids[i]) * c + j, place = i % length * c + j;
      rows.push_back(table[at]);
      both.push_back(static_cast<float>(table[at] + positions[place]));
      d_table[at] += dy[i * c + j];
      d_positions[place] += dy[i * c + j];
    }
  ops::embedding(out, tokens, t, stream);
  EXPECT_EQ(values_of(out), rows);
  ops::embedding_with_positions(out, tokens, t, p, stream);
  EXPECT_EQ(values_of(out), both);
  expect_gradient(d_table, {vocabulary, c}, 2e-7, "d_table", [&](const Tensor& d, Into into) {
    ops::embedding_backward(d, d_out, tokens, into, stream);
  });
  expect_gradient(d_positions, {5, c}, 2e-7, "d_positions",
                  [&](const Tensor& d, Into into) { ops::positions_backward(d, d_out, into, stream); });
}

TEST_P(Ops, Softmax) {
  for (const auto& [n, c] : {std::array<std::size_t, 2>{1, 1}, {1, 9}, {5, 33}, {3, 2001}}) {
    const Values x = random_values(n * c, 1, 2), dy = random_values(n * c, 2);
    const Tensor in = tensor_of(x, {n, c}), d_out = tensor_of(dy, {n, c}), out = Tensor::empty({n, c});
    ops::softmax(out, in, stream);
    const std::size_t columns = c;
    const auto of = [=](const Values& v) { return reference::softmax(v, columns); };
    expect_close(out, of(x), close, "softmax");
    if (n * c < 1000 && c > 1)
      expect_gradient(
          numeric_gradient(of, x, dy), {n, c}, close, "softmax_backward",
          [&](const Tensor& d, Into into) { ops::softmax_backward(d, d_out, out, into, stream); });
  }
}

TEST_P(Ops, CrossEntropy) {
  for (const auto& [n, v] : {std::array<std::size_t, 2>{1, 1}, {1, 3}, {9, 33}, {5, 5003}}) {
    const Values x = random_values(n * v, 1, 8);
    std::vector<std::int32_t> ids(n);
    for (std::size_t i = 0; i < n; ++i)
      ids[i] = i == 2 ? -100 : static_cast<std::int32_t>((i * 31 + v - 1) % v);
    const Tensor logits = tensor_of(x, {n, v}), targets = tokens_of(ids, {n}), losses = Tensor::empty({n}),
                 log_sum = Tensor::empty({n});
    const Tensor loss = Tensor::empty({}), sums = Tensor::empty({2}, DType::f64);
    ops::cross_entropy(loss, sums, losses, log_sum, logits, targets, stream);
    const double sum = sums.data<double>()[0], count = sums.data<double>()[1];
    const Values expected = reference::cross_entropy(x, ids);
    double total = 0;
    for (const double e : expected) total += e;
    for (std::size_t i = 0; i < n; ++i) EXPECT_NEAR(losses.data<float>()[i], expected[i], 1e-6);
    EXPECT_NEAR(sum, total, 1e-6 * (1 + total));
    EXPECT_EQ(count, static_cast<double>(n > 2 ? n - 1 : n));
    EXPECT_EQ(*loss.data<float>(), static_cast<float>(sum));

    Values gradient = reference::softmax(x, v);  // minus one at the target; finite differences where small
    for (std::size_t i = 0; i < n; ++i)
      for (std::size_t j = 0; j < v; ++j) {
        double& g = gradient[i * v + j];
        g = ids[i] == -100 ? 0 : 0.25 * (g - (static_cast<std::int32_t>(j) == ids[i]));
      }
    if (n * v < 1000) {
      const auto of = [&](const Values& at) { return reference::cross_entropy(at, ids); };
      const Values differences = numeric_gradient(of, x, Values(n, 0.25));
      for (std::size_t i = 0; i < gradient.size(); ++i) ASSERT_NEAR(gradient[i], differences[i], 1e-8);
    }
    const Tensor d = Tensor::empty({n, v}), d_loss = tensor_of({0.25}, {});
    ops::cross_entropy_backward(d, logits, log_sum, targets, d_loss, stream);
    for (std::size_t i = 0; i < gradient.size(); ++i) ASSERT_NEAR(d.data<float>()[i], gradient[i], 1e-6);
    ops::cross_entropy_backward(logits, logits, log_sum, targets, d_loss, stream);  // in place
    EXPECT_EQ(values_of(logits), values_of(d));
  }
}

TEST_P(Ops, ANaNInTheLogitsReachesTheLoss) {
  Values x = random_values(2 * 40, 1);
  x[7] = NAN;
  const Tensor losses = Tensor::empty({2}), log_sum = Tensor::empty({2});
  const Tensor loss = Tensor::empty({}), sums = Tensor::empty({2}, DType::f64);
  ops::cross_entropy(loss, sums, losses, log_sum, tensor_of(x, {2, 40}), tokens_of({1, 2}, {2}), stream);
  EXPECT_TRUE(std::isnan(sums.data<double>()[0]));
  EXPECT_TRUE(std::isnan(*loss.data<float>()));
  EXPECT_TRUE(std::isnan(losses.data<float>()[0]));
  EXPECT_FALSE(std::isnan(losses.data<float>()[1]));
}

/// Philox4x32-10 as its paper states it.
std::uint32_t philox(std::uint64_t index, std::uint64_t seed) {
  std::uint32_t c[4] = {static_cast<std::uint32_t>(index / 4), static_cast<std::uint32_t>(index / 4 >> 32), 0,
                        0};
  std::uint32_t k[2] = {static_cast<std::uint32_t>(seed), static_cast<std::uint32_t>(seed >> 32)};
  for (int i = 0; i < 10; ++i, k[0] += 0x9E3779B9, k[1] += 0xBB67AE85) {
    const std::uint64_t p = 0xD2511F53ull * c[0], q = 0xCD9E8D57ull * c[2];
    const std::uint32_t next[4] = {
        static_cast<std::uint32_t>(q >> 32) ^ c[1] ^ k[0], static_cast<std::uint32_t>(q),
        static_cast<std::uint32_t>(p >> 32) ^ c[3] ^ k[1], static_cast<std::uint32_t>(p)};
    std::copy(next, next + 4, c);
  }
  return c[index % 4];
}

TEST_P(Ops, DropoutDecidesByElementAndSeedAlone) {
  EXPECT_EQ(philox(0, 0), 0x6627e8d5u);  // the known answer of Random123 for counter 0 and key 0
  const std::size_t n = 5003;
  const std::uint64_t seed = 0x123456789abcdefull, offset = (1ull << 34) - 777;
  const Tensor in = tensor_of(Values(n, 3.0), {n}), out = Tensor::empty({n});
  ops::dropout(out, in, {0.25f, seed, offset}, stream);
  for (std::size_t i = 0; i < n; ++i)
    ASSERT_EQ(out.data<float>()[i], philox(offset + i, seed) < 1u << 30 ? 0 : 3.0f * (1 / 0.75f)) << i;
  ops::dropout(out, in, {0, seed, offset}, stream);
  EXPECT_EQ(values_of(out), values_of(in));
}

template <class F>
void expect_refused(const F& f, std::initializer_list<const char*> words) {
  try {
    f();
    FAIL() << "not refused";
  } catch (const Error& e) {
    EXPECT_EQ(e.code(), Errc::invalid_argument);
    for (const char* word : words) EXPECT_NE(std::string(e.what()).find(word), std::string::npos) << e.what();
  }
}

TEST_P(Ops, WrongArgumentsAreNamed) {
  const Tensor a = Tensor::zeros({2, 3}), b = Tensor::zeros({3, 5}), v = Tensor::zeros({4}), none;
  expect_refused([&] { ops::add(a, a, b, stream); }, {"add", "[2, 3]", "[3, 5]"});
  expect_refused([&] { ops::gelu(none, a, stream); }, {"gelu", "out (undefined)"});
  expect_refused([&] { ops::linear(a, a, b, none, WeightLayout::in_out, stream); }, {"linear", "[3, 5]"});
  expect_refused([&] { ops::layer_norm(a, v, v, a, v, v, 1e-5f, stream); }, {"layer_norm", "[4]"});
  expect_refused([&] { ops::rms_norm(a, v, a, v, 1e-5f, stream); }, {"rms_norm", "[2, 3]", "[4]"});
  expect_refused([&] { ops::add_rms_norm(a, a, v, a, b, v, 1e-5f, stream); }, {"add_rms_norm", "[3, 5]"});
  expect_refused([&] { ops::rms_norm_backward(a, v, a, a, v, v, Into::overwrite, Into::overwrite, stream); },
                 {"rms_norm_backward", "[4]"});
  expect_refused([&] { ops::attention(a, a, a, a, a, {.heads = 2}, {}, stream); },
                 {"attention with 2 heads and 2 key heads", "[2, 3]"});
  expect_refused([&] { ops::matmul(a, a, false, a, false, Into::overwrite, stream); }, {"matmul"});
  expect_refused([&] { ops::dropout(a, a, {1, 0, 0}, stream); }, {"dropout", "p = 1"});
  const Tensor out = Tensor::zeros({2, 5});
  expect_refused(
      [&] {
        ops::embedding(out, tokens_of({1, 3}, {2}), b, stream);
      },
      {"embedding", "tokens[1] = 3", "[0, 3)"});
  expect_refused([&] { ops::embedding(out, tokens_of({-1, 0}, {2}), b, stream); }, {"tokens[0] = -1"});
  expect_refused([&] { ops::embedding(out, a, b, stream); }, {"embedding", "2 i32", "[2, 3]"});
  const Tensor l = Tensor::zeros({2}), one = Tensor::zeros({}), sums = Tensor::zeros({2}, DType::f64);
  expect_refused(
      [&] {
        ops::cross_entropy(one, sums, l, l, a, tokens_of({-100, 3}, {2}), stream);
      },
      {"cross_entropy", "targets[1] = 3"});
  const Tensor whole = Tensor::zeros({2, 3}, DType::i32);
  expect_refused([&] { ops::unary(a, whole, ops::Unary::relu, stream); }, {"relu", "i32"});
}

}  // namespace
}  // namespace rz::test
