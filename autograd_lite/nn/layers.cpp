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
Var Linear::with_update(Tape& tape, Var x, Var w, Var b) {
  const Var low_a = Exchange::through(lora->exchange_a, tape, tape.parameter(lora->a));
  const Var low_b = Exchange::through(lora->exchange_b, tape, tape.parameter(lora->b));
  const Var in = training() ? dropout(tape, x, lora->dropout, lora->input_part) : x;
  return linear_low_rank(tape, x, w, b, layout, {in, low_a, low_b, lora->scale});
}

/// The output of a layer whose product, if the ranks' are summed, has no bias yet.
Var Linear::completed(Tape& tape, Var product, Var b) {
  if (!exchange.output) return product;
  const Var sum = exchange.output(tape, product);
  return b.defined() ? add(tape, sum, autocast_low(tape, Exchange::through(exchange.parameter, tape, b)))
                     : sum;
}

Var Linear::operator()(Tape& tape, Var x) { return (*this)(tape, shared(tape, x)); }

Var Linear::operator()(Tape& tape, SharedInput in) {
  return in_scope(tape, [&] {
    const Var w = tape.parameter(weight), b = with_bias ? tape.parameter(bias) : Var();
    const Var inside = exchange.output ? Var() : b;
    return completed(tape, lora ? with_update(tape, in.x, w, inside) : linear(tape, in.x, w, inside, layout),
                     b);
  });
}

Activation Linear::gelu(Tape& tape, Var x) {
  return in_scope(tape, [&] {
    if (lora || exchange.output) {
      const Var pre = (*this)(tape, x);
      const Tensor out = tape.empty(tape.value(pre).shape(), tape.value(pre).dtype());
      ops::gelu(out, tape.value(pre), tape.stream());
      return Activation{pre, out};
    }
    const Var in = shared(tape, x).x, w = tape.parameter(weight);
    return linear_gelu(tape, in, w, with_bias ? tape.parameter(bias) : Var(), layout);
  });
}

Var Linear::operator()(Tape& tape, const Tensor& x) {
  return in_scope(tape, [&] { return (*this)(tape, constant_like(tape, x, weight, *this)); });
}

Var Linear::operator()(Tape& tape, const Activation& x) {
  return in_scope(tape, [&] {
    if (lora || exchange.input) return (*this)(tape, activated(tape, x));
    const Var w = tape.parameter(weight), b = with_bias ? tape.parameter(bias) : Var();
    return completed(tape, linear(tape, x, w, exchange.output ? Var() : b, layout), b);
  });
}

LayerNorm::LayerNorm(Module& parent, const std::string& name, std::size_t channels, float epsilon)
    : Module(parent, name), epsilon(epsilon) {
  register_parameter(weight, "weight", {channels}, {Initial::constant, 1});
  register_parameter(bias, "bias", {channels}, {Initial::constant, 0});
}

Var LayerNorm::operator()(Tape& tape, Var x) {
  return in_scope(tape, [&] {
    const Var w = Exchange::through(exchange.parameter, tape, tape.parameter(weight));
    return layer_norm(tape, x, w, Exchange::through(exchange.parameter, tape, tape.parameter(bias)), epsilon);
  });
}

SumAndNorm LayerNorm::add_and_norm(Tape& tape, Var a, Var b) {
  return in_scope(tape, [&] {
    const Var w = Exchange::through(exchange.parameter, tape, tape.parameter(weight));
    return add_layer_norm(tape, a, b, w, Exchange::through(exchange.parameter, tape, tape.parameter(bias)),
                          epsilon);
  });
}

RmsNorm::RmsNorm(Module& parent, const std::string& name, std::size_t channels, float epsilon)
    : Module(parent, name), epsilon(epsilon) {
  register_parameter(weight, "weight", {channels}, {Initial::constant, 1});
}

