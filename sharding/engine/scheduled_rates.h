#pragma once
/// Learning rates and betas of an optimizer by a schedule.

#include <cstdint>
#include <optional>
#include <vector>

#include "sharding/config/lr_schedule.h"
#include "sharding/optim/optimizer.h"

namespace rz {

/// What a schedule counts.
enum class ScheduleUnit { update, epoch };

/// Errc::invalid_argument for a schedule that check(LrSchedule) refuses, and for one of a momentum that the
/// optimizer does not have.
void check(const LrSchedule&, const Optimizer&);

/// Sets the rates of all groups from a schedule, their betas if it cycles them and the group has some, or
/// their momentum. A constant schedule and ReduceLrOnPlateau set none, so that a loop may set them by hand.
class ScheduledRates {
 public:
  /// The base rates are those that the optimizer has now. Errc::invalid_argument as check().
  ScheduledRates(LrSchedule, const Optimizer&);

  /// The rates and betas after `step` steps of the schedule.
  void apply(std::int64_t step, Optimizer&) const;
  /// Of ReduceLrOnPlateau: counts a metric, and reduces the rates of the optimizer. Errc::invalid_argument
  /// for another schedule.
  void step(double metric, Optimizer&);
  /// Empty unless the schedule is ReduceLrOnPlateau.
  const std::optional<PlateauState>& plateau() const { return plateau_; }
  /// Nothing for another schedule.
  void set_plateau(const PlateauState&);
  /// False if a loop may set the rates by hand.
  bool scheduled() const;
  /// By group.
  const std::vector<double>& base_rates() const { return base_rates_; }

 private:
  LrSchedule schedule_;
  std::vector<double> base_rates_;
  std::optional<PlateauState> plateau_;
};

}  // namespace rz
