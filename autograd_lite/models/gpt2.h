#pragma once
/// GPT-2 (Radford et al., 2019) with the names and layouts of Hugging Face's checkpoints.

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "autograd_lite/module.h"
#include "autograd_lite/nn.h"

namespace rz {

/// The keys of Hugging Face's GPT-2 configuration that matter here.
struct Gpt2Config {
  std::size_t n_layer = 12;
  std::size_t n_head = 12;
  std::size_t n_embd = 768;
  std::size_t n_positions = 1024;
  std::size_t vocab_size = 50257;
  double layer_norm_epsilon = 1e-5;
  bool tie_word_embeddings = true;
  double embd_pdrop = 0, attn_pdrop = 0, resid_pdrop = 0;
  double initializer_range = 0.02;  ///< standard deviation of fresh weights
};
/// Errc::config with the key and what it must be.
void check(const Gpt2Config&);

class Gpt2 : public Module {
 public:
  /// Parameters have names, shapes and their rule of initialisation (normal(0, 0.02); projections into the
  /// residual stream by 1/sqrt(2 n_layer) less; norms one and zero; biases zero), but no memory yet.
  explicit Gpt2(const Gpt2Config&);
  ~Gpt2() override;
  Gpt2(const Gpt2&) = delete;

  const Gpt2Config& config() const { return config_; }
  std::vector<Parameter*> parameters() override;
  /// Embeddings, one a block, and the head: the last norm with wte (tied) or lm_head.
  std::vector<const Scope*> scopes() override;

  struct Output {
    Var logits;             ///< [B, T, vocab_size]
    nn::CrossEntropy loss;  ///< loss.loss is undefined without targets
  };
  /// tokens and targets: i32 [B, T], T at most n_positions; undefined targets: logits only.
  Output forward(Tape&, const Tensor& tokens, const Tensor& targets = {});
  /// Logits [B, 1, vocab_size] of one position alone.
  Var logits_at(Tape&, const Tensor& tokens, std::size_t position);

  /// Keep a block's input only, and run the block again in backward.
  bool checkpoint_blocks = false;
  /// Dropout is active; true at first.
  void set_training(bool);
  bool training() const { return dropout_.training; }

 private:
  struct Block;
  Var hidden(Tape&, const Tensor& tokens);
  Var block(Tape&, Block&, Var x);
  template <class F>
  Var head(Tape&, const F& use_logits, Var x);

  Gpt2Config config_;
  nn::Embedding wte_, wpe_;
  nn::Dropout dropout_;
  std::vector<std::unique_ptr<Block>> blocks_;
  nn::LayerNorm ln_f_;
  std::unique_ptr<nn::Linear> lm_head_;  ///< none if tied
  Scope embeddings_scope_, head_scope_;
};

/// How tokens are drawn.
struct Sampling {
  double temperature = 1;  ///< divides the logits; 0: the likeliest token
  std::size_t top_k = 0;   ///< only the tokens of the k largest logits are drawn; 0: any
  std::uint64_t seed = 0;
};

/// Draws `n` tokens after `prompt` and returns them. Each depends on the last n_positions tokens, on the seed
/// and its number only. No dropout. Every rank of a ZeRO-3 group must call it with the same arguments, for
/// the scopes gather. The tape is reset before and after.
std::vector<std::int32_t> generate(Gpt2&, Tape&, std::span<const std::int32_t> prompt, std::size_t n,
                                   const Sampling& = {});

/// The token at which the cumulated probability of the candidates first exceeds `u`, of [0, 1). Sums are in
/// double and in the order of tokens. `top_k` and `temperature` as in Sampling.
std::int32_t pick_token(std::span<const float> logits, double temperature, std::size_t top_k, double u);

}  // namespace rz
