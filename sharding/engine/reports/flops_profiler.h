#pragma once
/// The section "flops_profiler": multiply-accumulates, times and operations per second of one update.

#include <array>
#include <cstdint>
#include <cstdio>
#include <string>

#include "autograd_lite/nn/module.h"
#include "autograd_lite/tape.h"
#include "sharding/config/ds_config.h"
#include "sharding/engine/reports/step_monitor.h"
#include "sharding/engine/reports/step_report.h"
#include "sharding/parallel/world.h"

namespace rz {

/// Measures the update FlopsProfilerConfig::profile_step, by module. On a
/// device this waits for the stream at the begin and end of each scope, so the update is slower than others;
/// it is in no graph. Nothing is measured in other updates.
///
/// One thread per rank.
class FlopsProfiler {
 public:
  /// World, module and tape outlive the profiler. `micro_batches`: of an update. `log`: for the report, after
  /// `prefix`; null: none on this rank.
  FlopsProfiler(const FlopsProfilerConfig&, World&, Module&, Tape&, std::int64_t micro_batches,
                std::string prefix, std::FILE* log);
  ~FlopsProfiler() { tape_.set_profile(nullptr); }
  FlopsProfiler(const FlopsProfiler&) = delete;

  /// Empties output_file at the first call, if the update that is measured is not before `step`. Collective.
  void begin_run(std::int64_t step);
  /// The next passes are of this update, and those before it that had not ended are of none.
  void begin_update(std::int64_t step);
  /// Whether the update in progress is measured.
  bool profiling() const { return profiling_; }
  void add_phase(Phase, double seconds);
  /// The update in progress, which is measured, has ended. Rank 0 prints its report, or writes it to
  /// output_file: Errc::io on all ranks if it cannot. Collective.
  void end_update(const StepReport&);

  /// The report of rank 0 that was printed for the update `step`; empty for others.
  std::string report(std::int64_t step) const { return step == reported_ ? report_ : ""; }
  const Tape::Profile& profile() const { return profile_; }

 private:
  std::string describe(const StepReport&) const;

  FlopsProfilerConfig config_;
  World& world_;
  Module& module_;
  Tape& tape_;
  std::int64_t micro_batches_;
  std::string prefix_;
  std::FILE* log_;
  bool profiling_ = false, begun_ = false;
  Tape::Profile profile_;
  std::array<double, 4> seconds_{};  // by Phase
  std::string report_;
  std::int64_t reported_ = -1;
};

}  // namespace rz
