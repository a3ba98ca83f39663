#include "sharding/engine/reports/update_reports.h"

#include <cmath>
#include <cstdint>
#include <optional>
#include <utility>

namespace rz {

UpdateReports::UpdateReports(Communicator& data, const Strategy& strategy, StepMonitor&& monitor,
                             std::int64_t samples, std::shared_ptr<const LoaderPositions> loaders)
    : data_(data),
      strategy_(strategy),
      monitor_(std::move(monitor)),
      loaders_(std::move(loaders)),
      samples_(samples) {}

StepReport& UpdateReports::add(bool ran_graph) {
  report_ = {.step = steps_++, .samples = report_.samples + samples_, .skipped_steps = report_.skipped_steps};
  report_.ran_graph = ran_graph;
  report_.exposed_seconds = ran_graph ? std::nan("") : strategy_.exposed_seconds();
  return report_;
}

UpdateReports::Count UpdateReports::count() const {
  return {.steps = steps_, .skipped_steps = report_.skipped_steps, .samples = report_.samples};
}

void UpdateReports::set_count(const Count& count) {
  steps_ = count.steps;
  report_ = {.step = count.steps - 1, .samples = count.samples, .skipped_steps = count.skipped_steps};
  monitor_.resume(count.samples);
  start_ = Clock::now();
  restart();
}

void UpdateReports::begin(Clock::time_point start) {
  start_ = start;
  if (profiler_) profiler_->begin_run(steps_);
  const bool traces = trace_ && trace_->recording();
  if (traces) trace_->begin(start);
  if (traces || profiling()) times().begin(start);
}

void UpdateReports::set_trace(UpdateTrace& trace, std::function<MemoryUse()> memory) {
  trace_ = &trace;
  memory_ = std::move(memory);
  observe_phases();
}

void UpdateReports::set_profiler(FlopsProfiler& profiler) {
  profiler_ = &profiler;
  restart();
}

void UpdateReports::restart() {
  if (!profiler_) return;
  profiler_->begin_update(steps_);
  observe_phases();
}

std::string UpdateReports::breakdown() const {
  return monitor_.breakdown(report_.step) + (profiler_ ? profiler_->report(report_.step) : "");
}

void UpdateReports::observe_phases() {
  const bool traces = trace_ && trace_->recording(), profiles = profiling();
  if (!traces && !profiles) return times().observe({});
  times().begin(Clock::now());
  times().observe([this, traces, profiles](Phase phase, Clock::time_point start, Clock::time_point end) {
    if (profiles) profiler_->add_phase(phase, std::chrono::duration<double>(end - start).count());
    if (!traces) return;
    trace_->add_phase(phase, start, end);
    trace_->add_memory(memory_());
  });
}

void UpdateReports::finish(const Stream& stream) {
  const Clock::time_point now = Clock::now();
  report_.seconds = std::chrono::duration<double>(now - start_).count();
  start_ = now;
  const double waited = loaders_->waited_seconds();
  report_.data_seconds = waited - std::exchange(waited_seconds_, waited);
  if (report_.without_terms) monitor_.report_without_terms(report_);
  if (monitor_.needs_loss(report_.step)) print_and_write(stream);
  const bool profiled = profiling();
  if (profiler_) profiler_->begin_run(report_.step);  // of a loop by hand
  if (profiled) profiler_->end_update(report_);
  const bool changed = trace_ && trace_->end_update(report_.step + 1);
  if (profiler_) profiler_->begin_update(steps_);
  if (changed || profiled || profiling()) observe_phases();
}

const Mean& UpdateReports::sums(const Stream& stream) {
  if (!sums_) sums_ = losses_.sums(data_, stream);
  return *sums_;
}

void UpdateReports::print_and_write(const Stream& stream) {
  const Mean& loss = sums(stream);
  monitor_.write(report_, loss.count > 0 ? std::optional(loss.value()) : std::nullopt, strategy_.memory());
}

}  // namespace rz
