#include "autograd_lite/nn/layers.h"

#include <cmath>

#include "comm/core/error.h"

namespace rz::nn {
namespace {

Initial uniform_within(std::size_t in) {
  return {Initial::uniform, static_cast<float>(1 / std::sqrt(static_cast<double>(in)))};
}

}  // namespace

Linear::Linear(Module& parent, const std::string& name, std::size_t in, std::size_t out, WeightLayout layout,
               bool with_bias)
    : Module(parent, name), layout(layout), with_bias(with_bias) {
  register_parameter(weight, "weight", layout == WeightLayout::in_out ? Shape{in, out} : Shape{out, in},
                     uniform_within(in));
  if (with_bias) register_parameter(bias, "bias", {out}, uniform_within(in));
}

Var Linear::operator()(Tape& tape, Var x) {
  return in_scope(tape, [&] {
    const Var w = tape.parameter(weight);
    return linear(tape, x, w, with_bias ? tape.parameter(bias) : Var(), layout);
  });
}

Activation Linear::gelu(Tape& tape, Var x) {
  return in_scope(tape, [&] {
    const Var w = tape.parameter(weight);
    return linear_gelu(tape, x, w, with_bias ? tape.parameter(bias) : Var(), layout);
  });
}

/// Data are what their source has: f64 of NumPy, i64 of labels.
Var Linear::operator()(Tape& tape, const Tensor& x) {
  const bool is_float = x.dtype() == DType::f32 || x.dtype() == DType::f16 || x.dtype() == DType::bf16;
  require(is_float, Errc::invalid_argument, path(), ": its input ", rz::name(x.shape()), " is ",
          rz::name(x.dtype()),
          "; a layer takes f32, f16 or bf16: convert the data before they are a dataset");
  return in_scope(tape, [&] {
    const DType dtype = tape.value(tape.parameter(weight)).dtype();
    const Var input = tape.constant(x);
    return (*this)(tape, x.dtype() == dtype ? input : cast(tape, input, dtype));
  });
}

Var Linear::operator()(Tape& tape, const Activation& x) {
  return in_scope(tape, [&] {
    const Var w = tape.parameter(weight);
    return linear(tape, x, w, with_bias ? tape.parameter(bias) : Var(), layout);
  });
}

LayerNorm::LayerNorm(Module& parent, const std::string& name, std::size_t channels, float epsilon)
    : Module(parent, name), epsilon(epsilon) {
  register_parameter(weight, "weight", {channels}, {Initial::constant, 1});
  register_parameter(bias, "bias", {channels}, {Initial::constant, 0});
}

Var LayerNorm::operator()(Tape& tape, Var x) {
  return in_scope(tape, [&] {
    const Var w = tape.parameter(weight);
    return layer_norm(tape, x, w, tape.parameter(bias), epsilon);
  });
}

SumAndNorm LayerNorm::add_and_norm(Tape& tape, Var a, Var b) {
  return in_scope(tape, [&] {
    const Var w = tape.parameter(weight);
    return add_layer_norm(tape, a, b, w, tape.parameter(bias), epsilon);
  });
}

RmsNorm::RmsNorm(Module& parent, const std::string& name, std::size_t channels, float epsilon)
    : Module(parent, name), epsilon(epsilon) {
  register_parameter(weight, "weight", {channels}, {Initial::constant, 1});
}

Var RmsNorm::operator()(Tape& tape, Var x) {
  return in_scope(tape, [&] { return rms_norm(tape, x, tape.parameter(weight), epsilon); });
}

SumAndNorm RmsNorm::add_and_norm(Tape& tape, Var a, Var b) {
  return in_scope(tape, [&] { return add_rms_norm(tape, a, b, tape.parameter(weight), epsilon); });
}

Embedding::Embedding(Module& parent, const std::string& name, std::size_t rows, std::size_t channels,
                     float deviation)
    : Module(parent, name) {
  register_parameter(weight, "weight", {rows, channels}, {Initial::normal, deviation});
}

Var Embedding::operator()(Tape& tape, const Tensor& tokens) {
  return in_scope(tape, [&] { return embedding(tape, tokens, tape.parameter(weight)); });
}

}  // namespace rz::nn
