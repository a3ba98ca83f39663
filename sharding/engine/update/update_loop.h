#pragma once
/// The passes and updates of a training loop.

#include <cstdint>
#include <functional>
#include <optional>

#include "autograd_lite/ops.h"
#include "autograd_lite/tape.h"
#include "sharding/engine/update/accumulation.h"
#include "sharding/engine/update/dropout_seeds.h"
#include "sharding/engine/update/training_step.h"
#include "sharding/engine/update/update_graph.h"
#include "sharding/engine/update/update_reports.h"
#include "sharding/strategies/strategy.h"
#include "sharding/world/world.h"

namespace rz {

struct UpdateLoopOptions {
  std::int64_t accumulation = 1;         ///< micro-batches of an update
  std::optional<double> expected_terms;  ///< default: those of the first micro-batches, times accumulation
  std::uint64_t seed = 0;                ///< of dropout
  bool graph = true;                     ///< on a device: capture updates
  /// Nothing depends on how many ranks share the micro-batches of an update.
  bool world_size_invariant = false;
};

/// Makes updates of passes, pass by pass or a whole update at once. Engine has the contracts of the functions
/// of the same names.
class UpdateLoop {
 public:
  /// The parts outlive the loop; the strategy is attached to the tape.
  UpdateLoop(World&, Tape&, Strategy&, TrainingStep&&, UpdateReports&&, const UpdateLoopOptions&);

  // ---- pass by pass
  void backward(const nn::Loss&);
  void backward(Var loss);
  /// In place of a pass on a rank without data; see Strategy::backward_without_data().
  void backward_without_data();
  /// True before the first pass of the first update.
  bool fresh() const { return passes_ == 0; }
  bool step();
  void cancel();
  Accumulation& accumulation() { return accumulation_; }
  /// While holds exceed releases, passes do not synchronise, and step() is an error.
  void hold_synchronisation() { ++holds_; }
  void release_synchronisation() { --holds_; }

  // ---- update by update
  /// An update whose micro-batch m has the loss forward(m). `start`: when it began.
  void run(const std::function<nn::Loss(std::size_t)>& forward, UpdateReports::Clock::time_point start);
  /// Call before the strategy is used otherwise.
  void drop_graph() { graph_.drop(); }

  // ---- a run that is resumed
  struct State {
    UpdateReports::Count count;
    TrainingStep::State training;
    std::uint64_t passes = 0;              ///< before the update in progress
    std::optional<double> expected_terms;  ///< none: no loss has decided on them
    bool operator==(const State&) const = default;
  };
  /// At the beginning of the update in progress.
  State state() const;
  /// Between updates.
  void set_state(const State&);
  /// Errc::invalid_argument unless no pass of an update has run.
  void require_between_updates(const char* what) const;

  // ---- parts
  TrainingStep& training() { return training_; }
  UpdateReports& reports() { return reports_; }

 private:
  /// Before a pass of backward(); returns whether it synchronises.
  bool begin_pass();
  void end_pass(bool synchronised);
  /// The first loss decides on expected_terms, unless they were given. Collective.
  void expect_terms(const nn::Loss&);
  double terms_of_update(const nn::Loss& first);
  void run_passes(const std::function<nn::Loss(std::size_t)>& forward);
  void complete();

  World& world_;
  Tape& tape_;
  Strategy& strategy_;
  UpdateLoopOptions options_;
  TrainingStep training_;
  UpdateReports reports_;
  Accumulation accumulation_;
  DropoutSeeds seeds_;
  UpdateGraph graph_;
  std::uint64_t passes_ = 0;             // of all updates
  std::uint64_t passes_of_updates_ = 0;  // before the update in progress
  bool reducing_ = false;                // the last pass synchronises and is not finished
  int holds_ = 0;
  bool given_terms_ = false;  // expected_terms of the options
};

}  // namespace rz
