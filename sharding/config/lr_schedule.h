#pragma once
/// Learning-rate schedules as values. A schedule is a pure function of the number of steps made: an engine
/// counts updates, a loop by hand may count epochs. Rates and betas of DeepSpeed's schedules have the bits of
/// DeepSpeed 0.19 (deepspeed/runtime/lr_schedules.py), computed in double in its order of operations; those
/// of torch's are closed forms of torch 2.15 (torch/optim/lr_scheduler.py).
///
///     const LrSchedule schedule = WarmupLr{.max_lr = 1e-3, .num_steps = 100};
///     for (std::int64_t s = 0; s < updates; ++s) {
///       optimizer->set_learning_rate(learning_rate(schedule, s, {.base_lr = 1e-3}));
///       …
///
/// Step s is the rate of the update after s updates. DeepSpeed's warm-up schedules lag: steps 0 and 1 both
/// have the start of the warm-up. The others do not lag.
///
/// ReduceLrOnPlateau is the exception: its rates follow metrics, which step() counts.

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>

#include "sharding/config/schedule_types.h"

namespace rz {

const char* name(WarmupType);  ///< "log", "linear"
/// The name in a DeepSpeed configuration: "WarmupLR", "OneCycle", "StepLR", …; "constant" for ConstantLr.
const char* name(const LrSchedule&);

/// Errc::invalid_argument names the field that is out of range, or a list that has not one value for each of
/// `groups`.
void check(const LrSchedule&, std::size_t groups = 1);
/// The rate after `step` steps, from 0. The schedule must pass check().
double learning_rate(const LrSchedule&, std::int64_t step, const ScheduledGroup&);
/// Beta 1 and beta 2 after `step` steps, if the schedule sets both, as OneCycle.
std::optional<std::array<double, 2>> scheduled_betas(const LrSchedule&, std::int64_t step,
                                                     std::size_t group = 0);
/// The momentum, or beta 1 of an optimizer with betas, after `step` steps, if the schedule sets it alone, as
/// OneCycleLr.
std::optional<double> scheduled_momentum(const LrSchedule&, std::int64_t step, std::size_t group = 0);

/// Counts a metric, and reduces the rates of all groups where it has not improved for long enough. A NaN does
/// not improve.
void step(const ReduceLrOnPlateau&, double metric, PlateauState&, std::span<double> rates);

/// What a schedule counts.
enum class ScheduleUnit { update, epoch };

}  // namespace rz
