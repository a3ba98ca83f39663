#include "autograd_lite/nn/layers.h"

#include <cmath>

#include "comm/core/error.h"

namespace rz::nn {
namespace {

Initial uniform_within(std::size_t in) {
  return {Initial::uniform, static_cast<float>(1 / std::sqrt(static_cast<double>(in)))};
}

}  // namespace

/// Data are what their source has: f64 of NumPy, i64 of labels.
Var constant_like(Tape& tape, const Tensor& x, Parameter& weight, const Module& layer) {
  const bool is_float = x.dtype() == DType::f32 || x.dtype() == DType::f16 || x.dtype() == DType::bf16;
  require(is_float, Errc::invalid_argument, layer.path(), ": its input ", name(x.shape()), " is ",
          name(x.dtype()), "; a layer takes f32, f16 or bf16: convert the data before they are a dataset");
  return cast(tape, tape.constant(x), tape.value(tape.parameter(weight)).dtype());
}

Linear::Linear(Module& parent, const std::string& name, std::size_t in, std::size_t out, WeightLayout layout,
               bool with_bias)
    : Module(parent, name), layout(layout), with_bias(with_bias) {
  register_parameter(weight, "weight", layout == WeightLayout::in_out ? Shape{in, out} : Shape{out, in},
                     uniform_within(in));
  if (with_bias) register_parameter(bias, "bias", {out}, uniform_within(in));
}

/// In the scope of the layer.
Var Linear::with_update(Tape& tape, Var x) {
  const Var w = tape.parameter(weight), b = with_bias ? tape.parameter(bias) : Var();
  const Var low_a = tape.parameter(lora->a), low_b = tape.parameter(lora->b);
  const Var in = training() ? dropout(tape, x, lora->dropout) : x;
  return linear_low_rank(tape, x, w, b, layout, {in, low_a, low_b, lora->scale});
}

Var Linear::operator()(Tape& tape, Var x) {
  return in_scope(tape, [&] {
    if (lora) return with_update(tape, x);
    const Var w = tape.parameter(weight);
    return linear(tape, x, w, with_bias ? tape.parameter(bias) : Var(), layout);
  });
}

Activation Linear::gelu(Tape& tape, Var x) {
  return in_scope(tape, [&] {
    if (lora) {
      const Var pre = with_update(tape, x);
      const Tensor out = tape.empty(tape.value(pre).shape(), tape.value(pre).dtype());
      ops::gelu(out, tape.value(pre), tape.stream());
      return Activation{pre, out};
    }
    const Var w = tape.parameter(weight);
    return linear_gelu(tape, x, w, with_bias ? tape.parameter(bias) : Var(), layout);
  });
}

Var Linear::operator()(Tape& tape, const Tensor& x) {
  return in_scope(tape, [&] { return (*this)(tape, constant_like(tape, x, weight, *this)); });
}

Var Linear::operator()(Tape& tape, const Activation& x) {
  return in_scope(tape, [&] {
    if (lora) return with_update(tape, activated(tape, x));
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

MultiheadAttention::MultiheadAttention(Module& parent, const std::string& name, std::size_t channels,
                                       std::size_t heads, double dropout)
    : Module(parent, name),
      heads(heads),
      dropout(static_cast<float>(dropout)),
      in_proj_weight(*this, "in_proj_weight", {3 * channels, channels},
                     {Initial::uniform, static_cast<float>(std::sqrt(1.5 / static_cast<double>(channels)))}),
      in_proj_bias(*this, "in_proj_bias", {3 * channels}),
      out_proj(*this, "out_proj", channels, channels) {
  require(heads > 0 && channels % heads == 0, Errc::invalid_argument, path(), ": ", channels,
          " channels do not divide into ", heads, " heads");
  out_proj.bias.initial = {Initial::constant, 0};
}

Var MultiheadAttention::operator()(Tape& tape, Var query, Var key, Var value, const AttentionOptions& given) {
  AttentionOptions options = given;
  options.heads = static_cast<int>(heads);
  const float p = training() ? dropout : 0;
  return in_scope(tape, [&] {
    const Var weight = tape.parameter(in_proj_weight), bias = tape.parameter(in_proj_bias);
    if (query.index == key.index && key.index == value.index) {
      const Var all = linear(tape, query, weight, bias, WeightLayout::out_in);
      return out_proj(tape, self_attention(tape, all, options, p));
    }
    const auto projected = [&](Var x, std::size_t part) {
      const std::size_t width = in_proj_weight.shape[1];
      return linear(tape, x, narrow(tape, weight, 0, part * width, width),
                    narrow(tape, bias, 0, part * width, width), WeightLayout::out_in);
    };
    const Var q = projected(query, 0), k = projected(key, 1), v = projected(value, 2);
    return out_proj(tape, attention(tape, q, k, v, options, p));
  });
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
