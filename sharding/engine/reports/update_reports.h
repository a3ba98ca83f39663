#pragma once
/// What the updates of a training loop did.

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "comm/communicator.h"
#include "sharding/data/loader_positions.h"
#include "sharding/engine/reports/flops_profiler.h"
#include "sharding/engine/reports/step_monitor.h"
#include "sharding/engine/reports/step_report.h"
#include "sharding/engine/reports/update_losses.h"
#include "sharding/engine/reports/update_trace.h"
#include "sharding/parallel/world.h"
#include "sharding/strategy/strategy.h"

namespace rz {

/// Counts updates, and reports on each: its losses, its time, lines of progress.
class UpdateReports {
 public:
  using Clock = std::chrono::steady_clock;
  /// `samples`: of an update, over all ranks. `data`, the ranks with other data, and the strategy outlive
  /// the reports.
  UpdateReports(Communicator& data, const Strategy&, StepMonitor&&, std::int64_t samples,
                std::shared_ptr<const LoaderPositions> loaders);

  /// An update begins at `start`, instead of at the end of the one before.
  void begin(Clock::time_point start);
  /// Records updates from now on, with the memory of this rank at the end of each phase. The trace outlives
  /// the reports.
  void set_trace(UpdateTrace&, std::function<MemoryUse()> memory);
  /// Measures an update. The profiler outlives the reports.
  void set_profiler(FlopsProfiler&);
  /// Whether the update in progress is measured by it.
  bool profiling() const { return profiler_ && profiler_->profiling(); }
  /// The update in progress begins anew.
  void restart();
  /// Of the update in progress, or of the last one.
  UpdateLosses& losses() {
    sums_.reset();
    return losses_;
  }
  PhaseTimes& times() { return monitor_.times(); }

  /// Starts the report of the update that has just run, and counts it.
  StepReport& add(bool ran_graph);
  /// The report is complete: adds the time, and prints and writes what is due. Collective.
  void finish(const Stream&);

  /// Of the last update.
  const StepReport& last() const { return report_; }
  /// Mean loss of the last update. Collective.
  double loss(const Stream& stream) { return sums(stream).value(); }
  /// StepMonitor::breakdown() of the last update, and its FlopsProfiler::report().
  std::string breakdown() const;
  /// Writes a value after the samples so far: StepMonitor::add_scalar().
  void add_scalar(const Scalar& scalar) { monitor_.add_scalar(scalar, report_.samples); }
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
  /// Of the losses; reduced once, whatever reports them.
  const Mean& sums(const Stream&);
  void print_and_write(const Stream&);
  void observe_phases();

  Communicator& data_;
  const Strategy& strategy_;
  StepMonitor monitor_;
  std::shared_ptr<const LoaderPositions> loaders_;
  double waited_seconds_ = 0;  // by loaders, before the update in progress
  std::int64_t samples_, steps_ = 0;
  UpdateLosses losses_;
  std::optional<Mean> sums_;  // of losses_
  StepReport report_;
  Clock::time_point start_ = Clock::now();  // of the update in progress
  UpdateTrace* trace_ = nullptr;
  FlopsProfiler* profiler_ = nullptr;
  std::function<MemoryUse()> memory_;
};

}  // namespace rz
