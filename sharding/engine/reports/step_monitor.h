#pragma once
/// Reports of updates by a configuration: steps_per_print, wall_clock_breakdown,
/// memory_breakdown, csv_monitor, tensorboard.

#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "comm/device/stream.h"
#include "sharding/config/ds_config.h"
#include "sharding/engine/reports/step_report.h"
#include "sharding/engine/reports/tensorboard.h"
#include "sharding/model/memory_report.h"

namespace rz {

/// `reduction`: the wait for the sums of gradients over the ranks, after the last backward.
enum class Phase { forward, backward, reduction, step };

/// Sums of seconds since reset().
class PhaseTimes {
 public:
  using Clock = std::chrono::steady_clock;
  using Observer = std::function<void(Phase, Clock::time_point start, Clock::time_point end)>;
  /// Disabled, and without an observer, it does nothing.
  explicit PhaseTimes(bool enabled) : enabled_(enabled) {}
  bool enabled() const { return enabled_; }

  /// The time since the last call, since reset() or since begin() belongs to a phase. On a device this waits
  /// for the stream: updates are slower while they are measured.
  void end(Phase phase, const Stream& stream) {
    if (!enabled_ && !observer_) return;
    stream.synchronize();
    const Clock::time_point start = std::exchange(last_, Clock::now());
    seconds_[static_cast<std::size_t>(phase)] += std::chrono::duration<double>(last_ - start).count();
    if (observer_) observer_(phase, start, last_);
  }
  double seconds(Phase phase) const { return seconds_[static_cast<std::size_t>(phase)]; }
  void reset() {
    seconds_ = {};
    begin(Clock::now());
  }
  /// The next phase begins at `start`.
  void begin(Clock::time_point start) { last_ = start; }
  /// Calls it at the end of each phase; empty: nothing.
  void observe(Observer observer) { observer_ = std::move(observer); }

 private:
  bool enabled_;
  std::array<double, 4> seconds_{};
  Clock::time_point last_ = Clock::now();
  Observer observer_;
};

/// Appends to FOLDER/TAG.csv, with '_' for '/' of the tag, a line "SAMPLES,VALUE" for each value, after a
/// header "step,NAME" in a new file, where NAME is the last part of the tag. Lines of a run before that the
/// first value is not beyond are removed: one that is resumed writes them again. Not thread-safe.
class CsvMonitor {
 public:
  /// Creates the folder OUTPUT_PATH/JOB_NAME. Errc::io if that fails.
  CsvMonitor(const std::string& output_path, const std::string& job_name);

  /// `samples`: number of samples trained so far, over all ranks. Errc::io names the file.
  void write(const Scalar&, std::int64_t samples);

 private:
  struct File {
    std::string tag, path;
    std::unique_ptr<std::FILE, int (*)(std::FILE*)> stream;
  };
  File& file(const std::string& tag, std::int64_t samples);

  std::string folder_;
  std::vector<File> files_;
};

/// A line for people. No loss: it has no terms.
std::string step_line(const StepReport&, std::optional<double> loss);

/// Updates between lines of progress, and of breakdowns: steps_per_print, or 10 for breakdowns without it; 0:
/// there are none.
std::int64_t print_interval(const MonitorConfig&);

/// Prints and writes on one rank. needs_loss() is equal on all ranks, so that they can reduce the loss
/// together.
class StepMonitor {
 public:
  /// `writes`: whether this rank prints and writes; `prefix` precedes its lines; `log` may be null.
  StepMonitor(const MonitorConfig&, bool writes, std::string prefix, std::FILE* log);

  /// Whether write() will report the loss of update number `step`.
  bool needs_loss(std::int64_t step) const { return has_files_ || line_is_due(step); }
  /// Prints once that there was an update without terms.
  void report_without_terms(const StepReport&);
  /// Errc::io.
  void write(const StepReport&, std::optional<double> loss, const MemoryReport&);
  /// Writes a value after so many samples, where this rank writes. Errc::io.
  void add_scalar(const Scalar&, std::int64_t samples);
  /// A run goes on after so many samples: what an earlier one has written of later ones is obsolete.
  void resume(std::int64_t samples);

  PhaseTimes& times() { return times_; }
  /// Lines of wall_clock_breakdown and memory_breakdown that write() has had for the update `step`, where
  /// this rank writes; or empty.
  std::string breakdown(std::int64_t step) const { return step == breakdown_step_ ? breakdown_ : ""; }

 private:
  bool line_is_due(std::int64_t step) const { return every_ > 0 && (step + 1) % every_ == 0; }
  std::string describe_times() const;
  std::vector<Scalar> scalars(const StepReport&, std::optional<double> loss) const;
  void write_files(std::span<const Scalar>, std::int64_t samples);

  std::int64_t every_;
  bool has_files_, prints_memory_, writes_;
  bool without_terms_ = false;  // reported
  std::string prefix_;
  std::FILE* log_;  // null: none on this rank
  std::optional<CsvMonitor> csv_;
  std::optional<TensorBoardMonitor> tensorboard_;
  PhaseTimes times_;
  std::string breakdown_;
  std::int64_t breakdown_step_ = -1;
};

}  // namespace rz
