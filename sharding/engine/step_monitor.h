#pragma once
/// Reports of updates by a configuration: steps_per_print, wall_clock_breakdown,
/// memory_breakdown, csv_monitor.

#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "comm/device/stream.h"
#include "sharding/config/ds_config.h"
#include "sharding/engine/step_report.h"
#include "sharding/model/memory_report.h"

namespace rz {

enum class Phase { forward, backward, step };

/// Sums of seconds since reset().
class PhaseTimes {
 public:
  /// Disabled, it does nothing.
  explicit PhaseTimes(bool enabled) : enabled_(enabled) {}
  bool enabled() const { return enabled_; }

  /// The time since the last call, or since reset(), belongs to a phase. On a device this waits for the
  /// stream: updates are slower while they are measured.
  void end(Phase phase, const Stream& stream) {
    if (!enabled_) return;
    stream.synchronize();
    const Clock::time_point now = Clock::now();
    seconds_[static_cast<std::size_t>(phase)] += std::chrono::duration<double>(now - last_).count();
    last_ = now;
  }
  double seconds(Phase phase) const { return seconds_[static_cast<std::size_t>(phase)]; }
  void reset() {
    seconds_ = {};
    last_ = Clock::now();
  }

 private:
  using Clock = std::chrono::steady_clock;
  bool enabled_;
  std::array<double, 3> seconds_{};
  Clock::time_point last_ = Clock::now();
};

/// Appends to FOLDER/Train_Samples_NAME.csv a line "SAMPLES,VALUE" for each value, after a header "step,NAME"
/// in a new file. Lines of a run before that the first value is not beyond are removed: one that is resumed
/// writes them again. Not thread-safe.
class CsvMonitor {
 public:
  /// Creates the folder OUTPUT_PATH/JOB_NAME. Errc::io if that fails.
  CsvMonitor(const std::string& output_path, const std::string& job_name);

  /// `samples`: number of samples trained so far, over all ranks. Errc::io names the file.
  void write(std::string_view name, std::int64_t samples, double value);

 private:
  struct File {
    std::string name;
    std::unique_ptr<std::FILE, int (*)(std::FILE*)> stream;
  };
  std::FILE* file(std::string_view name, std::int64_t samples);

  std::string folder_;
  std::vector<File> files_;
};

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
