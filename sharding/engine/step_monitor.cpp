#include "sharding/engine/step_monitor.h"

#include <utility>

#include "comm/core/text.h"

namespace rz {

namespace {

/// DeepSpeed's older default of steps_per_print, for breakdowns without it.
constexpr std::int64_t default_interval = 10;

std::int64_t interval(const MonitorConfig& config) {
  if (config.steps_per_print) return *config.steps_per_print;
  return config.wall_clock_breakdown || config.memory_breakdown ? default_interval : 0;
}

}  // namespace

std::string step_line(const StepReport& r, std::optional<double> loss) {
  std::string line = concat("step ", r.step + 1, ": loss ", loss ? fixed(*loss, 4) : "without terms", ", lr ",
                            rounded(r.lr, 4), ", grad_norm ", rounded(r.grad_norm, 4), ", ",
                            fixed(r.seconds * 1e3, 1), " ms");
  if (r.loss_scale != 1) line += concat(", loss_scale ", r.loss_scale);
  if (r.skipped_steps > 0) line += concat(", skipped ", r.skipped_steps);
  return line;
}

StepMonitor::StepMonitor(const MonitorConfig& config, bool writes, std::string prefix, std::FILE* log)
    : every_(interval(config)),
      csv_enabled_(config.csv_enabled),
      prints_memory_(config.memory_breakdown),
      prefix_(std::move(prefix)),
      log_(writes ? log : nullptr),
      times_(config.wall_clock_breakdown) {
  if (csv_enabled_ && writes) csv_.emplace(config.csv_output_path, config.csv_job_name);
}

void StepMonitor::report_without_terms(const StepReport& report) {
  if (std::exchange(without_terms_, true) || !log_) return;
  std::fprintf(log_,
               "%swarning: step %lld: no rank has counted a term of the losses (all targets are "
               "ignored): no update is made, and it counts as skipped; this is printed once\n",
               prefix_.c_str(), static_cast<long long>(report.step + 1));
  std::fflush(log_);
}

void StepMonitor::write(const StepReport& report, std::optional<double> loss, const MemoryReport& memory) {
  if (csv_) {
    if (loss) csv_->write("train_loss", report.samples, *loss);
    csv_->write("lr", report.samples, report.lr);
    if (report.loss_scale != 1) csv_->write("loss_scale", report.samples, report.loss_scale);
  }
  if (!line_is_due(report.step)) return;
  if (log_) print(report, loss, memory);
  times_.reset();
}

void StepMonitor::print(const StepReport& report, std::optional<double> loss, const MemoryReport& memory) {
  std::fprintf(log_, "%s%s\n", prefix_.c_str(), step_line(report, loss).c_str());
  const auto ms = [&](Phase phase) {
    return fixed(times_.seconds(phase) * 1e3 / static_cast<double>(every_), 2);
  };
  if (times_.enabled())
    std::fprintf(log_, "%s  ms an update: forward %s, backward %s, step %s\n", prefix_.c_str(),
                 ms(Phase::forward).c_str(), ms(Phase::backward).c_str(), ms(Phase::step).c_str());
  if (prints_memory_) std::fprintf(log_, "%s  %s\n", prefix_.c_str(), describe(memory).c_str());
  std::fflush(log_);
}

}  // namespace rz
