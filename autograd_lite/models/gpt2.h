#pragma once
/// GPT-2 (Radford et al., 2019), with the parameter names and layouts of Hugging Face's checkpoints.

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "autograd_lite/module.h"
#include "autograd_lite/nn.h"

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
};
/// Errc::config names an invalid key and its valid values.
void check(const Gpt2Config&);

class Gpt2 : public Module {
 public:
  /// Creates the parameters without memory. Initial values: weights normal(0, initializer_range), projections
  /// into the residual stream smaller by 1/sqrt(2 n_layer), norm weights 1, biases 0.
  explicit Gpt2(const Gpt2Config&);
  ~Gpt2() override;
  Gpt2(const Gpt2&) = delete;

  const Gpt2Config& config() const { return config_; }
  std::vector<Parameter*> parameters() override;
  /// The embeddings, one scope per block, and the head: the last norm with wte (tied) or lm_head.
  std::vector<const Scope*> scopes() override;

  struct Output {
    Var logits;             ///< [B, T, vocab_size]
    nn::CrossEntropy loss;  ///< loss.loss is undefined without targets
  };
  /// tokens and targets: i32 [B, T], T at most n_positions. Without targets only the logits are computed.
  Output forward(Tape&, const Tensor& tokens, const Tensor& targets = {});
  /// Logits [B, 1, vocab_size] of one position.
  Var logits_at(Tape&, const Tensor& tokens, std::size_t position);

  /// Keep only the input of each block and recompute the block in backward.
  bool checkpoint_blocks = false;
  /// Enables dropout; initially true.
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
  std::unique_ptr<nn::Linear> lm_head_;  ///< null if tied
  Scope embeddings_scope_, head_scope_;
};

/// Sampling parameters.
struct Sampling {
  double temperature = 1;  ///< divides the logits; 0 selects the most likely token
  std::size_t top_k = 0;   ///< restricts sampling to the k largest logits; 0: no restriction
  std::uint64_t seed = 0;
};

/// Samples `n` tokens after `prompt` and returns them. Each depends only on the last n_positions tokens, the
/// seed and its index. Dropout is off. Resets the tape before and after. All ranks of a ZeRO-3 group must
/// call it with the same arguments, since scopes gather parameters. Errc::invalid_argument for an empty
/// prompt or a negative temperature.
std::vector<std::int32_t> generate(Gpt2&, Tape&, std::span<const std::int32_t> prompt, std::size_t n,
                                   const Sampling& = {});

/// The first token, in token order, whose cumulative probability among the candidates exceeds `u`, in [0, 1).
/// Sums in double. `top_k` and `temperature` as in Sampling.
std::int32_t pick_token(std::span<const float> logits, double temperature, std::size_t top_k, double u);

}  // namespace rz
