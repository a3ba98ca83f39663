#pragma once
/// The training loop: data, model, strategy and optimizer.

#include <cstdint>
#include <memory>
#include <optional>
#include <string>

#include "autograd_lite/models/gpt2.h"
#include "comm/communicator.h"
#include "sharding/config/ds_config.h"
#include "sharding/data/loader.h"
#include "sharding/data/tokens.h"
#include "sharding/engine/configured.h"
#include "sharding/engine/update/dropout_seeds.h"
#include "sharding/engine/update/update_graph.h"
#include "sharding/huggingface/pretrained_weights.h"
#include "sharding/huggingface/save_pretrained.h"
#include "sharding/optim/loss_scaler.h"
#include "sharding/strategies/strategy.h"
#include "tools/train_gpt/report/metrics.h"

namespace rz::train_gpt {

struct BatchPlan {
  BatchSizes sizes;
  bool shuffle = true, drop_last = false;
  std::uint64_t seed = 0;
};

struct TrainerOptions {
  StrategyKind strategy = StrategyKind::ddp;
  StrategyOptions strategy_options;
  OptimizerConfig optimizer;
  LrSchedule schedule;  ///< of optimizer.lr
  Decay decay = Decay::matrices;
  double gradient_clipping = 0;  ///< 0: no clipping
  LossScaleOptions loss_scale;   ///< f16 only
  /// Skip updates whose gradients are not finite, instead of reporting divergence.
  bool skip_overflow = false;
  BatchPlan batches;
  std::size_t seq_len = 0;
  std::uint64_t seed = 0;  ///< dropout seed
  int threads = 1;         ///< threads of the host stream
  bool graph = true;       ///< on a device: capture updates in a CUDA graph once they are identical
};

/// Every rank creates a Trainer with the same options and calls the same functions in the same order. All are
/// collective, except init() and load(), of which each rank calls one. Errors of the communicator propagate.
class Trainer {
 public:
  Trainer(Gpt2&, Tokens, Communicator&, TrainerOptions);

  void init(std::uint64_t seed);
  void load(const PretrainedWeights&);

  /// One update over accumulation × micro-batch samples of this rank. It is skipped if the gradients are not
  /// finite.
  UpdateReport update();
  /// True if the last update replayed a graph.
  bool ran_graph() const { return graph_.defined(); }
  /// Generates a continuation of `prompt` bytes; the prompt must not be empty.
  std::string sample(const std::string& prompt, std::size_t tokens, const Sampling&);
  /// Writes model.safetensors and config.json; see save_pretrained().
  void save(const std::string& folder, const SaveOptions& = {});

  /// Number of updates that cover every sample about once; at least 1.
  std::uint64_t updates_per_epoch() const { return loader_.size() / micro_batches_.size(); }
  const Strategy& strategy() const { return *strategy_; }

 private:
  struct LossSum {
    double sum = 0, count = 0;
  };
  void read_micro_batches();
  /// The part of an update that runs on the device of the model.
  void run_update();
  nn::Loss run_micro_batch(std::size_t micro_batch);
  /// The loss of the last update, summed over all ranks.
  LossSum sum_losses();
  double loss_scale() const { return scaler_ ? scaler_->scale() : 1; }
  void set_learning_rates();
  void record_outcome(UpdateReport&);

  Gpt2& model_;
  Communicator& comm_;
  TrainerOptions options_;
  Stream stream_;
  Tape tape_;
  std::unique_ptr<Strategy> strategy_;  // declared after the tape it is attached to, so destroyed first
  std::unique_ptr<Optimizer> optimizer_;
  std::vector<double> base_rates_;    // of the groups, before the schedule
  std::optional<LossScaler> scaler_;  // f16 only
  Loader loader_;
  std::vector<const Batch*> micro_batches_;  // of an update
  DropoutSeeds seeds_;
  UpdateGraph graph_;
  std::vector<nn::Loss> losses_;  // of the last update
  std::uint64_t step_ = 0;
};

}  // namespace rz::train_gpt
