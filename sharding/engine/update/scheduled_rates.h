#pragma once
/// Learning rates and betas of an optimizer by a schedule.

#include <cstdint>
#include <vector>

#include "sharding/optim/optimizer.h"
#include "sharding/schedules/lr_schedule.h"

namespace rz {

/// What a schedule counts.
enum class ScheduleUnit { update, epoch };

/// Sets the rates of all groups from a schedule, and their betas if it cycles them and the group has some. A
/// constant schedule sets none, so that a loop may set them by hand.
class ScheduledRates {
 public:
  /// The base rates are those that the optimizer has now. Errc::invalid_argument as check(LrSchedule).
  ScheduledRates(LrSchedule, const Optimizer&);

  /// The rates and betas after `step` steps of the schedule.
  void apply(std::int64_t step, Optimizer&) const;
  /// False if a loop may set the rates by hand.
  bool scheduled() const;
  /// By group.
  const std::vector<double>& base_rates() const { return base_rates_; }

 private:
  LrSchedule schedule_;
  std::vector<double> base_rates_;
};

}  // namespace rz
