#include "sharding/engine/update_reports.h"

#include <cmath>
#include <optional>
#include <utility>

namespace rz {

UpdateReports::UpdateReports(World& world, const Strategy& strategy, StepMonitor&& monitor,
                             std::int64_t samples)
    : world_(world), strategy_(strategy), monitor_(std::move(monitor)), samples_(samples) {}

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
  start_ = Clock::now();
}

void UpdateReports::finish(const Stream& stream) {
  const Clock::time_point now = Clock::now();
  report_.seconds = std::chrono::duration<double>(now - start_).count();
  start_ = now;
  if (report_.without_terms) monitor_.report_without_terms(report_);
  if (!monitor_.needs_loss(report_.step)) return;
  const Mean loss = losses_.sums(world_.communicator(), stream);
  monitor_.write(report_, loss.count > 0 ? std::optional(loss.value()) : std::nullopt, strategy_.memory());
}

}  // namespace rz
