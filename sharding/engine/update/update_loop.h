#pragma once
/// The passes and updates of a training loop.

#include <chrono>
#include <cstdint>
#include <functional>
#include <optional>

#include "autograd_lite/ops.h"
#include "autograd_lite/tape.h"
#include "sharding/engine/monitor/step_monitor.h"
#include "sharding/engine/monitor/step_report.h"
#include "sharding/engine/update/accumulation.h"
#include "sharding/engine/update/dropout_seeds.h"
#include "sharding/engine/update/training_step.h"
#include "sharding/engine/update/update_graph.h"
#include "sharding/engine/update/update_losses.h"
#include "sharding/strategies/strategy.h"
#include "sharding/world/world.h"

namespace rz {

struct UpdateLoopOptions {
  std::int64_t accumulation = 1;         ///< micro-batches of an update
  std::int64_t samples = 0;              ///< of an update, over all ranks
  std::optional<double> expected_terms;  ///< default: those of the first micro-batches, times accumulation
  ScheduleUnit schedule_unit = ScheduleUnit::update;
  std::uint64_t seed = 0;  ///< of dropout
  bool graph = true;       ///< on a device: capture updates
};

/// Counts passes and updates, and makes of passes updates. Engine has the contracts of the functions of the
/// same names.
class UpdateLoop {
 public:
  /// The parts outlive the loop; the strategy is attached to the tape.
  UpdateLoop(World&, Tape&, Strategy&, TrainingStep&&, StepMonitor&&, const UpdateLoopOptions&);

  // ---- pass by pass
  void backward(const nn::Loss&);
  void backward(Var loss);
  bool step();
  void cancel();
  Accumulation& accumulation() { return accumulation_; }
  /// While holds exceed releases, passes do not synchronise, and step() is an error.
  void hold_synchronisation() { ++holds_; }
  void release_synchronisation() { --holds_; }

  // ---- update by update
  /// An update whose micro-batch m has the loss forward(m). `start`: when it began.
  void run(const std::function<nn::Loss(std::size_t)>& forward, std::chrono::steady_clock::time_point start);
  /// Call before the strategy is used otherwise.
  void drop_graph() { graph_.drop(); }

  // ---- state
  TrainingStep& training() { return training_; }
  const StepReport& report() const { return report_; }
  /// Mean of the last update. Collective.
  double loss() { return world_.reduce(losses_.read(tape_.stream())); }
  std::int64_t steps() const { return steps_; }
  std::int64_t epochs() const { return epochs_; }
  void end_epoch() { ++epochs_; }

 private:
  /// Before a pass of backward(); returns whether it synchronises.
  bool begin_pass();
  void end_pass(bool synchronised);
  /// The first loss decides on expected_terms, unless they were given. Collective.
  void expect_terms(const nn::Loss&);
  void run_passes(const std::function<nn::Loss(std::size_t)>& forward);
  void prepare();
  void complete();
  void write_report();

  World& world_;
  Tape& tape_;
  Strategy& strategy_;
  UpdateLoopOptions options_;
  TrainingStep training_;
  StepMonitor monitor_;
  Accumulation accumulation_;
  DropoutSeeds seeds_;
  UpdateGraph graph_;
  UpdateLosses losses_;
  StepReport report_;
  std::int64_t steps_ = 0, epochs_ = 0;
  std::uint64_t passes_ = 0;  // of all updates
  bool reducing_ = false;     // the last pass synchronises and is not finished
  int holds_ = 0;
  std::chrono::steady_clock::time_point start_;  // of the update
};

}  // namespace rz
