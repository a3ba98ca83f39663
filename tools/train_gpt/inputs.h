#pragma once
/// All inputs of a run. They are read and checked before anything is written.

#include <memory>
#include <optional>
#include <string>

#include "autograd_lite/models/gpt2.h"
#include "sharding/config/ds_config.h"
#include "sharding/data/tokens/tokens.h"
#include "sharding/huggingface/pretrained_weights.h"
#include "sharding/strategies/strategy.h"
#include "tools/train_gpt/options.h"

namespace rz::train_gpt {

struct Inputs {
  std::unique_ptr<Gpt2> model;  ///< without allocated parameters
  DsConfig ds;
  BatchSizes sizes;
  StrategyKind strategy = StrategyKind::ddp;
  Tokens tokens;
  std::uint64_t samples = 0;
  std::size_t seq_len = 0;
  std::optional<PretrainedWeights> checkpoint;
};

/// Errors are one line: place, problem, remedy. Rank 0 also checks that the outputs are writable, and checks
/// the tokens (Tokens::check_vocabulary).
Inputs read_inputs(const Options&, int rank, int ranks);

}  // namespace rz::train_gpt
