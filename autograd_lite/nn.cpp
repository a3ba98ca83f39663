#include "autograd_lite/nn.h"

#include <cmath>

namespace rz::nn {
namespace {

Parameter parameter(std::string name, Shape shape, Initial initial) {
  Parameter p;
  p.name = std::move(name);
  p.shape = shape;
  p.initial = initial;
  return p;
}

Initial uniform_within(std::size_t in) {
  return {Initial::uniform, static_cast<float>(1 / std::sqrt(static_cast<double>(in)))};
}

}  // namespace

Linear::Linear(const std::string& name, std::size_t in, std::size_t out, WeightLayout layout, bool with_bias)
    : layout(layout),
      with_bias(with_bias),
      weight(parameter(name + ".weight", layout == WeightLayout::in_out ? Shape{in, out} : Shape{out, in},
                       uniform_within(in))),
      bias(parameter(name + ".bias", {out}, uniform_within(in))) {}

Var Linear::operator()(Tape& tape, Var x) {
  const Var w = tape.parameter(weight);
  return linear(tape, x, w, with_bias ? tape.parameter(bias) : Var(), layout);
}

Activation Linear::gelu(Tape& tape, Var x) {
  const Var w = tape.parameter(weight);
  return linear_gelu(tape, x, w, with_bias ? tape.parameter(bias) : Var(), layout);
}

Var Linear::operator()(Tape& tape, const Activation& x) {
  const Var w = tape.parameter(weight);
  return linear(tape, x, w, with_bias ? tape.parameter(bias) : Var(), layout);
}

void Linear::append_parameters(std::vector<Parameter*>& to) {
  to.push_back(&weight);
  if (with_bias) to.push_back(&bias);
}

LayerNorm::LayerNorm(const std::string& name, std::size_t channels, float epsilon)
    : epsilon(epsilon),
      weight(parameter(name + ".weight", {channels}, {Initial::constant, 1})),
      bias(parameter(name + ".bias", {channels}, {Initial::constant, 0})) {}

Var LayerNorm::operator()(Tape& tape, Var x) {
  const Var w = tape.parameter(weight);
  return layer_norm(tape, x, w, tape.parameter(bias), epsilon);
}

SumAndNorm LayerNorm::add_and_norm(Tape& tape, Var a, Var b) {
  const Var w = tape.parameter(weight);
  return add_layer_norm(tape, a, b, w, tape.parameter(bias), epsilon);
}

void LayerNorm::append_parameters(std::vector<Parameter*>& to) { to.insert(to.end(), {&weight, &bias}); }

Embedding::Embedding(const std::string& name, std::size_t rows, std::size_t channels, float deviation)
    : weight(parameter(name + ".weight", {rows, channels}, {Initial::normal, deviation})) {}

Var Embedding::operator()(Tape& tape, const Tensor& tokens) {
  return embedding(tape, tokens, tape.parameter(weight));
}

void Embedding::append_parameters(std::vector<Parameter*>& to) { to.push_back(&weight); }

}  // namespace rz::nn
