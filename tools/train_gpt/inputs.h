#pragma once
/// Everything that a run reads, read and checked before anything is written.

#include <memory>
#include <optional>
#include <string>

#include "autograd_lite/models/gpt2.h"
#include "sharding/config/ds_config.h"
#include "sharding/strategies/strategy.h"
#include "tools/train_gpt/data/tokens.h"
#include "tools/train_gpt/model/checkpoint.h"
#include "tools/train_gpt/options.h"

namespace rz::train_gpt {

struct Inputs {
  std::unique_ptr<Gpt2> model;  ///< without memory
  DsConfig ds;
  BatchSizes sizes;
  StrategyKind strategy = StrategyKind::ddp;
  Tokens tokens;
  std::uint64_t samples = 0;
  std::size_t seq_len = 0;
  std::optional<Checkpoint> checkpoint;
};

/// Errors are one line: what, where, what to do. Rank 0 also checks that the outputs can be written, and
/// looks at tokens (Tokens::check_vocabulary).
Inputs read_inputs(const Options&, int rank, int ranks);

}  // namespace rz::train_gpt
