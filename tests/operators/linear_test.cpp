// Runs: ci host operators

#include <algorithm>
#include <cmath>

#include "comm/core/math.h"
#include "comm/device/cuda_runtime.h"
#include "tensor/kernels/linear_algebra/blas.h"
#include "tensor/ops.h"
#include "tests/gpu/on_device.h"
#include "tests/support/reference.h"

namespace rz::test {
namespace {

using ops::Into;
using ops::WeightLayout;

using Linear = OnDevice;

constexpr DType types[] = {DType::f32, DType::f16, DType::bf16};

/// -1, 0 and 1: their products and sums are exact in every type, in any order.
Values units(std::size_t n, unsigned seed) {
  Values values = random_values(n, seed, 1.5);
  for (double& v : values) v = std::round(v);
  return values;
}

Values sum(Values a, const Values& b) {
  for (std::size_t i = 0; i < a.size(); ++i) a[i] += b[i];
  return a;
}

Values column_sums(const Values& x, std::size_t columns) {
  Values sums(columns, 0);
  for (std::size_t i = 0; i < x.size(); ++i) sums[i % columns] += x[i];
  return sums;
}

void expect_near(const Values& got, const Values& expected, double tolerance) {
  double max = 1e-30;
  for (const double e : expected) max = std::max(max, std::abs(e));
  ASSERT_EQ(got.size(), expected.size());
  for (std::size_t i = 0; i < got.size(); ++i) ASSERT_NEAR(got[i], expected[i], tolerance * max) << i;
}

/// Half a unit in the last place, and a little for f32's sums.
double tolerance(DType t) { return t == DType::f32 ? 1e-5 : t == DType::f16 ? 1e-3 : 8e-3; }

struct Case {
  std::size_t rows, in, out;
};
constexpr Case cases[] = {{1, 1, 1}, {3, 5, 7}, {16, 64, 48}, {65, 33, 40}, {128, 24, 8}};

/// A layer in the reference's layout, [in, out], and in the operator's.
struct Layer {
  Layer(const Case& c, WeightLayout layout)
      : x(units(c.rows * c.in, 1)),
        w(units(c.in * c.out, 2)),
        bias(units(c.out, 3)),
        d_out(units(c.rows * c.out, 4)),
        shape(layout == WeightLayout::in_out ? Shape{c.in, c.out} : Shape{c.out, c.in}),
        weight(laid_out(w, c, layout)) {}
  static Values laid_out(const Values& w, const Case& c, WeightLayout layout) {
    return layout == WeightLayout::in_out ? w : reference::transpose(w, c.in, c.out);
  }
  Values x, w, bias, d_out;
  Shape shape;
  Values weight;
};

TEST_F(Linear, EveryTypeLayoutAndSize) {
  for (const DType t : types)
    for (const Case& c : cases)
      for (const WeightLayout layout : {WeightLayout::in_out, WeightLayout::out_in})
        for (const bool with_bias : {false, true}) {
          const Layer l(c, layout);
          const Tensor out = empty_on(stream, {c.rows, c.out}, t);
          const Tensor bias = with_bias ? to_device(l.bias, {c.out}, t, stream) : Tensor();
          ops::linear(out, to_device(l.x, {c.rows, c.in}, t, stream), to_device(l.weight, l.shape, t, stream),
                      bias, layout, stream);
          EXPECT_EQ(from_device(out, stream),
                    reference::linear(l.x, l.w, with_bias ? l.bias : Values(), c.rows, c.in, c.out))
              << name(t) << ' ' << c.rows << ' ' << c.in << ' ' << c.out;
        }
}

/// 2048 + 1 + 1 in f16, which has no 2049: for sizes with an epilogue in the library, and for those without.
TEST_F(Linear, TheBiasIsAddedBeforeTheResultIsRounded) {
  for (const std::size_t columns : {std::size_t{8}, std::size_t{7}}) {
    const Tensor out = empty_on(stream, {1, columns}, DType::f16);
    Values w(2 * columns, 2048);
    std::fill(w.begin() + static_cast<long>(columns), w.end(), 1);
    ops::linear(out, to_device(Values{1, 1}, {1, 2}, DType::f16, stream),
                to_device(w, {2, columns}, DType::f16, stream),
                to_device(Values(columns, 1), {columns}, DType::f16, stream), WeightLayout::in_out, stream);
    EXPECT_EQ(from_device(out, stream), Values(columns, 2050)) << columns;
  }
}

TEST_F(Linear, BackwardOfEveryTypeLayoutAndSize) {
  for (const DType t : types)
    for (const DType parameters : {t, DType::f32})
      for (const Case& c : cases)
        for (const WeightLayout layout : {WeightLayout::in_out, WeightLayout::out_in})
          for (const Into into : {Into::overwrite, Into::accumulate}) {
            const Layer l(c, layout);
            const bool add = into == Into::accumulate;
            const auto target = [&](const Shape& shape, DType type) {
              return add ? to_device(units(shape.count(), 9), shape, type, stream)
                         : empty_on(stream, shape, type);
            };
            const auto expected = [&](const Values& gradient) {
              return add ? sum(gradient, units(gradient.size(), 9)) : gradient;
            };
            const Tensor d_x = target({c.rows, c.in}, t), d_weight = target(l.shape, parameters),
                         d_bias = target({c.out}, parameters);
            ops::linear_backward(d_x, d_weight, d_bias, to_device(l.d_out, {c.rows, c.out}, t, stream),
                                 to_device(l.x, {c.rows, c.in}, t, stream),
                                 to_device(l.weight, l.shape, t, stream), layout, into, into, stream);
            const Values wt = reference::transpose(l.w, c.in, c.out);
            EXPECT_EQ(from_device(d_x, stream),
                      expected(reference::matmul(l.d_out, wt, c.rows, c.in, c.out)));
            const Values xt = reference::transpose(l.x, c.rows, c.in);
            const Values d_w = reference::matmul(xt, l.d_out, c.in, c.out, c.rows);
            EXPECT_EQ(from_device(d_weight, stream), expected(Layer::laid_out(d_w, c, layout)));
            EXPECT_EQ(from_device(d_bias, stream), expected(column_sums(l.d_out, c.out)));
          }
}

TEST_F(Linear, BackwardComputesOnlyRequestedGradients) {
  const Case c{65, 33, 40};
  const Layer l(c, WeightLayout::in_out);
  const Tensor x = to_device(l.x, {c.rows, c.in}, DType::f32, stream);
  const Tensor weight = to_device(l.weight, l.shape, DType::f32, stream);
  const Tensor d_out = to_device(l.d_out, {c.rows, c.out}, DType::f32, stream);
  const Tensor d_bias = empty_on(stream, {c.out});
  ops::linear_backward({}, {}, d_bias, d_out, x, weight, WeightLayout::in_out, Into::overwrite,
                       Into::overwrite, stream);
  EXPECT_EQ(from_device(d_bias, stream), column_sums(l.d_out, c.out));
}

/// The bias's gradient over many rows, where several blocks share a column.
TEST_F(Linear, BiasGradientOfManyRows) {
  for (const DType t : types)
    for (const std::size_t columns : {std::size_t{3}, std::size_t{264}}) {
      const Case c{1000, 1, columns};
      const Layer l(c, WeightLayout::in_out);
      const Tensor d_bias = empty_on(stream, {c.out});
      ops::linear_backward({}, {}, d_bias, to_device(l.d_out, {c.rows, c.out}, t, stream),
                           to_device(l.x, {c.rows, c.in}, t, stream), to_device(l.weight, l.shape, t, stream),
                           WeightLayout::in_out, Into::overwrite, Into::overwrite, stream);
      EXPECT_EQ(from_device(d_bias, stream), column_sums(l.d_out, c.out));
    }
}

TEST_F(Linear, MatmulWithEveryTransposition) {
  const std::size_t m = 17, n = 23, k = 40;
  const Values a = units(m * k, 1), b = units(k * n, 2), before = units(m * n, 3);
  const Values product = reference::matmul(a, b, m, n, k);
  for (const DType t : types)
    for (const bool ta : {false, true})
      for (const bool tb : {false, true})
        for (const Into into : {Into::overwrite, Into::accumulate}) {
          const Tensor left = ta ? to_device(reference::transpose(a, m, k), {k, m}, t, stream)
                                 : to_device(a, {m, k}, t, stream);
          const Tensor right = tb ? to_device(reference::transpose(b, k, n), {n, k}, t, stream)
                                  : to_device(b, {k, n}, t, stream);
          const Tensor out = to_device(before, {m, n}, t, stream);
          ops::matmul(out, left, ta, right, tb, into, stream);
          EXPECT_EQ(from_device(out, stream), into == Into::accumulate ? sum(product, before) : product);
        }
}

TEST_F(Linear, FusedGelu) {
  for (const DType t : types)
    for (const Case& c : cases)
      for (const bool with_bias : {false, true}) {
        const Layer l(c, WeightLayout::in_out);
        const Tensor out = empty_on(stream, {c.rows, c.out}, t), pre = empty_on(stream, {c.rows, c.out}, t);
        const Tensor bias = with_bias ? to_device(l.bias, {c.out}, t, stream) : Tensor();
        ops::linear_gelu(out, pre, to_device(l.x, {c.rows, c.in}, t, stream),
                         to_device(l.weight, l.shape, t, stream), bias, WeightLayout::in_out, stream);
        const Values expected =
            reference::linear(l.x, l.w, with_bias ? l.bias : Values(), c.rows, c.in, c.out);
        EXPECT_EQ(from_device(pre, stream), expected);
        expect_near(from_device(out, stream), reference::gelu(expected), tolerance(t));
      }
}

TEST_F(Linear, BackwardThroughGelu) {
  for (const DType t : types)
    for (const Case& c : cases)
      for (const WeightLayout layout : {WeightLayout::in_out, WeightLayout::out_in}) {
        const Layer l(c, layout);
        const Tensor pre = to_device(random_values(c.rows * c.in, 7, 3), {c.rows, c.in}, t, stream);
        const Tensor d_pre = empty_on(stream, {c.rows, c.in}, t);
        ops::linear_backward_through_gelu(d_pre, to_device(l.d_out, {c.rows, c.out}, t, stream),
                                          to_device(l.weight, l.shape, t, stream), pre, layout, stream);
        const Values d_x =
            reference::matmul(l.d_out, reference::transpose(l.w, c.in, c.out), c.rows, c.in, c.out);
        Values expected = d_x;
        const Values at = from_device(pre, stream);
        for (std::size_t i = 0; i < expected.size(); ++i) {
          constexpr double step = 1e-5;
          expected[i] *=
              (reference::gelu({at[i] + step})[0] - reference::gelu({at[i] - step})[0]) / (2 * step);
        }
        expect_near(from_device(d_pre, stream), expected, tolerance(t));
      }
}

/// A step of training as a graph; the same bits for every order of the streams.
TEST_F(Linear, ACapturedProductRepeatsItself) {
  if (on_host()) GTEST_SKIP() << "graphs are of devices";
  const Case c{64, 32, 40};
  const Layer l(c, WeightLayout::in_out);
  for (int seed = 0; seed < schedules(5); ++seed) {
    reschedule(static_cast<std::uint64_t>(seed));
    const Tensor x = to_device(random_values(c.rows * c.in, 1), {c.rows, c.in}, DType::bf16, stream);
    const Tensor weight = to_device(random_values(c.in * c.out, 2), l.shape, DType::bf16, stream);
    const Tensor d_out = to_device(random_values(c.rows * c.out, 3), {c.rows, c.out}, DType::bf16, stream);
    const Tensor d_x = empty_on(stream, {c.rows, c.in}, DType::bf16);
    const Tensor d_weight = empty_on(stream, l.shape), d_bias = empty_on(stream, {c.out}, DType::bf16);
    const auto step = [&] {
      ops::linear_backward(d_x, d_weight, d_bias, d_out, x, weight, WeightLayout::in_out, Into::overwrite,
                           Into::overwrite, stream);
    };
    step();
    const Values first[] = {from_device(d_x, stream), from_device(d_weight, stream),
                            from_device(d_bias, stream)};
    const auto& cuda = cuda::runtime();
    void *graph = nullptr, *executable = nullptr;
    cuda::check(cuda.begin_capture(stream.native()), "begin_capture", device);
    step();
    cuda::check(cuda.end_capture(stream.native(), &graph), "end_capture", device);
    cuda::check(cuda.instantiate(&executable, graph), "instantiate", device);
    for (const Tensor* t : {&d_x, &d_weight, &d_bias}) memset_async(t->raw(), 0xFF, t->bytes(), stream);
    cuda::check(cuda.launch_graph(executable, stream.native()), "launch_graph", device);
    EXPECT_EQ(from_device(d_x, stream), first[0]);
    EXPECT_EQ(from_device(d_weight, stream), first[1]);
    EXPECT_EQ(from_device(d_bias, stream), first[2]);
    cuda.destroy_executable(executable);
    cuda.destroy_graph(graph);
  }
}

TEST_F(Linear, MixedTypesAreRefused) {
  const Tensor x = empty_on(stream, {2, 3}), weight = empty_on(stream, {3, 4}, DType::bf16);
  const Tensor out = empty_on(stream, {2, 4});
  try {
    ops::linear(out, x, weight, {}, WeightLayout::in_out, stream);
    FAIL() << "a product of f32 and bf16 was accepted";
  } catch (const Error& e) {
    EXPECT_EQ(e.code(), Errc::invalid_argument);
    EXPECT_NE(std::string(e.what()).find("a product of f32 and bf16"), std::string::npos) << e.what();
  }
}

TEST_F(Linear, ShapesThatDoNotFitAreRefused) {
  const Tensor x = empty_on(stream, {2, 3}), weight = empty_on(stream, {3, 4});
  EXPECT_THROW(ops::linear(empty_on(stream, {2, 5}), x, weight, {}, WeightLayout::in_out, stream), Error);
  EXPECT_THROW(ops::linear_gelu(empty_on(stream, {2, 4}), empty_on(stream, {4, 2}), x, weight, {},
                                WeightLayout::in_out, stream),
               Error);
  EXPECT_THROW(ops::linear_backward_through_gelu(empty_on(stream, {2, 3}), empty_on(stream, {2, 5}), weight,
                                                 empty_on(stream, {2, 3}), WeightLayout::in_out, stream),
               Error);
}

TEST_F(Linear, ProductsOfEmptyMatrices) {
  const Tensor d_weight = empty_on(stream, {3, 4}), d_bias = empty_on(stream, {4});
  ops::linear_backward({}, d_weight, d_bias, empty_on(stream, {0, 4}), empty_on(stream, {0, 3}),
                       empty_on(stream, {3, 4}), WeightLayout::in_out, Into::overwrite, Into::overwrite,
                       stream);
  EXPECT_EQ(from_device(d_weight, stream), Values(12, 0));
  EXPECT_EQ(from_device(d_bias, stream), Values(4, 0));
}

/// A table of words whose number is odd, as GPT-2's, with rows of logits that are whole 16-byte words apart:
/// the product by the table, and its gradients.
constexpr std::size_t texts = 512, channels = 1024, vocabulary = 2053, vocabulary_stride = 2056;

kernels::GemmCall of_words(const Tensor& d, bool transpose_a, bool transpose_b) {
  const std::size_t rows = d.shape()[0], columns = d.shape()[1];
  const std::size_t terms = texts * channels * vocabulary / rows / columns;
  return {.m = rows,
          .n = columns,
          .k = terms,
          .a = d.raw(),
          .a_stride = transpose_a ? (rows + 7) / 8 * 8 : (terms + 7) / 8 * 8,
          .transpose_a = transpose_a,
          .b = d.raw(),
          .b_stride = transpose_b ? (terms + 7) / 8 * 8 : (columns + 7) / 8 * 8,
          .transpose_b = transpose_b,
          .d = d.raw(),
          .d_stride = (columns + 7) / 8 * 8,
          .factors = DType::bf16,
          .result = DType::bf16};
}

TEST_F(Linear, RowsThatAreNoWholeWordsAreSplitOff) {
  const auto split = kernels::split_whole_words;
  const Tensor logits = empty_on(stream, {texts, vocabulary}, DType::bf16);
  const auto forward = split(of_words(logits, false, true));
  ASSERT_TRUE(forward);
  EXPECT_EQ(forward->first.n, 2048u);
  EXPECT_EQ(forward->second.n, 5u);
  const auto byte = [](const void* p) { return reinterpret_cast<std::uintptr_t>(p); };
  EXPECT_EQ(byte(forward->second.b) - byte(logits.raw()), 2048u * 2 * channels);
  EXPECT_EQ(byte(forward->second.d) - byte(logits.raw()), 2048u * 2);
  const auto weights = split(of_words(empty_on(stream, {vocabulary, channels}, DType::bf16), true, false));
  ASSERT_TRUE(weights);
  EXPECT_EQ(weights->first.m, 2048u);
  EXPECT_EQ(weights->second.m, 5u);
  kernels::GemmCall inputs = of_words(empty_on(stream, {texts, channels}, DType::bf16), false, false);
  const auto few_and_main = split(inputs);
  ASSERT_TRUE(few_and_main);
  EXPECT_EQ(few_and_main->first.k, 5u);
  EXPECT_EQ(few_and_main->second.k, 2048u);
  EXPECT_EQ(few_and_main->second.beta, 1);
  inputs.beta = 1;  // a sum in bf16 would be rounded once more
  EXPECT_FALSE(split(inputs));
  inputs.result = DType::f32;
  EXPECT_TRUE(split(inputs));
  inputs.k = 2048;
  EXPECT_FALSE(split(inputs)) << "whole words";
  kernels::GemmCall small = of_words(logits, false, true);
  small.m = 64;
  EXPECT_FALSE(split(small));
}

TEST_F(Linear, AVocabularyOfAnOddSizeHasTheSameResults) {
  if (on_host()) GTEST_SKIP() << "products on the host are not split";
  const Values x = units(texts * channels, 1), table = units(vocabulary * channels, 2),
               d_logits = units(texts * vocabulary, 3);
  const auto with_stride = [&] {
    return empty_on(stream, {texts, vocabulary_stride}, DType::bf16).columns(0, vocabulary);
  };
  const Tensor inputs = to_device(x, {texts, channels}, DType::bf16, stream),
               weight = to_device(table, {vocabulary, channels}, DType::bf16, stream), logits = with_stride(),
               d_out = with_stride(), d_x = empty_on(stream, {texts, channels}, DType::bf16),
               d_weight = empty_on(stream, {vocabulary, channels}, DType::bf16);
  ops::copy(d_out, to_device(d_logits, {texts, vocabulary}, DType::bf16, stream), stream);
  ops::linear(logits, inputs, weight, {}, WeightLayout::out_in, stream);
  ops::linear_backward(d_x, d_weight, {}, d_out, inputs, weight, WeightLayout::out_in, Into::overwrite,
                       Into::overwrite, stream);
  const Values got = from_device(logits, stream), of_x = from_device(d_x, stream),
               of_weight = from_device(d_weight, stream);
  const auto rounded = [](double v) { return double{to_f32(from_f32<bf16>(static_cast<float>(v)))}; };
  const auto dot = [&](std::size_t terms, const Values& a, std::size_t a_at, std::size_t a_step,
                       const Values& b, std::size_t b_at, std::size_t b_step) {
    double sum = 0;
    for (std::size_t i = 0; i < terms; ++i) sum += a[a_at + i * a_step] * b[b_at + i * b_step];
    return rounded(sum);
  };
  for (const std::size_t t : {0, 1, 255, 511})
    for (const std::size_t w : {0, 7, 2047, 2048, 2050, 2052})
      for (const std::size_t c : {0, 511, 1023}) {
        EXPECT_EQ(got[t * vocabulary + w], dot(channels, x, t * channels, 1, table, w * channels, 1))
            << t << " " << w;
        EXPECT_EQ(of_x[t * channels + c], dot(vocabulary, d_logits, t * vocabulary, 1, table, c, channels))
            << t << " " << c;
        EXPECT_EQ(of_weight[w * channels + c], dot(texts, d_logits, w, vocabulary, x, c, channels))
            << w << " " << c;
      }
}

}  // namespace
}  // namespace rz::test
