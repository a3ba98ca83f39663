#include "sharding/engine/monitor/step_monitor.h"

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
  char text[500], mean[320];
  std::snprintf(mean, sizeof mean, "%.4f", loss.value_or(0));
  std::snprintf(text, sizeof text, "step %lld: loss %s, lr %.4g, grad_norm %.4g, %.1f ms",
                static_cast<long long>(r.step + 1), loss ? mean : "without terms", r.lr, r.grad_norm,
                r.seconds * 1e3);
  std::string line = text;
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
  if (times_.enabled())
    std::fprintf(log_, "%s  ms an update: forward %.2f, backward %.2f, step %.2f\n", prefix_.c_str(),
                 times_.seconds(Phase::forward) * 1e3 / static_cast<double>(every_),
                 times_.seconds(Phase::backward) * 1e3 / static_cast<double>(every_),
                 times_.seconds(Phase::step) * 1e3 / static_cast<double>(every_));
  if (prints_memory_) std::fprintf(log_, "%s  %s\n", prefix_.c_str(), describe(memory).c_str());
  std::fflush(log_);
}

}  // namespace rz
