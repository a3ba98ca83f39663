#pragma once
/// The training loop: data, model, strategy and optimizer.

#include <cstdint>
#include <memory>
#include <optional>
#include <string>

#include "autograd_lite/models/gpt2.h"
#include "comm/communicator.h"
#include "comm/device/graph.h"
#include "sharding/config/ds_config.h"
#include "sharding/optim/loss_scaler.h"
#include "sharding/strategies/strategy.h"
#include "tools/train_gpt/data/batches.h"
#include "tools/train_gpt/data/tokens.h"
#include "tools/train_gpt/model/checkpoint.h"
#include "tools/train_gpt/report/metrics.h"

namespace rz::train_gpt {

struct TrainerOptions {
  StrategyKind strategy = StrategyKind::ddp;
  StrategyOptions strategy_options;
  OptimizerConfig optimizer;
  double gradient_clipping = 0;  ///< 0: no clipping
  LossScaleOptions loss_scale;   ///< f16 only
  bool skip_overflow =
      false;          ///< skip updates whose gradients are not finite, instead of reporting divergence
  BatchPlan batches;  ///< rank and ranks are set from the communicator
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
  void load(const Checkpoint&);

  /// One update over accumulation × micro-batch samples of this rank. It is skipped if the gradients are not
  /// finite.
  UpdateReport update();
  /// True if the last update replayed a graph.
  bool ran_graph() const { return graph_.defined(); }
  /// Generates a continuation of `prompt` bytes; the prompt must not be empty.
  std::string sample(const std::string& prompt, std::size_t tokens, const Sampling&);
  /// Saves all parameters as safetensors; rank 0 writes. Throws Diverged if an element is not finite, unless
  /// `nonfinite` is set; an existing file is then unchanged.
  void save(const std::string& path, bool nonfinite = false);

  std::uint64_t updates_per_epoch() const { return batches_.updates_per_epoch(); }
  const Strategy& strategy() const { return *strategy_; }

 private:
  struct LossSum {
    double sum = 0, count = 0;
  };
  struct MicroBatch {
    Tensor inputs, targets;  // on the device of the model
  };
  void read_micro_batches();
  void draw_seeds();
  /// The part of an update that runs on the device of the model.
  void run_update();
  void run_update_as_graph();
  bool may_capture() const;
  /// Call before operations that may free memory used by the graph.
  void drop_graph();
  nn::CrossEntropy run_micro_batch(std::uint64_t micro_batch);
  LossSum sum_over_ranks(LossSum);
  double loss_scale() const { return scaler_ ? scaler_->scale() : 1; }
  void record_outcome(UpdateReport&);

  Gpt2& model_;
  Tokens tokens_;
  Communicator& comm_;
  TrainerOptions options_;
  Batches batches_;
  Stream stream_;
  Tape tape_;
  std::unique_ptr<Strategy> strategy_;  // declared after the tape it is attached to, so destroyed first
  std::unique_ptr<Optimizer> optimizer_;
  std::optional<LossScaler> scaler_;                      // f16 only
  std::vector<std::int32_t> next_inputs_, next_targets_;  // in host memory
  std::vector<std::uint64_t> next_seeds_;  // dropout seeds of the micro-batches, in host memory
  std::shared_ptr<std::uint64_t> seeds_;   // the same on the device of the model
  std::vector<MicroBatch> micro_batches_;
  std::vector<nn::CrossEntropy> losses_;  // of the last update
  Graph graph_;                           // one update with loss scale captured_scale_
  double captured_scale_ = 0;
  int uncaptured_updates_ = 0;  // updates without a graph since the last change
  std::uint64_t step_ = 0;
};

}  // namespace rz::train_gpt
