#pragma once
/// All inputs of a run. They are read and checked before anything is written.

#include <memory>
#include <optional>
#include <string>

#include "autograd_lite/models/language_model.h"
#include "sharding/config/ds_config.h"
#include "sharding/data/tokens.h"
#include "sharding/huggingface/pretrained_weights.h"
#include "sharding/lm/options.h"
#include "sharding/lm/validation.h"
#include "sharding/parallel/world.h"
#include "sharding/strategy/strategy.h"
#include "sharding/tokenizer/tokenizer.h"

namespace rz::lm {

struct Inputs {
  std::unique_ptr<LanguageModel> model;  ///< without allocated parameters
  DsConfig ds;
  BatchSizes sizes;
  StrategyKind strategy = StrategyKind::ddp;
  Tokens tokens;
  /// Of the tokens, if it is known; needed for text and samples of text.
  std::optional<Tokenizer> tokenizer;
  std::string tokenizer_name;                  ///< its folder; empty: bytes, because nothing else is known
  double tokenize_seconds = 0;                 ///< 0: the data are tokens
  std::uint64_t samples = 0;                   ///< that are trained on
  std::optional<std::int32_t> document_end{};  ///< with --document-mask
  std::size_t seq_len = 0;
  std::optional<ValidationData> validation;  ///< none: nothing is evaluated
  std::optional<PretrainedWeights> checkpoint;
};

/// Model, configuration, and the tokenizer if text is read or sampled. Tokens are read only if --steps is not
/// given and the schedule depends on the number of updates. `ranks_per_node`: 0 if nodes have different
/// numbers. Errors as below.
Inputs read_model_inputs(const Options&, int ranks, int ranks_per_node = 0);
/// Errors are one line: place, problem, remedy. Rank 0 also checks that the outputs are writable, and checks
/// the tokens (Tokens::check_vocabulary), and shows progress of a tokenizer.
Inputs read_inputs(const Options&, int rank, int ranks, int ranks_per_node = 0);

/// Throws Errc::mismatch on every rank if a rank differs from rank 0; it names the first such rank and the
/// difference. Compared are flags, seed, model, configuration, tokenizer, data (count and hash of tokens) and
/// checkpoint (hash). Above a few MiB the hash covers samples spread over the data or checkpoint. Threads,
/// paths and devices may differ. Collective.
void require_same_run(const Options&, const Inputs&, Communicator&);

/// The same on every rank of the world, with require_same_run(): every rank throws the error of the first one
/// that has one. Collective.
Inputs read_inputs(const Options&, World&);

/// The updates of the passes that were given, or of one.
std::int64_t updates_of_passes(const Options&, std::uint64_t updates_of_a_pass);

/// "GPT-2, 12 layers, 12 heads, 768 channels, vocabulary 50257, 124.44 M parameters"
std::string describe_model(LanguageModel&);

}  // namespace rz::lm
