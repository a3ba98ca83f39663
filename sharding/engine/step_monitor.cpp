#include "sharding/engine/step_monitor.h"

#include <cerrno>
#include <charconv>
#include <cstring>
#include <fstream>
#include <utility>

#include "comm/core/error.h"
#include "comm/core/text.h"
#include "sharding/io/durable_file.h"

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

std::FILE* CsvMonitor::file(std::string_view name, std::int64_t samples) {
  for (File& f : files_)
    if (f.name == name) return f.stream.get();
  const std::string path = concat(folder_, "/Train_Samples_", name, ".csv");
  const std::string kept = csv_lines_before(path, samples);
  File& f = files_.emplace_back(File{std::string(name), {std::fopen(path.c_str(), "we"), std::fclose}});
  require(f.stream != nullptr, Errc::io, path, ": cannot be written: ", std::strerror(errno));
  if (kept.empty()) std::fprintf(f.stream.get(), "step,%s\n", f.name.c_str());
  std::fputs(kept.c_str(), f.stream.get());
  return f.stream.get();
}

void CsvMonitor::write(std::string_view name, std::int64_t samples, double value) {
  std::FILE* const to = file(name, samples);
  std::fprintf(to, "%lld,%s\n", static_cast<long long>(samples), rounded(value, 17).c_str());
  const bool written = std::fflush(to) == 0;
  require(written, Errc::io, folder_, "/Train_Samples_", name,
          ".csv: cannot be written: ", std::strerror(errno));
}

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
    std::fprintf(log_, "%s  ms per update: forward %s, backward %s, step %s\n", prefix_.c_str(),
                 ms(Phase::forward).c_str(), ms(Phase::backward).c_str(), ms(Phase::step).c_str());
  if (prints_memory_) std::fprintf(log_, "%s  %s\n", prefix_.c_str(), describe(memory).c_str());
  std::fflush(log_);
}

}  // namespace rz
