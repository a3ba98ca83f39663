#pragma once
/// GPT-NeoX (Black et al., arXiv:2204.06745), the shape of Pythia (Biderman et al., arXiv:2304.01373), with
/// the parameter names and layouts of Hugging Face's checkpoints.

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

/// Names and defaults are those of Hugging Face's GPTNeoXConfig.
struct GptNeoxConfig {
  std::size_t vocab_size = 50432;
  std::size_t hidden_size = 6144;
  std::size_t intermediate_size = 24576;
  std::size_t num_hidden_layers = 44;
  std::size_t num_attention_heads = 64;
  std::size_t max_position_embeddings = 2048;
  std::string hidden_act = "gelu";  ///< or gelu_python, gelu_new, gelu_fast, gelu_pytorch_tanh, relu, silu
  double layer_norm_eps = 1e-5;
  double rotary_pct = 0.25;           ///< the share of a head's channels that is rotated
  ops::RotaryOptions rope{};          ///< rotary_emb_base and rope_scaling
  bool use_parallel_residual = true;  ///< the MLP reads the input of the layer, not what attention adds to it
  bool attention_bias = true;
  bool tie_word_embeddings = false;
  double attention_dropout = 0, hidden_dropout = 0;
  double initializer_range = 0.02;  ///< standard deviation of initial weights
  /// Tokens of the tokenizer at the beginning and the end of a text, and of padding, for its file only.
  std::optional<std::size_t> bos_token_id{}, pad_token_id{};
  std::vector<std::size_t> eos_token_id{};  ///< each ends a text
};
/// Errc::config names an invalid key and its valid values.
void check(const GptNeoxConfig&);

/// The parts of a GPT-NeoX below "gpt_neox".
namespace gpt_neox {

struct Attention : Module {
  Attention(Module& parent, const std::string& name, const GptNeoxConfig&, std::size_t layer);
  Var operator()(Tape&, Var x, const ops::RotaryTables&, const Tensor& document_starts, KvCache*);

  std::size_t layer, head_size;
  float dropout;
  nn::Linear query_key_value;  ///< rows of q, k and v side by side for each head
  nn::Linear dense;
};

struct Mlp : Module {
  Mlp(Module& parent, const std::string& name, const GptNeoxConfig&);
  Var operator()(Tape&, Var x);

  Var (*activation)(Tape&, Var);
  nn::Linear dense_h_to_4h, dense_4h_to_h;
};

/// One scope.
struct Layer : Module {
  Layer(Module& parent, const std::string& name, const GptNeoxConfig&, std::size_t layer);
  Var operator()(Tape&, Var x, const ops::RotaryTables&, const Tensor& document_starts, KvCache*);

  bool parallel;
  nn::LayerNorm input_layernorm, post_attention_layernorm;
  Attention attention;
  Mlp mlp;
  nn::Dropout post_attention_dropout, post_mlp_dropout;
};

struct Model : Module {
  Model(Module& parent, const std::string& name, const GptNeoxConfig&);

  nn::Embedding embed_in;
  nn::Dropout emb_dropout;
  nn::ModuleList<Layer> layers;
  nn::LayerNorm final_layer_norm;
};

}  // namespace gpt_neox

class GptNeox : public LanguageModel {
 public:
  /// Creates the parameters without memory. Initial values: weights normal(0, initializer_range), norm
  /// weights 1, biases 0. Scopes: the embedding, one per layer, and the head: the last norm with embed_in
  /// (tied) or embed_out.
  explicit GptNeox(const GptNeoxConfig&);
  /// Makes it a part of another model.
  GptNeox(Module& parent, const std::string& name, const GptNeoxConfig&);

  const GptNeoxConfig& config() const { return config_; }

  ModelFacts facts() const override;
  ParallelPlan parallel_plan() const override;
  std::unique_ptr<LanguageModel> without_values() const override;

 private:
  Var hidden(Tape&, const Tensor& tokens, const Tensor& document_starts, KvCache*) override;
  Var last_norm(Tape& tape, Var x) override { return model_.final_layer_norm(tape, x); }
  void register_head();

  GptNeoxConfig config_;
  gpt_neox::Model model_;
  nn::RotaryEmbedding rotary_;
};

}  // namespace rz