Var RmsNorm::operator()(Tape& tape, Var x) {
  return in_scope(tape, [&] {
    return rms_norm(tape, x, Exchange::through(exchange.parameter, tape, tape.parameter(weight)), epsilon);
  });
}

SumAndNorm RmsNorm::add_and_norm(Tape& tape, Var a, Var b) {
  return in_scope(tape, [&] {
    const Var w = Exchange::through(exchange.parameter, tape, tape.parameter(weight));
    return add_rms_norm(tape, a, b, w, epsilon);
  });
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
      const Var in = Exchange::through(exchange.input, tape, query);
      const Var all = linear(tape, in, weight, bias, WeightLayout::out_in);
      return out_proj(tape, self_attention(tape, all, options, p, exchange.part));
    }
    const auto projected = [&](Var given, std::size_t part) {
      const Var x = Exchange::through(exchange.input, tape, given);
      const std::size_t width = in_proj_weight.shape[0] / 3;
      return linear(tape, x, narrow(tape, weight, 0, part * width, width),
                    narrow(tape, bias, 0, part * width, width), WeightLayout::out_in);
    };
    const Var q = projected(query, 0), k = projected(key, 1), v = projected(value, 2);
    return out_proj(tape, attention(tape, q, k, v, options, p, exchange.part));
  });
}

Embedding::Embedding(Module& parent, const std::string& name, std::size_t rows, std::size_t channels,
                     float deviation)
    : Module(parent, name) {
  register_parameter(weight, "weight", {rows, channels}, {Initial::normal, deviation});
}

Var Embedding::operator()(Tape& tape, const Tensor& tokens) {
  return in_scope(tape, [&] {
    const Var table = tape.parameter(weight);
    if (!weight.part) return Exchange::through(exchange.output, tape, embedding(tape, tokens, table));
    const ClassPart of = rows_of_rank();
    const Tensor own = tape.empty(tokens.shape(), DType::i32);
    ops::local_indices(own, tokens, of.first, weight.shape[0], of.total, tape.stream());
    return Exchange::through(exchange.output, tape, embedding(tape, own, table));
  });
}

Var Embedding::own_logits(Tape& tape, Var x) {
  const auto product = [&] {
    const Var in = Exchange::through(exchange.input, tape, x);
    return linear_aligned(tape, in, tape.parameter(weight), WeightLayout::out_in);
  };
  return tape.is_open(weight) ? product() : in_scope(tape, product);
}

ClassPart Embedding::rows_of_rank() const {
  return {weight.part->offset[0], weight.part->shape[0], exchange.part.ranks, exchange.gather};
}

Var Embedding::gathered(Tape& tape, Var own_logits) {
  return exchange.gather ? gather_classes(tape, own_logits, rows_of_rank()) : own_logits;
}

Loss Embedding::cross_entropy(Tape& tape, Var own_logits, const Tensor& targets) {
  if (!exchange.gather) return nn::cross_entropy(tape, own_logits, targets);
  return nn::cross_entropy(tape, own_logits, targets, rows_of_rank());
}

Var Dropout::operator()(Tape& tape, Var x) const {
  if (!training()) return x;
  const RankOf r = exchange.by_tokens && !tape.is_grad_enabled() ? RankOf{} : exchange.part;
  if (r.ranks == 1) return dropout(tape, x, p);
  const int dimension = exchange.by_tokens ? -2 : -1;
  const std::size_t own = tape.value(x).shape()[dimension], before = static_cast<std::size_t>(r.rank) * own;
  const PartOf columns = exchange.columns;
  if (columns.of == 0)
    return dropout(tape, x, p, {{before, before + own}, static_cast<std::size_t>(r.ranks) * own}, dimension);
  require(own == columns.own.count(), Errc::invalid_argument, path(), ": its input has ", own,
          " columns on rank ", r.rank, " of ", r.ranks, ", and would have ", columns.own.count(), " of the ",
          columns.of, " that its ParallelRule::columns is; correct it");
  return dropout(tape, x, p, columns);
}

}  // namespace rz::nn
