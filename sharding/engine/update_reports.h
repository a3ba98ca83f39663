#pragma once
/// What the updates of a training loop did.

#include <chrono>
#include <cstdint>

#include "sharding/engine/step_monitor.h"
#include "sharding/engine/step_report.h"
#include "sharding/engine/update_losses.h"
#include "sharding/engine/world.h"
#include "sharding/strategy/strategy.h"

namespace rz {

/// Counts updates, and reports on each: its losses, its time, lines of progress.
class UpdateReports {
 public:
  using Clock = std::chrono::steady_clock;
  /// `samples`: of an update, over all ranks. World and strategy outlive the reports.
  UpdateReports(World&, const Strategy&, StepMonitor&&, std::int64_t samples);

  /// An update begins at `start`, instead of at the end of the one before.
  void begin(Clock::time_point start) { start_ = start; }
  /// Of the update in progress, or of the last one.
  UpdateLosses& losses() { return losses_; }
  PhaseTimes& times() { return monitor_.times(); }

  /// Starts the report of the update that has just run, and counts it.
  StepReport& add(bool ran_graph);
  /// The report is complete: adds the time, and prints and writes what is due. Collective.
  void finish(const Stream&);

  /// Of the last update.
  const StepReport& last() const { return report_; }
  /// Mean loss of the last update. Collective.
  double loss(const Stream& stream) { return losses_.sums(world_.communicator(), stream).value(); }
  /// Number of updates.
  std::int64_t steps() const { return steps_; }

  /// Sums over all updates.
  struct Count {
    std::int64_t steps = 0, skipped_steps = 0, samples = 0;
    bool operator==(const Count&) const = default;
  };
  Count count() const;
  /// Goes on from there, in a run that is resumed.
  void set_count(const Count&);

 private:
  World& world_;
  const Strategy& strategy_;
  StepMonitor monitor_;
  std::int64_t samples_, steps_ = 0;
  UpdateLosses losses_;
  StepReport report_;
  Clock::time_point start_ = Clock::now();  // of the update in progress
};

}  // namespace rz
