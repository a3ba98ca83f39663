#pragma once
/// Gradients of recorded operators against finite differences of their forward, through the tape: each input
/// once as a variable and once as a parameter, whose gradient is added to or overwritten.

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "autograd_lite/nn/init.h"
#include "autograd_lite/ops.h"

namespace rz::nn {

inline Tensor random(const Shape& shape, const std::string& stream) {
  Tensor t = Tensor::empty(shape);
  for (std::size_t i = 0; i < t.count(); ++i) {
    t.data<float>()[i] = static_cast<float>(2 * random_uniform(1, stream, i) - 1);
  }
  return t;
}

inline Tensor integers(const Shape& shape, const std::vector<std::int32_t>& values) {
  Tensor t = Tensor::empty(shape, DType::i32);
  std::copy(values.begin(), values.end(), t.data<std::int32_t>());
  return t;
}

using Operator = std::function<Var(Tape&, const std::vector<Var>&)>;

/// A scalar that weighs every element of the output differently.
inline double weighed(Tape& tape, Var out, Var* loss = nullptr) {
  const Tensor value = tape.value(out);
  const Tensor weights = random({value.count(), 1}, "weights");
  double sum = 0;
  for (std::size_t i = 0; i < value.count(); ++i) {
    sum += double{value.data<float>()[i]} * weights.data<float>()[i];
  }
  if (loss)
    *loss = matmul(tape, reshape(tape, out, {1, value.count()}), false, tape.constant(weights), false);
  return sum;
}

inline double run(const Operator& op, const std::vector<Tensor>& inputs) {
  Tape tape;
  const Tape::NoGrad no_grad(tape);
  std::vector<Var> vars;
  for (const Tensor& t : inputs) vars.push_back(tape.constant(t));
  return weighed(tape, op(tape, vars));
}

inline double slope(const Operator& op, const std::vector<Tensor>& inputs, float& x) {
  const float before = x, step = 1.0f / 256;
  x = before + step;
  const double above = run(op, inputs), to = x;
  x = before - step;
  const double below = run(op, inputs), from = x;
  x = before;
  return (above - below) / (to - from);
}

inline void expect_close(const Operator& op, const std::vector<Tensor>& inputs, std::size_t k,
                         const Tensor& grad, double tolerance) {
  ASSERT_TRUE(grad.defined()) << "input " << k;
  for (std::size_t i = 0; i < grad.count(); ++i) {
    const double wanted = slope(op, inputs, inputs[k].data<float>()[i]);
    EXPECT_NEAR(grad.data<float>()[i], wanted, tolerance * (1 + std::abs(wanted)))
        << "input " << k << ", element " << i;
  }
}

/// Of inputs that are variables, and parameters: of which the first is added to and the others are
/// overwritten, and the reverse.
inline void expect_gradients(const Operator& op, const std::vector<Tensor>& inputs, double tolerance = 2e-3) {
  Tape tape;
  std::vector<Var> vars;
  for (const Tensor& t : inputs) vars.push_back(tape.variable(t));
  Var loss;
  weighed(tape, op(tape, vars), &loss);
  tape.backward(loss);
  std::vector<std::vector<float>> gradients;
  for (std::size_t k = 0; k < inputs.size(); ++k) {
    const Tensor g = tape.grad(vars[k]);
    expect_close(op, inputs, k, g, tolerance);
    gradients.emplace_back(g.data<float>(), g.data<float>() + g.count());
  }
  for (const bool fresh : {false, true}) {  // of the first
    tape.reset();
    std::vector<Parameter> parameters(inputs.size());
    for (std::size_t k = 0; k < inputs.size(); ++k) {
      Parameter& p = parameters[k];
      p.shape = inputs[k].shape(), p.value = inputs[k];
      p.grad = Tensor::empty(p.shape);
      std::fill_n(p.grad.data<float>(), p.count(), 0.5f);
      p.grad_is_fresh = fresh == (k == 0);
      vars[k] = tape.parameter(p);
    }
    weighed(tape, op(tape, vars), &loss);
    tape.backward(loss);
    for (std::size_t k = 0; k < inputs.size(); ++k)
      for (std::size_t i = 0; i < inputs[k].count(); ++i) {
        const double expected = gradients[k][i] + (fresh == (k == 0) ? 0 : 0.5);
        ASSERT_NEAR(parameters[k].grad.data<float>()[i], expected, 1e-5 * (1 + std::abs(expected)))
            << "parameter " << k << ", element " << i;
      }
  }
}

}  // namespace rz::nn
