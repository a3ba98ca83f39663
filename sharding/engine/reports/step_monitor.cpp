#include "sharding/engine/reports/step_monitor.h"

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <cmath>
#include <cstring>
#include <fstream>
#include <utility>

#include "comm/core/error.h"
#include "comm/core/text.h"
#include "sharding/io/file.h"

namespace rz {

CsvMonitor::CsvMonitor(const std::string& output_path, const std::string& job_name)
    : folder_(output_path.empty() ? job_name : concat(output_path, "/", job_name)) {
  make_folders(folder_);
}

namespace {

/// Whole lines of fewer samples, of a file that may not exist.
std::string csv_lines_before(const std::string& path, std::int64_t samples) {
  std::ifstream file(path);
  std::string all;
  for (std::string line; std::getline(file, line) && !file.eof();) {
    std::int64_t of = 0;
    const auto [end, error] = std::from_chars(line.data(), line.data() + line.size(), of);
    const bool header = all.empty() && line.starts_with("step,");
    if (header || (error == std::errc() && *end == ',' && of < samples)) all += line + "\n";
  }
  return all;
}

}  // namespace

CsvMonitor::File& CsvMonitor::file(const std::string& tag, std::int64_t samples) {
  for (File& f : files_)
    if (f.tag == tag) return f;
  std::string name = tag;
  std::ranges::replace(name, '/', '_');
  const std::string path = concat(folder_, "/", name, ".csv");
  const std::string kept = csv_lines_before(path, samples);
  File& f = files_.emplace_back(File{tag, path, {std::fopen(path.c_str(), "we"), std::fclose}});
  require(f.stream != nullptr, Errc::io, path, ": cannot be written: ", std::strerror(errno));
  if (kept.empty()) std::fprintf(f.stream.get(), "step,%s\n", tag.substr(tag.rfind('/') + 1).c_str());
  std::fputs(kept.c_str(), f.stream.get());
  return f;
}

void CsvMonitor::write(const Scalar& scalar, std::int64_t samples) {
  const File& to = file(scalar.tag, samples);
  std::fprintf(to.stream.get(), "%lld,%s\n", static_cast<long long>(samples),
               rounded(scalar.value, 17).c_str());
  const bool written = std::fflush(to.stream.get()) == 0;
  require(written, Errc::io, to.path, ": cannot be written: ", std::strerror(errno));
}

std::int64_t print_interval(const MonitorConfig& config) {
  constexpr std::int64_t of_breakdowns = 10;  // DeepSpeed's older default of steps_per_print
  if (config.steps_per_print) return *config.steps_per_print;
  return config.wall_clock_breakdown || config.memory_breakdown ? of_breakdowns : 0;
}

std::string step_line(const StepReport& r, std::optional<double> loss) {
  std::string line = concat("step ", r.step + 1, ": loss ", loss ? fixed(*loss, 4) : "without terms", ", lr ",
                            rounded(r.lr, 4), ", grad_norm ", rounded(r.grad_norm, 4), ", ",
                            fixed(r.seconds * 1e3, 1), " ms");
  if (r.loss_scale != 1) line += concat(", loss_scale ", r.loss_scale);
  if (r.skipped_steps > 0) line += concat(", skipped ", r.skipped_steps);
  return line;
}

StepMonitor::StepMonitor(const MonitorConfig& config, bool writes, std::string prefix, std::FILE* log)
    : every_(print_interval(config)),
      has_files_(config.csv_enabled || config.tensorboard_enabled),
      prints_memory_(config.memory_breakdown),
      writes_(writes),
      prefix_(std::move(prefix)),
      log_(writes ? log : nullptr),
      times_(config.wall_clock_breakdown) {
  if (!writes) return;
  if (config.csv_enabled) csv_.emplace(config.csv_output_path, config.csv_job_name);
  if (config.tensorboard_enabled)
    tensorboard_.emplace(config.tensorboard_output_path, config.tensorboard_job_name);
}

void StepMonitor::report_without_terms(const StepReport& report) {
  if (std::exchange(without_terms_, true) || !log_) return;
  std::fprintf(log_,
               "%swarning: step %lld: no rank has counted a term of the losses (all targets are "
               "ignored): no update is made, and it counts as skipped; this is printed once\n",
               prefix_.c_str(), static_cast<long long>(report.step + 1));
  std::fflush(log_);
}

std::vector<Scalar> StepMonitor::scalars(const StepReport& report, std::optional<double> loss) const {
  std::vector<Scalar> all;
  const auto add = [&](const char* name, double value) {
    all.push_back({concat("Train/Samples/", name), value});
  };
  if (loss) add("train_loss", *loss);
  add("lr", report.lr);
  if (report.loss_scale != 1) add("loss_scale", report.loss_scale);
  add("grad_norm", report.grad_norm);
  add("step_ms", report.seconds * 1e3);
  if (!std::isnan(report.exposed_seconds)) add("exposed_comm_ms", report.exposed_seconds * 1e3);
  if (!times_.enabled() || !line_is_due(report.step)) return all;
  const auto ms = [&](Phase phase) { return times_.seconds(phase) * 1e3 / static_cast<double>(every_); };
  add("elapsed_time_ms_forward", ms(Phase::forward));
  add("elapsed_time_ms_backward", ms(Phase::backward) + ms(Phase::reduction));
  add("elapsed_time_ms_backward_inner", ms(Phase::backward));
  add("elapsed_time_ms_backward_allreduce", ms(Phase::reduction));
  add("elapsed_time_ms_step", ms(Phase::step));
  return all;
}

void StepMonitor::write_files(std::span<const Scalar> scalars, std::int64_t samples) {
  if (csv_)
    for (const Scalar& s : scalars) csv_->write(s, samples);
  if (tensorboard_) tensorboard_->write(scalars, samples);
}

void StepMonitor::add_scalar(const Scalar& scalar, std::int64_t samples) {
  write_files({&scalar, 1}, samples);
}

void StepMonitor::resume(std::int64_t samples) {
  if (tensorboard_) tensorboard_->restart(samples + 1);
}

/// With DeepSpeed's names: bwd is bwd_inner and bwd_allreduce.
std::string StepMonitor::describe_times() const {
  const auto ms = [&](double seconds) { return fixed(seconds * 1e3 / static_cast<double>(every_), 2); };
  const double inner = times_.seconds(Phase::backward), reduction = times_.seconds(Phase::reduction);
  return concat("time (ms) | fwd: ", ms(times_.seconds(Phase::forward)), " | bwd: ", ms(inner + reduction),
                " | bwd_inner: ", ms(inner), " | bwd_allreduce: ", ms(reduction),
                " | step: ", ms(times_.seconds(Phase::step)));
}

void StepMonitor::write(const StepReport& report, std::optional<double> loss, const MemoryReport& memory) {
  write_files(scalars(report, loss), report.samples);
  if (!line_is_due(report.step)) return;
  if (writes_) {
    breakdown_step_ = report.step;
    breakdown_.clear();
    if (times_.enabled()) breakdown_ += concat(prefix_, "  ", describe_times(), "\n");
    if (prints_memory_) breakdown_ += concat(prefix_, "  ", describe(memory), "\n");
  }
  times_.reset();
  if (!log_) return;
  std::fprintf(log_, "%s%s\n%s", prefix_.c_str(), step_line(report, loss).c_str(), breakdown_.c_str());
  std::fflush(log_);
}

}  // namespace rz
