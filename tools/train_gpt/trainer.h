#pragma once
/// The training loop: data, model, strategy and optimizer, an update at a time.

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
  double gradient_clipping = 0;  ///< 0: none
  LossScaleOptions loss_scale;   ///< of f16
  bool skip_overflow = false;    ///< an update whose gradients are not finite is no divergence
  BatchPlan batches;             ///< its rank and ranks come from the communicator
  std::size_t seq_len = 0;
  std::uint64_t seed = 0;  ///< of dropout
  int threads = 1;         ///< of a host stream
  bool graph = true;  ///< on a device: updates are captured in a CUDA graph once they are always the same
};

/// Every rank makes one, with the same options, and calls the same functions in the same order: all are
/// collective, but for init() and load(), of which each rank calls one. Errors of the communicator pass
/// through.
class Trainer {
 public:
  Trainer(Gpt2&, Tokens, Communicator&, TrainerOptions);

  void init(std::uint64_t seed);
  void load(const Checkpoint&);

  /// One update over accumulation × micro-batch samples of this rank. One whose gradients are not finite is
  /// left out.
  UpdateReport update();
  /// Whether the last update was a run of a graph.
  bool ran_graph() const { return graph_.defined(); }
  /// Continues a text of bytes, which must not be empty.
  std::string sample(const std::string& prompt, std::size_t tokens, const Sampling&);
  /// Every parameter, whole, as safetensors; rank 0 writes. Diverged if an element is not finite, unless
  /// `nonfinite` allows that: `path` is then as it was.
  void save(const std::string& path, bool nonfinite = false);

  std::uint64_t updates_per_epoch() const { return batches_.updates_per_epoch(); }
  const Strategy& strategy() const { return *strategy_; }

 private:
  struct LossSum {
    double sum = 0, count = 0;
  };
  struct MicroBatch {
    Tensor inputs, targets;  // where the model is
  };
  void read_micro_batches();
  void draw_seeds();
  /// All that an update does where the model is.
  void run_update();
  void run_update_as_graph();
  bool may_capture() const;
  /// Its memory may be given back by what comes now.
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
  std::unique_ptr<Strategy> strategy_;  // lives shorter than the tape that it is attached to
  std::unique_ptr<Optimizer> optimizer_;
  std::optional<LossScaler> scaler_;                      // in f16
  std::vector<std::int32_t> next_inputs_, next_targets_;  // on the host
  std::vector<std::uint64_t> next_seeds_;                 // of micro-batches, on the host
  std::shared_ptr<std::uint64_t> seeds_;                  // where the model is
  std::vector<MicroBatch> micro_batches_;
  std::vector<nn::CrossEntropy> losses_;  // of the last update
  Graph graph_;                           // of an update with this loss scale
  double captured_scale_ = 0;
  int uncaptured_updates_ = 0;  // without a graph, since anything changed
  std::uint64_t step_ = 0;
};

}  // namespace rz::train_gpt
