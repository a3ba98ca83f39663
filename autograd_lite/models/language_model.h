#pragma once
/// What all causal language models have in common.

#include <initializer_list>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "../nn/layers.h"
#include "../ops.h"

namespace rz {

class KvCache;

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
  /// Logits of a longer sequence depend on its length, padding included ("dynamic" rotary scaling); 0: none.
  std::size_t length_matters_from = 0;
};

/// What the configurations of all families require. Errc::config names the key and what is expected.
/// Sizes: not 0, and "vocab_size" below 2^31. Numbers: finite, and what `valid` states. Probabilities, of
/// dropout: at least 0, less than 1.
void check_sizes(std::initializer_list<std::pair<const char*, std::size_t>>);
void check_number(const char* key, double value, bool valid, const char* expected);
void check_probability(const char* key, double value);

/// A causal language model: hidden(), the last norm, and the logits. A family implements the virtual
/// functions.
class LanguageModel : public Module {
 public:
  struct Output {
    /// [B, T, vocabulary]; on a device with a row stride (nn::linear_aligned). Undefined with targets if
    /// several ranks share the head.
    Var logits;
    nn::Loss loss;  ///< loss.sum is undefined without targets
  };
  /// tokens and targets: i32 [B, T], T at most ModelFacts::positions; a target of -100 has no loss. Without
  /// targets only the logits are computed; with them they are not gathered if ranks share the head. Texts of
  /// several documents: with document_starts, i32 [B, T] on the stream's device (tensor/attention_ops.h), no
  /// document attends to another. Rotary positions are relative; learned ones (GPT-2) are not restarted, and
  /// count from the beginning of the text.
  Output forward(Tape&, const Tensor& tokens, const Tensor& targets = {}, const Tensor& document_starts = {});
  /// Logits [B, 1, vocabulary] of one position.
  Var logits_at(Tape&, const Tensor& tokens, std::size_t position);
  /// Logits [B, 1, vocabulary] after each sequence of a cache, which takes counts[b] of the tokens i32 [B, T]
  /// of sequence b, 0 for one whose logits are not needed any more; the others are padding. The first pass
  /// may have any T, later ones have 1. Records nothing: there is no gradient. Errc::invalid_argument as
  /// KvCache::begin().
  Var next_logits(Tape&, const Tensor& tokens, const std::vector<std::size_t>& counts, KvCache&);

  virtual ModelFacts facts() const = 0;
  /// What language_model_from_config() knows of the model besides its sizes.
  struct Origin {
    std::string folder{};                       ///< of the config.json, from the root; empty: made otherwise
    std::string name{};                         ///< the same folder as it was given
    std::vector<std::string> target_modules{};  ///< of add_lora() without any: PEFT's for the family
  };
  const Origin& origin() const { return origin_; }
  void set_origin(Origin origin) { origin_ = std::move(origin); }
  /// How ranks share its layers (sharding/parallel/parallelize.h).
  virtual ParallelPlan parallel_plan() const = 0;
  /// Another model of this configuration, whose parameters have no memory.
  virtual std::unique_ptr<LanguageModel> without_values() const = 0;

  /// The layer of the logits, which is used without being called; null if its weight is the embedding's.
  const nn::Embedding* lm_head() const { return lm_head_ ? &*lm_head_ : nullptr; }

 protected:
  using Module::Module;

  /// tokens [B, T] → [B, T, channels], before the last norm. With a cache the tokens follow those that it
  /// has, and the keys and values of all layers go into it. Without one attention has these document_starts.
  virtual Var hidden(Tape&, const Tensor& tokens, const Tensor& document_starts, KvCache*) = 0;
  /// In the scope of the head.
  virtual Var last_norm(Tape&, Var hidden) = 0;

  /// In constructors, when the body is complete: the head, a scope of the body, with the last norm and the
  /// table of the embedding if it is tied to it. Otherwise it has `name`.weight, of the shape of the table,
  /// with initial values normal(0, deviation).
  void register_head(Module& body, Module& last_norm, nn::Embedding& table, bool tied, double deviation,
                     const std::string& name = "lm_head");

 private:
  Var checked_hidden(Tape&, const Tensor& tokens, const Tensor& document_starts, KvCache* = nullptr);

  Origin origin_;
  std::optional<nn::Embedding> lm_head_;  ///< none if tied
  nn::Embedding* head_ = nullptr;
  const Scope* head_scope_ = nullptr;
};

}  // namespace rz
