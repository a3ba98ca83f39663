#pragma once
/// Texts from a language model.

#include <cstdint>
#include <functional>
#include <span>
#include <vector>

#include "language_model.h"

namespace rz {

/// Names and meanings are those of Hugging Face's GenerationConfig; its logits processors apply in the order
/// of the members.
struct GenerationConfig {
  std::size_t max_new_tokens = 20;
  std::size_t max_length = 0;            ///< of a text with its prompt; 0: any
  double repetition_penalty = 1;         ///< of tokens in the text: divides logits above 0, multiplies others
  std::size_t no_repeat_ngram_size = 0;  ///< so many tokens in a row occur once in a text; 0: any
  std::vector<std::vector<std::int32_t>> bad_words_ids{};  ///< tokens in a row that no text gets
  std::size_t min_new_tokens = 0;                          ///< before them no token of eos_token_id
  std::vector<std::int32_t> suppress_tokens{};             ///< tokens that no text gets
  double temperature = 1;  ///< divides the logits; 0 selects the likeliest token
  std::size_t top_k = 0;   ///< the k likeliest tokens; 0: all
  double top_p = 1;        ///< the fewest likeliest tokens whose probabilities sum up to it
  double min_p = 0;        ///< tokens at least this share of the likeliest one's probability
  std::vector<std::int32_t> eos_token_id{};  ///< each ends a text, as its last token
  std::uint64_t seed = 0;
  bool use_cache = true;
  /// Called for each token of a text, with the index of its prompt.
  std::function<void(std::size_t text, std::int32_t token)> on_token{};
  /// Called after it; a text for which it returns true ends.
  std::function<bool(std::size_t text, std::int32_t token)> stopping_criteria{};
};

/// Continues each prompt and returns the new tokens. A token depends on the text so far, its last
/// ModelFacts::positions tokens at most, the seed, and the indices of its prompt and of itself. With a cache
/// the logits of a text are those without one up to rounding; beyond the positions of the model, and where
/// ModelFacts::length_matters_from is exceeded, there is no cache, and each token takes a pass over all
/// positions. Dropout is off. Resets the tape before and after.
/// All ranks of a ZeRO-3 group must call it with the same arguments, since scopes gather parameters.
/// Errc::invalid_argument for an empty prompt or a value out of range.
std::vector<std::vector<std::int32_t>> generate(LanguageModel&, Tape&,
                                                std::span<const std::vector<std::int32_t>> prompts,
                                                const GenerationConfig&);

/// The token after `text`: the first one, in token order, whose cumulative probability among the candidates
/// exceeds `u`, in [0, 1). Sums in double.
std::int32_t pick_token(std::span<const float> logits, const GenerationConfig&,
                        std::span<const std::int32_t> text, double u);

}  // namespace rz
