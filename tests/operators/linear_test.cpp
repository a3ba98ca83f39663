// Runs: ci host operators

// Products in f32, f16 and bf16, on the host and on a device: of -1, 0 and 1 exactly, of other numbers
// against double.

#include <algorithm>
#include <cmath>

#include "autograd_lite/ops.h"
#include "comm/core/math.h"
#include "comm/device/cuda_runtime.h"
#include "tensor/kernels/linear_algebra/blas.h"
#include "tests/operators/operator.h"

namespace rz::test {
namespace {

using ops::Into;
using ops::WeightLayout;

using Linear = OnDevice;

constexpr DType types[] = {DType::f32, DType::f16, DType::bf16};

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

class LinearRows : public Operators {};
INSTANTIATE_TEST_SUITE_P(Types, LinearRows, float_types, type_name);

/// A gradient is stored with all others, since that of the bias may be computed with that of the weight, and
/// added alone.
TEST_P(LinearRows, EveryLayoutAndSize) {
  const auto expect_linear = [&](const Case& c, WeightLayout layout, bool with_bias, bool exact) {
    const bool in_out = layout == WeightLayout::in_out;
    const auto numbers = [&](std::size_t n, unsigned seed) {
      return exact ? units(n, seed) : random_values(n, seed);
    };
    const auto bias = [](const Operands& o) { return o.in.size() > 2 ? o.in[2] : Tensor(); };
    const Bound bound = exact ? Bound{0, 0, 1e-6} : Bound{};
    const auto in_weight = [=](std::size_t out, std::size_t k) {
      return in_out ? k * c.out + out % c.out : out % c.out * c.in + k;
    };
    const auto gradient = [=](std::size_t of, const Reach& reach) {
      return Gradient{.of = of,
                      .backward =
                          [=](const Operands& o, const Tensor& d, Into into) {
                            Tensor all[3];
                            for (std::size_t k = 0; k < o.in.size() && into == Into::overwrite; ++k)
                              all[k] = empty_on(o.stream, o.in[k].shape(), d.dtype());
                            if (of > 0)
                              all[0] = into == Into::overwrite
                                           ? empty_on(o.stream, o.in[0].shape(), o.in[0].dtype())
                                           : Tensor();
                            all[of] = d;
                            ops::linear_backward(all[0], all[1], all[2], o.d_out, o.in[0], o.in[1], layout,
                                                 into, into, o.stream);
                          },
                      .reach = reach,
                      .parameter = of > 0,
                      .bound = bound};
    };
    Operator op{
        .name = concat(c.rows, " x ", c.in, " to ", c.out, in_out ? ", in_out" : ", out_in"),
        .in = {{numbers(c.rows * c.in, 1), {c.rows, c.in}},
               {numbers(c.in * c.out, 2), in_out ? Shape{c.in, c.out} : Shape{c.out, c.in}}},
        .out = {c.rows, c.out},
        .forward =
            [=](const Operands& o) { ops::linear(o.out, o.in[0], o.in[1], bias(o), layout, o.stream); },
        .value =
            [=](const std::vector<Values>& in) {
              return reference::linear(in[0], in_out ? in[1] : reference::transpose(in[1], c.out, c.in),
                                       in.size() > 2 ? in[2] : Values(), c.rows, c.in, c.out);
            },
        .gradients = {gradient(0, its_row(c.in, c.out)), gradient(1, {c.in, in_weight})},
        .bound = exact ? Bound{0} : Bound{},
        .strides = true,
        .unit_slopes = exact};
    if (with_bias) {
      op.in.push_back({numbers(c.out, 3), {c.out}});
      op.gradients.push_back(gradient(2, its_column(c.out)));
    }
    expect_right(op);
  };
  for (const WeightLayout layout : {WeightLayout::in_out, WeightLayout::out_in})
    for (const bool with_bias : {false, true}) {
      for (const Case& c : cases) expect_linear(c, layout, with_bias, true);
      if (!on_host() && !emulated_device) continue;  // some kernels of cuBLASLt round more often
      for (const Case& c : {Case{1, 5, 3}, {7, 9, 20}, {33, 17, 70}})
        expect_linear(c, layout, with_bias, false);
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

/// As the part of a layer that one of several ranks has: an empty sum is 0, or the bias.
TEST_F(Linear, WithoutInputsOrOutputs) {
  if (!on_host()) GTEST_SKIP() << "such products are of the host";
  for (const DType t : types)
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

TEST_P(LinearRows, LinearAlignedHasTheValuesAndGradientsOfLinear) {
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
