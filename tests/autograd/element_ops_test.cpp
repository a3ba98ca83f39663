// Recorded element-wise operators: gradients against finite differences, with broadcasting and scalars;
// dtypes with autocast; and a model with a loss that consist of them alone, trained against double.

#include "autograd_lite/element_ops.h"

#include <gtest/gtest.h>

#include "comm/core/math.h"
#include "tests/autograd/gradients.h"
#include "tests/support/error_of.h"
#include "tests/support/reference.h"

namespace rz::nn {
namespace {

/// Elements in [0.5, 1.5] with both signs, away from 0.
Tensor away_from_zero(const Shape& shape, const std::string& stream, bool positive = false) {
  Tensor t = random(shape, stream);
  for (std::size_t i = 0; i < t.count(); ++i) {
    float& x = t.data<float>()[i];
    x = positive || i % 3 ? 1 + x / 2 : -1 - x / 2;
  }
  return t;
}

TEST(ElementOps, OperatorsAreThoseOfTheTapeOfTheirOperands) {
  Tape tape, other;
  const Var a = tape.variable(test::tensor_of({6, -4}, {2})), b = tape.variable(test::tensor_of({2, 8}, {2}));
  const auto expect = [&](Var v, float first, float second) {
    EXPECT_EQ(test::values_of(tape.value(v)), (test::Values{first, second}));
  };
  expect(a + b, 8, 4), expect(a - b, 4, -12), expect(a * b, 12, -32), expect(a / b, 3, -0.5f);
  expect(b + 1, 3, 9), expect(b - 1, 1, 7), expect(b * 2, 4, 16), expect(b / 2, 1, 4);
  expect(1 + b, 3, 9), expect(1 - b, -1, -7), expect(2 * b, 4, 16), expect(4 / b, 2, 0.5f);
  expect(-a, -6, 4);
  tape.backward(sum(tape, a * b - 3 * a));
  EXPECT_EQ(test::values_of(tape.grad(a)), (test::Values{-1, 5}));
  EXPECT_EQ(test::values_of(tape.grad(b)), (test::Values{6, -4}));
  const Var elsewhere = other.constant(Tensor::zeros({2}));
  EXPECT_STREQ(test::error_of([&] { (void)(a + elsewhere); }).what(),
               "operator +: the operands are of two tapes; record both on one");
  EXPECT_STREQ(test::error_of([&] { (void)(Var() * 2); }).what(),
               "operator *: an operand is a Var that stands for no value");
}

TEST(ElementOps, ExpandRepeatsAndSumsItsGradient) {
  expect_gradients(
      [](Tape& t, const auto& v) {
        return expand(t, v[0], {3, 2, 4});
      },
      {random({2, 1}, "column")});
  expect_gradients([](Tape& t, const auto& v) { return expand(t, v[0], {1, 3}); }, {random({3}, "row")});
  Tape tape;
  const Var x = tape.constant(test::tensor_of({1, 2}, {2, 1}));
  EXPECT_EQ(test::values_of(tape.value(expand(tape, x, {2, 3}))), (test::Values{1, 1, 1, 2, 2, 2}));
  EXPECT_EQ(expand(tape, x, {2, 1}).index, x.index);
  EXPECT_STREQ(test::error_of([&] {
                 expand(tape, x, {1, 3});
               }).what(),
               "expand: [2, 1] does not broadcast to [1, 3]");
}

struct Operands {
  Shape a, b;
};
const Operands operands[] = {{{3, 5}, {3, 5}}, {{3, 5}, {5}},          {{3, 1}, {1, 5}},
                             {{}, {4}},        {{2, 1, 3}, {2, 4, 1}}, {{2, 1, 2, 3}, {3, 1, 3}}};

TEST(ElementOps, BinaryGradientsAreSumsOverRepeatedElements) {
  for (const Operands& shapes : operands) {
    const Tensor a = away_from_zero(shapes.a, "a"), b = away_from_zero(shapes.b, "b", true);
    for (Var (*f)(Tape&, Var, Var) : std::initializer_list<Var (*)(Tape&, Var, Var)>{add, sub, mul, div}) {
      expect_gradients([f](Tape& t, const auto& v) { return f(t, v[0], v[1]); }, {a, b}, 4e-3);
      expect_gradients([f](Tape& t, const auto& v) { return f(t, v[1], exp(t, v[0])); }, {a, b}, 1e-2);
    }
    expect_gradients([](Tape& t, const auto& v) { return pow(t, exp(t, v[0]), v[1]); }, {a, b}, 1e-2);
    // Far from each other: finite differences don't cross a kink.
    const Tensor far = away_from_zero(shapes.a, "a");
    for (std::size_t i = 0; i < far.count(); ++i) far.data<float>()[i] *= 4;
    for (Var (*f)(Tape&, Var, Var) : {minimum, maximum})
      expect_gradients([f](Tape& t, const auto& v) { return f(t, v[0], v[1]); }, {far, b});
  }
}

TEST(ElementOps, Scalars) {
  Tape tape;
  const Var x = tape.constant(test::tensor_of({1, -2}, {2}));
  EXPECT_EQ(test::values_of(tape.value(sub(tape, 5, x))), (test::Values{4, 7}));
  EXPECT_EQ(test::values_of(tape.value(sub(tape, x, 5))), (test::Values{-4, -7}));
  EXPECT_EQ(test::values_of(tape.value(div(tape, x, 4))), (test::Values{0.25, -0.5}));
  EXPECT_EQ(test::values_of(tape.value(div(tape, 4, x))), (test::Values{4, -2}));
}

TEST(ElementOps, ParametersHavePyTorchsDefaults) {
  Tape tape;
  const Var x = tape.constant(test::tensor_of({-1}, {1}));
  EXPECT_FLOAT_EQ(*tape.value(elu(tape, x)).data<float>(), std::expm1(-1.0f));
  EXPECT_EQ(*tape.value(leaky_relu(tape, x)).data<float>(), -0.01f);
}

TEST(ElementOps, ComparisonsHaveNoGradient) {
  Tape tape;
  const Var x = tape.variable(test::tensor_of({1, 2, 3}, {3})), y = tape.variable(test::tensor_of({2}, {1}));
  const auto values = [&](Var v) { return test::values_of(tape.value(v)); };
  EXPECT_EQ(values(eq(tape, x, y)), (test::Values{0, 1, 0}));
  EXPECT_EQ(values(ne(tape, x, y)), (test::Values{1, 0, 1}));
  EXPECT_EQ(values(lt(tape, x, 2)), (test::Values{1, 0, 0}));
  EXPECT_EQ(values(le(tape, x, 2)), (test::Values{1, 1, 0}));
  EXPECT_EQ(values(gt(tape, x, 2)), (test::Values{0, 0, 1}));
  EXPECT_EQ(values(ge(tape, x, 2)), (test::Values{0, 1, 1}));
  EXPECT_FALSE(tape.needs_grad(eq(tape, x, y)));
  tape.backward(sum(tape, mul(tape, x, gt(tape, x, y))));
  EXPECT_EQ(test::values_of(tape.grad(x)), (test::Values{0, 0, 1}));
  EXPECT_FALSE(tape.grad(y).defined());
}

TEST(ElementOps, WhereGradientsAreSumsOverRepeatedElements) {
  for (const Operands& shapes : operands)
    for (const Shape& of_condition : {shapes.a, shapes.b, Shape{}}) {
      Tensor condition = random(of_condition, "c");
      for (std::size_t i = 0; i < condition.count(); ++i) condition.data<float>()[i] = i % 3 != 1;
      expect_gradients([&](Tape& t, const auto& v) { return where(t, t.constant(condition), v[0], v[1]); },
                       {random(shapes.a, "a"), random(shapes.b, "b")});
      expect_gradients([&](Tape& t, const auto& v) { return masked_fill(t, v[0], t.constant(condition), 7); },
                       {random(shapes.a, "a")});
    }
  Tape tape;
  const Var x = tape.variable(test::tensor_of({1, -2, 3}, {3}));
  const Var out = masked_fill(tape, log(tape, x), le(tape, x, 0), 5);
  EXPECT_EQ(tape.value(out).data<float>()[1], 5);
  tape.backward(sum(tape, out));
  EXPECT_EQ(test::values_of(tape.grad(x))[1], 0) << "log's NaN is not in it";
  EXPECT_FLOAT_EQ(tape.grad(x).data<float>()[2], 1.0f / 3);
}

/// A number that is 0 in the dtype of the operands still selects.
TEST(ElementOps, AConditionOfAnotherDtype) {
  Tape tape;
  const Var x = tape.constant(Tensor::zeros({2}, DType::f16)),
            condition = tape.constant(test::tensor_of({1e-30, 0}, {2}));
  const Tensor out = tape.value(where(tape, condition, add(tape, x, 2), x));
  EXPECT_EQ(out.dtype(), DType::f16);
  EXPECT_EQ(to_f32(out.data<f16>()[0]), 2);
  EXPECT_EQ(to_f32(out.data<f16>()[1]), 0);
}

TEST(ElementOps, SumsAndMeans) {
  const Tensor a = random({2, 3, 4}, "a");
  expect_gradients([](Tape& t, const auto& v) { return sum(t, v[0]); }, {a}, 5e-3);
  expect_gradients([](Tape& t, const auto& v) { return mean(t, v[0]); }, {a});
  for (const int extent : {0, 1, 2, -1, -3})
    for (const bool keepdim : {false, true}) {
      expect_gradients([=](Tape& t, const auto& v) { return sum(t, v[0], extent, keepdim); }, {a});
      expect_gradients([=](Tape& t, const auto& v) { return mean(t, v[0], extent, keepdim); }, {a});
    }
  Tape tape;
  const Var x = tape.constant(test::tensor_of({1, 2, 3, 4, 5, 6}, {2, 3}));
  EXPECT_EQ(test::values_of(tape.value(sum(tape, x, 0))), (test::Values{5, 7, 9}));
  EXPECT_EQ(test::values_of(tape.value(mean(tape, x, -1, true))), (test::Values{2, 5}));
  EXPECT_EQ(tape.value(mean(tape, x, -1, true)).shape(), (Shape{2, 1}));
  EXPECT_EQ(tape.value(mean(tape, x, -1)).shape(), (Shape{2}));
  EXPECT_EQ(tape.value(sum(tape, x)).shape(), Shape());
  EXPECT_EQ(test::values_of(tape.value(mean(tape, x))), (test::Values{3.5}));
  const Error e = test::error_of([&] { sum(tape, x, 2); });
  EXPECT_NE(std::string(e.what()).find("sum: the tensor [2, 3] has no extent 2"), std::string::npos)
      << e.what();
}

TEST(ElementOps, RefuseShapesThatDoNotBroadcast) {
  Tape tape;
  const Var a = tape.constant(Tensor::zeros({2, 3})), b = tape.constant(Tensor::zeros({4}));
  const Error e = test::error_of([&] { sub(tape, a, b); });
  EXPECT_EQ(e.code(), Errc::invalid_argument);
  EXPECT_NE(std::string(e.what()).find("sub: the shapes [2, 3] and [4] do not broadcast"), std::string::npos)
      << e.what();
}

TEST(ElementOps, AutocastComputesInF32WhatTorchDoes) {
  Tape tape;
  tape.set_autocast(DType::bf16);
  const Tensor narrow = Tensor::zeros({2, 2}, DType::bf16), wide = Tensor::zeros({2, 2});
  const Var x = tape.variable(narrow), y = tape.variable(wide);
  const auto dtype = [&](Var v) { return tape.value(v).dtype(); };
  for (Var (*f)(Tape&, Var) : {exp, log, rsqrt, reciprocal, softplus, softmax, log_softmax})
    EXPECT_EQ(dtype(f(tape, x)), DType::f32);
  EXPECT_EQ(dtype(pow(tape, x, 2)), DType::f32);
  EXPECT_EQ(dtype(pow(tape, x, x)), DType::f32);
  EXPECT_EQ(dtype(sum(tape, x)), DType::f32);
  EXPECT_EQ(dtype(sum(tape, x, 0)), DType::f32);
  EXPECT_EQ(dtype(div(tape, 1, x)), DType::f32);
  for (Var (*f)(Tape&, Var) : {sqrt, abs, relu, sigmoid, silu, tanh, neg, sin, cos, gelu_erf})
    EXPECT_EQ(dtype(f(tape, x)), DType::bf16);
  EXPECT_EQ(dtype(elu(tape, x)), DType::bf16);
  EXPECT_EQ(dtype(leaky_relu(tape, x)), DType::bf16);
  EXPECT_EQ(dtype(lt(tape, x, 0)), DType::bf16);
  EXPECT_EQ(dtype(where(tape, y, x, x)), DType::bf16);
  EXPECT_EQ(dtype(where(tape, x, x, y)), DType::f32);
  EXPECT_EQ(dtype(masked_fill(tape, x, y, 1)), DType::bf16);
  EXPECT_EQ(dtype(mean(tape, x, 0)), DType::bf16);
  EXPECT_EQ(dtype(add(tape, x, 1)), DType::bf16);
  for (Var (*f)(Tape&, Var, Var) :
       std::initializer_list<Var (*)(Tape&, Var, Var)>{minimum, maximum, eq, ge}) {
    EXPECT_EQ(dtype(f(tape, x, y)), DType::f32);
    EXPECT_EQ(dtype(f(tape, x, x)), DType::bf16);
  }
}

// ---- a gated MLP with an RMS norm, in residual form, and its mean squared error

constexpr std::size_t rows = 7, width = 4, hidden = 6;
const std::vector<Shape> parameter_shapes = {{width}, {width, hidden}, {width, hidden}, {hidden, width}};

/// mean (x + down (silu(gate n) · (up n)) - y)², where n = weight · x / √(mean x² + ε)
Var model_loss(Tape& t, const std::vector<Var>& p, Var x, Var y) {
  const Var scale = rsqrt(t, add(t, mean(t, mul(t, x, x), -1, true), 1e-3f));
  const Var n = mul(t, mul(t, x, scale), p[0]);
  const Var gated = mul(t, silu(t, matmul(t, n, false, p[1], false)), matmul(t, n, false, p[2], false));
  const Var error = sub(t, add(t, x, matmul(t, gated, false, p[3], false)), y);
  return mean(t, mul(t, error, error));
}

double model_loss(const std::vector<test::Values>& p, const test::Values& x, const test::Values& y) {
  test::Values n(x.size());
  for (std::size_t r = 0; r < rows; ++r) {
    double squares = 0;
    for (std::size_t c = 0; c < width; ++c) squares += x[r * width + c] * x[r * width + c];
    for (std::size_t c = 0; c < width; ++c)
      n[r * width + c] = p[0][c] * x[r * width + c] / std::sqrt(squares / width + 1e-3f);
  }
  test::Values gate = test::reference::matmul(n, p[1], rows, hidden, width);
  const test::Values up = test::reference::matmul(n, p[2], rows, hidden, width);
  for (std::size_t i = 0; i < gate.size(); ++i) gate[i] *= up[i] / (1 + std::exp(-gate[i]));
  const test::Values down = test::reference::matmul(gate, p[3], rows, width, hidden);
  double loss = 0;
  for (std::size_t i = 0; i < x.size(); ++i) loss += std::pow(x[i] + down[i] - y[i], 2);
  return loss / static_cast<double>(x.size());
}

TEST(ElementOps, AGatedMlpWithAnRmsNormTrainsAsInDouble) {
  constexpr float rate = 0.125f;
  const test::Values x = test::random_values(rows * width, 1), y = test::random_values(rows * width, 2);
  std::vector<test::Values> expected;
  std::vector<Tensor> values;
  for (const Shape& s : parameter_shapes) {
    expected.push_back(test::random_values(s.count(), 3 + static_cast<unsigned>(expected.size())));
    values.push_back(test::tensor_of(expected.back(), s));
  }
  const double first = model_loss(expected, x, y);
  Tape tape;
  for (int step = 0; step < 60; ++step) {
    std::vector<Var> p;
    for (const Tensor& v : values) p.push_back(tape.variable(v));
    const Var loss = model_loss(tape, p, tape.constant(test::tensor_of(x, {rows, width})),
                                tape.constant(test::tensor_of(y, {rows, width})));
    ASSERT_NEAR(*tape.value(loss).data<float>(), model_loss(expected, x, y), 1e-6) << step;
    tape.backward(loss);
    for (std::size_t k = 0; k < p.size(); ++k)
      ops::add_scaled(values[k], tape.grad(p[k]), -rate, tape.stream());
    tape.reset();
    std::vector<test::Values> gradients;
    for (std::size_t k = 0; k < expected.size(); ++k) {
      const auto of_k = [&](const test::Values& v) {
        std::vector<test::Values> changed = expected;
        changed[k] = v;
        return test::Values{model_loss(changed, x, y)};
      };
      gradients.push_back(test::numeric_gradient(of_k, expected[k], {1}));
    }
    for (std::size_t k = 0; k < expected.size(); ++k)
      for (std::size_t i = 0; i < expected[k].size(); ++i) expected[k][i] -= rate * gradients[k][i];
    for (std::size_t k = 0; k < expected.size(); ++k)
      test::expect_close(values[k], expected[k], 1e-5, "parameters");
  }
  EXPECT_LT(model_loss(expected, x, y), first / 2);
}

}  // namespace
}  // namespace rz::nn
