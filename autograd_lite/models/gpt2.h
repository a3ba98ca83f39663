#pragma once
/// GPT-2 (Radford et al., 2019), with the parameter names and layouts of Hugging Face's checkpoints.

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "../nn/containers.h"
#include "../nn/layers.h"
#include "kv_cache.h"
#include "language_model.h"

namespace rz {

/// The supported keys of Hugging Face's GPT-2 configuration.
struct Gpt2Config {
  std::size_t n_layer = 12;
  std::size_t n_head = 12;
  std::size_t n_embd = 768;
  std::size_t n_positions = 1024;
  std::size_t vocab_size = 50257;
  double layer_norm_epsilon = 1e-5;
  bool tie_word_embeddings = true;
  double embd_pdrop = 0, attn_pdrop = 0, resid_pdrop = 0;
  double initializer_range = 0.02;  ///< standard deviation of initial weights
  /// Tokens of the tokenizer at the beginning of a text and of padding, and those that end a text, for its
  /// file only.
  std::optional<std::size_t> bos_token_id, pad_token_id;
  std::vector<std::size_t> eos_token_id;
};
/// Errc::config names an invalid key and its valid values.
void check(const Gpt2Config&);

/// The parts of GPT-2 below "transformer".
namespace gpt2 {

struct Attention : Module {
  Attention(Module& parent, const std::string& name, const Gpt2Config&, std::size_t layer);
  Var operator()(Tape&, Var x, const Tensor& document_starts, KvCache*);

  std::size_t layer;
  std::size_t head_size;
  float probability_dropout;
  nn::Linear c_attn, c_proj;
  nn::Dropout resid_dropout;
};

struct Mlp : Module {
  Mlp(Module& parent, const std::string& name, const Gpt2Config&);
  Var operator()(Tape&, Var x);

  nn::Linear c_fc, c_proj;
  nn::Dropout dropout;
};

/// One scope.
struct Block : Module {
  Block(Module& parent, const std::string& name, const Gpt2Config&, std::size_t layer);
  Var operator()(Tape&, Var x, const Tensor& document_starts, KvCache*);

  nn::LayerNorm ln_1;
  Attention attn;
  nn::LayerNorm ln_2;
  Mlp mlp;
};

/// The embeddings are one scope.
struct Transformer : Module {
  Transformer(Module& parent, const std::string& name, const Gpt2Config&);
  /// tokens: i32 [B, T] → [B, T, n_embd], before the last norm.
  Var operator()(Tape&, const Tensor& tokens, const Tensor& document_starts, KvCache*);

  nn::Embedding wte, wpe;
  nn::Dropout drop;
  nn::ModuleList<Block> h;
  nn::LayerNorm ln_f;

 private:
  Var embedded(Tape&, const Tensor& tokens, KvCache*);
};

}  // namespace gpt2

class Gpt2 : public LanguageModel {
 public:
  /// Creates the parameters without memory. Initial values: weights normal(0, initializer_range), projections
  /// into the residual stream smaller by 1/sqrt(2 n_layer), norm weights 1, biases 0. Scopes: the embeddings,
  /// one per block, and the head: the last norm with wte (tied) or lm_head.
  explicit Gpt2(const Gpt2Config&);
  /// Makes it a part of another model.
  Gpt2(Module& parent, const std::string& name, const Gpt2Config&);

  const Gpt2Config& config() const { return config_; }

  ModelFacts facts() const override;
  ParallelPlan parallel_plan() const override;
  std::unique_ptr<LanguageModel> without_values() const override;

 private:
  Var hidden(Tape&, const Tensor& tokens, const Tensor& document_starts, KvCache*) override;
  Var last_norm(Tape& tape, Var x) override { return transformer_.ln_f(tape, x); }
  void register_head();

  Gpt2Config config_;
  gpt2::Transformer transformer_;
};

}  // namespace rz
