#pragma once
/// The training loop: data, model, strategy and optimizer, an update at a time.

#include <cstdint>
#include <memory>
#include <string>

#include "autograd_lite/models/gpt2.h"
#include "comm/communicator.h"
#include "sharding/ds_config.h"
#include "sharding/strategy.h"
#include "tools/train_gpt/batches.h"
#include "tools/train_gpt/checkpoint.h"
#include "tools/train_gpt/metrics.h"
#include "tools/train_gpt/tokens.h"

namespace rz::train_gpt {

struct TrainerOptions {
  StrategyKind strategy = StrategyKind::ddp;
  StrategyOptions strategy_options;
  OptimizerConfig optimizer;
  double gradient_clipping = 0;  ///< 0: none
  BatchPlan batches;             ///< its rank and ranks come from the communicator
  std::size_t seq_len = 0;
  std::uint64_t seed = 0;  ///< of dropout and samples
  int threads = 1;         ///< of a host stream
};

/// Every rank makes one, with the same options, and calls the same functions in the same order: all are
/// collective, but for initialise() and load(), of which each rank calls one. Errors of the communicator pass
/// through.
class Trainer {
 public:
  Trainer(Gpt2&, Tokens, Communicator&, TrainerOptions);

  void initialise(std::uint64_t seed);
  void load(const Checkpoint&);

  /// One update over accumulation × micro-batch samples of this rank.
  UpdateReport update();
  /// Continues a text of bytes, which must not be empty.
  std::string sample(const std::string& prompt, std::size_t tokens);
  /// Every parameter, whole, as safetensors; rank 0 writes.
  void save(const std::string& path);

  std::uint64_t updates_per_epoch() const { return batches_.updates_per_epoch(); }
  const Strategy& strategy() const { return *strategy_; }

 private:
  struct LossSum {
    double sum = 0, count = 0;
  };
  nn::CrossEntropy run_micro_batch(std::uint64_t micro_batch);
  LossSum over_ranks(LossSum);

  Gpt2& model_;
  Tokens tokens_;
  Communicator& comm_;
  TrainerOptions options_;
  Batches batches_;
  Stream stream_;
  Tape tape_;
  std::unique_ptr<Strategy> strategy_;  // lives shorter than the tape that it is attached to
  std::unique_ptr<Optimizer> optimizer_;
  std::vector<std::int32_t> next_inputs_, next_targets_;  // on the host
  Tensor inputs_, targets_;                               // where the model is
  std::uint64_t step_ = 0;
};

}  // namespace rz::train_gpt
