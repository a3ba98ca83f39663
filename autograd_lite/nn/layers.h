#pragma once
/// Layers: modules of named parameters and the operators that use them. A new layer's parameters have no
/// memory; allocate_parameters() or a strategy allocates it. Each layer enters its scope (autograd_lite/
/// module.h) unless it is open.

#include <memory>
#include <string>

#include "../losses.h"
#include "../ops.h"
#include "module.h"
#include "parallel.h"

namespace rz {
struct LoraOptions;
}

namespace rz::nn {

/// For layers that data enter: x as a constant in the dtype of the weight, whose scope is open.
/// Errc::invalid_argument names the layer for data in other types than f32, f16 and bf16, such as f64.
Var constant_like(Tape&, const Tensor& x, Parameter& weight, const Module& layer);

/// A low-rank update of a Linear, scale · B(A(dropout(x))) (Hu et al., arXiv:2106.09685). add_lora()
/// (autograd_lite/models/lora.h) adds it to a layer.
struct LowRankUpdate {
  /// Its parameters are those of the layer, as long as it lives.
  explicit LowRankUpdate(Module& of) : layer(of) {}
  ~LowRankUpdate() { layer.unregister_parameter(a), layer.unregister_parameter(b); }
  LowRankUpdate(const LowRankUpdate&) = delete;

  Module& layer;
  Parameter a;  ///< NAME.lora_A.weight [r, in], initially as the weight of a Linear
  Parameter b;  ///< NAME.lora_B.weight [out, r], initially 0
  Exchange::Function exchange_a, exchange_b;  ///< Exchange::parameter of a factor that is whole
  PartOf input_part{};                        ///< of the columns of its input
  float scale = 1;
  float dropout = 0;                           ///< in training only
  std::shared_ptr<const LoraOptions> options;  ///< of which it is a part
};

/// x as layers have it that share their input, and exchange it once.
struct SharedInput {
  Var x;
};

/// Parameters `name`.weight and `name`.bias, initialized like PyTorch's nn.Linear: uniform in ±1/sqrt(in).
struct Linear : Module {
  Linear(Module& parent, const std::string& name, std::size_t in, std::size_t out,
         WeightLayout layout = WeightLayout::out_in, bool with_bias = true);
  Var operator()(Tape&, Var x);
  Var operator()(Tape&, const Tensor& x);  ///< constant_like(): data in f32 may enter a model in 16 bits
  /// linear_gelu(): the layer followed by a GELU, as the input of the next Linear.
  Activation gelu(Tape&, Var x);
  Var operator()(Tape&, const Activation& x);
  /// The input of this layer and of others of its ParallelStyle, such as q, k and v:
  ///
  ///     const nn::SharedInput in = q_proj.shared(tape, x);
  ///     q_proj(tape, in), k_proj(tape, in);
  SharedInput shared(Tape& tape, Var x) const { return {Exchange::through(exchange.input, tape, x)}; }
  Var operator()(Tape&, SharedInput);

  WeightLayout layout;
  bool with_bias;
  Parameter weight;
  Parameter bias;                       ///< not registered without a bias
  std::unique_ptr<LowRankUpdate> lora;  ///< null: none
  Exchange exchange;

  /// The widths on this rank.
  std::size_t in_features() const { return weight.shape[layout == WeightLayout::in_out ? 0 : 1]; }
  std::size_t out_features() const { return weight.shape[layout == WeightLayout::in_out ? 1 : 0]; }

 private:
  Var with_update(Tape&, Var x, Var weight, Var bias);
  Var completed(Tape&, Var product, Var bias);
};

/// Parameters `name`.weight, initialized to 1, and `name`.bias, to 0.
struct LayerNorm : Module {
  LayerNorm(Module& parent, const std::string& name, std::size_t channels, float epsilon = 1e-5f);
  Var operator()(Tape&, Var x);
  /// add_layer_norm(): a + b, and its layer norm.
  SumAndNorm add_and_norm(Tape&, Var a, Var b);

  float epsilon;
  Parameter weight, bias;
  Exchange exchange;
};

/// Parameter `name`.weight, initialized to 1.
struct RmsNorm : Module {
  RmsNorm(Module& parent, const std::string& name, std::size_t channels, float epsilon = 1e-6f);
  Var operator()(Tape&, Var x);
  /// add_rms_norm(): a + b, and its RMS norm.
  SumAndNorm add_and_norm(Tape&, Var a, Var b);

  float epsilon;
  Parameter weight;
  Exchange exchange;
};

/// Parameter `name`.weight [rows, channels], initialized to normal(0, deviation). It is a table, and a head
/// that computes logits, or both with one weight.
struct Embedding : Module {
  Embedding(Module& parent, const std::string& name, std::size_t rows, std::size_t channels,
            float deviation = 1);
  Var operator()(Tape&, const Tensor& tokens);

  // ---- as a head; in the scope of the caller if it has the weight
  /// x[…, channels] → logits […, rows].
  Var logits(Tape& tape, Var x) { return gathered(tape, own_logits(tape, x)); }
  /// The logits of this rank's rows: all rows, unless several ranks share the layer.
  Var own_logits(Tape&, Var x);
  Var gathered(Tape&, Var own_logits);  ///< logits of all rows
  /// nn::cross_entropy() of the logits of all rows, which need not be gathered.
  Loss cross_entropy(Tape&, Var own_logits, const Tensor& targets);

  Parameter weight;
  Exchange exchange;

 private:
  ClassPart rows_of_rank() const;
};

/// Attention with its projections, as PyTorch's nn.MultiheadAttention with batch_first: parameters
/// `name`.in_proj_weight [3 channels, channels], initialized to uniform (Glorot and Bengio, 2010),
/// `name`.in_proj_bias and `name`.out_proj.bias, to 0, and `name`.out_proj.weight, like Linear.
struct MultiheadAttention : Module {
  /// Errc::invalid_argument if the channels do not divide into the heads.
  MultiheadAttention(Module& parent, const std::string& name, std::size_t channels, std::size_t heads,
                     double dropout = 0);
  /// query[B, T, channels], key and value[B, S, channels] → [B, T, channels]. A mask that is padding at the
  /// end of sequences (key_padding_mask) is `options.key_counts`. The heads are those of the layer. One
  /// value that is query, key and value is projected by one product. Dropout, of the probabilities, acts in
  /// training only.
  Var operator()(Tape&, Var query, Var key, Var value, const AttentionOptions& options = {});

  std::size_t heads;  ///< of this rank
  float dropout;
  Parameter in_proj_weight, in_proj_bias;
  Linear out_proj;
  Exchange exchange;  ///< of the projections into it
};

/// Acts in training only (Module::train()).
struct Dropout : Module {
  Dropout(Module& parent, const std::string& name, double p)
      : Module(parent, name), p(static_cast<float>(p)) {}
  Var operator()(Tape&, Var x) const;

  float p;
  Exchange exchange;
};

}  // namespace rz::nn
