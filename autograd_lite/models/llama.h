#pragma once
/// Llama (Touvron et al., arXiv:2302.13971; Grattafiori et al., arXiv:2407.21783) and models of its shape:
/// Mistral (Jiang et al., arXiv:2310.06825) with its window, Qwen2 (Yang et al., arXiv:2407.10671) with its
/// biases. Parameters have the names of Hugging Face's checkpoints.

#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "../attention_ops.h"
#include "../nn/containers.h"
#include "../nn/layers.h"
#include "kv_cache.h"
#include "language_model.h"

namespace rz {

/// Names and defaults are those of Hugging Face's LlamaConfig, except where a comment states another.
struct LlamaConfig {
  std::string_view model_type = "llama";  ///< of the family in Hugging Face's config.json
  std::string_view name = "Llama";        ///< for people
  std::size_t vocab_size = 32000;
  std::size_t hidden_size = 4096;
  std::size_t intermediate_size = 11008;
  std::size_t num_hidden_layers = 32;
  std::size_t num_attention_heads = 32;
  std::size_t num_key_value_heads = 32;
  std::size_t head_dim = 128;
  std::size_t max_position_embeddings = 2048;
  double rms_norm_eps = 1e-6;
  ops::RotaryOptions rope{};  ///< rope_theta and rope_scaling
  bool tie_word_embeddings = false;
  bool qkv_bias = false, o_bias = false;  ///< attention_bias sets both
  bool mlp_bias = false;
  bool qk_norm = false;               ///< q_norm and k_norm: RMS norms of each head, before its rotation
  std::size_t sliding_window = 0;     ///< keys that a query attends to; 0: all before it
  std::size_t max_window_layers = 0;  ///< the first layer with a window
  double attention_dropout = 0;
  double initializer_range = 0.02;  ///< standard deviation of initial weights
  /// Tokens of the tokenizer at the beginning of a text, and of padding, for its file only.
  std::optional<std::size_t> bos_token_id{}, pad_token_id{};
  std::vector<std::size_t> eos_token_id{};  ///< each ends a text
};
/// Errc::config names an invalid key and its valid values.
void check(const LlamaConfig&);

/// The parts of a Llama below "model".
namespace llama {

struct Attention : Module {
  Attention(Module& parent, const std::string& name, const LlamaConfig&, std::size_t layer);
  Var operator()(Tape&, Var x, const ops::RotaryTables&, const Tensor& document_starts, KvCache*);

  std::size_t layer, head_size;
  ops::AttentionOptions options;  ///< without heads
  float dropout;
  nn::Linear q_proj, k_proj, v_proj, o_proj;
  std::optional<nn::RmsNorm> q_norm, k_norm;
};

struct Mlp : Module {
  Mlp(Module& parent, const std::string& name, const LlamaConfig&);
  Var operator()(Tape&, Var x);

  nn::Linear gate_proj, up_proj, down_proj;
};

/// One scope.
struct DecoderLayer : Module {
  DecoderLayer(Module& parent, const std::string& name, const LlamaConfig&, std::size_t layer);
  Var operator()(Tape&, Var x, const ops::RotaryTables&, const Tensor& document_starts, KvCache*);

  nn::RmsNorm input_layernorm;
  Attention self_attn;
  nn::RmsNorm post_attention_layernorm;
  Mlp mlp;
};

struct Model : Module {
  Model(Module& parent, const std::string& name, const LlamaConfig&);

  nn::Embedding embed_tokens;
  nn::ModuleList<DecoderLayer> layers;
  nn::RmsNorm norm;
};

}  // namespace llama

class Llama : public LanguageModel {
 public:
  /// Creates the parameters without memory. Initial values: weights normal(0, initializer_range), norm
  /// weights 1, biases 0. Scopes: the embedding, one per layer, and the head: the last norm with embed_tokens
  /// (tied) or lm_head.
  explicit Llama(const LlamaConfig&);
  /// Makes it a part of another model.
  Llama(Module& parent, const std::string& name, const LlamaConfig&);

  const LlamaConfig& config() const { return config_; }

  ModelFacts facts() const override;
  ParallelPlan parallel_plan() const override;
  std::unique_ptr<LanguageModel> without_values() const override;

 private:
  Var hidden(Tape&, const Tensor& tokens, const Tensor& document_starts, KvCache*) override;
  Var last_norm(Tape& tape, Var x) override { return model_.norm(tape, x); }
  void register_head();

  LlamaConfig config_;
  llama::Model model_;
  nn::RotaryEmbedding rotary_;
};

}  // namespace rz
