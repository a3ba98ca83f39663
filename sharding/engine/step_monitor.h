#pragma once
/// Reports of updates as a configuration asks for them: steps_per_print, wall_clock_breakdown,
/// memory_breakdown, csv_monitor.

#include <cstdint>
#include <cstdio>
#include <optional>
#include <string>

#include "sharding/config/ds_config.h"
#include "sharding/engine/csv_monitor.h"
#include "sharding/engine/phase_times.h"
#include "sharding/engine/step_report.h"
#include "sharding/model/memory_report.h"

namespace rz {

/// A line for people. No loss: it has no terms.
std::string step_line(const StepReport&, std::optional<double> loss);

/// Prints and writes on the rank that has a log. needs_loss() is equal on all ranks, so that they can reduce
/// the loss together.
class StepMonitor {
 public:
  /// `writes`: whether this rank prints and writes; `prefix` precedes its lines.
  StepMonitor(const MonitorConfig&, bool writes, std::string prefix, std::FILE* log);

  /// Whether write() will report the loss of update number `step`.
  bool needs_loss(std::int64_t step) const { return csv_enabled_ || line_is_due(step); }
  /// Prints once that there was an update without terms.
  void report_without_terms(const StepReport&);
  /// Errc::io.
  void write(const StepReport&, std::optional<double> loss, const MemoryReport&);

  PhaseTimes& times() { return times_; }

 private:
  bool line_is_due(std::int64_t step) const { return every_ > 0 && (step + 1) % every_ == 0; }
  void print(const StepReport&, std::optional<double> loss, const MemoryReport&);

  std::int64_t every_;
  bool csv_enabled_, prints_memory_;
  bool without_terms_ = false;  // reported
  std::string prefix_;
  std::FILE* log_;  // null: none on this rank
  std::optional<CsvMonitor> csv_;
  PhaseTimes times_;
};

}  // namespace rz
