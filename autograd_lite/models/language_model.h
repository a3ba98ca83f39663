#pragma once
/// What all causal language models have in common, and texts from them.

#include <cstdint>
#include <memory>
#include <span>
#include <string_view>
#include <vector>

#include "autograd_lite/nn/module.h"
#include "autograd_lite/ops.h"

namespace rz {

/// Sizes of a language model.
struct ModelFacts {
  std::string_view model_type;  ///< of its family in Hugging Face's config.json: "gpt2"
  std::string_view name;        ///< for people: "GPT-2"
  std::size_t layers = 0;
  std::size_t heads = 0;              ///< of the queries
  std::size_t head_size = 0;          ///< channels of a head
  std::size_t channels = 0;           ///< between layers
  std::size_t vocabulary = 0;         ///< tokens are less than it
  std::size_t positions = 0;          ///< the longest sequence
  std::size_t position_elements = 0;  ///< of a learned table of positions, which no product reads
};

/// A causal language model: hidden() and the logits of head(). A family implements the virtual functions.
class LanguageModel : public Module {
 public:
  struct Output {
    Var logits;     ///< [B, T, vocabulary]; on a device with a row stride (nn::linear_aligned)
    nn::Loss loss;  ///< loss.sum is undefined without targets
  };
  /// tokens and targets: i32 [B, T], T at most ModelFacts::positions; a target of -100 has no loss. Without
  /// targets only the logits are computed.
  Output forward(Tape&, const Tensor& tokens, const Tensor& targets = {});
  /// Logits [B, 1, vocabulary] of one position.
  Var logits_at(Tape&, const Tensor& tokens, std::size_t position);

  virtual ModelFacts facts() const = 0;
  /// Another model of this configuration, whose parameters have no memory.
  virtual std::unique_ptr<LanguageModel> without_values() const = 0;

 protected:
  using Module::Module;

  /// tokens [B, T] → [B, T, channels], before the last norm.
  virtual Var hidden(Tape&, const Tensor& tokens) = 0;
  /// The last norm and the logits, in head_scope().
  virtual Var head(Tape&, Var hidden) = 0;
  virtual const Scope& head_scope() const = 0;

 private:
  Var checked_hidden(Tape&, const Tensor& tokens);
};

/// Sampling parameters.
struct Sampling {
  double temperature = 1;  ///< divides the logits; 0 selects the most likely token
  std::size_t top_k = 0;   ///< restricts sampling to the k largest logits; 0: no restriction
  std::uint64_t seed = 0;
};

/// Samples `n` tokens after `prompt` and returns them. Each depends only on the last ModelFacts::positions
/// tokens, the seed and its index. Dropout is off. Resets the tape before and after. All ranks of a ZeRO-3
/// group must call it with the same arguments, since scopes gather parameters. Errc::invalid_argument for an
/// empty prompt or a negative temperature.
std::vector<std::int32_t> generate(LanguageModel&, Tape&, std::span<const std::int32_t> prompt, std::size_t n,
                                   const Sampling& = {});

/// The first token, in token order, whose cumulative probability among the candidates exceeds `u`, in [0, 1).
/// Sums in double. `top_k` and `temperature` as in Sampling.
std::int32_t pick_token(std::span<const float> logits, double temperature, std::size_t top_k, double u);

}  // namespace rz
