#pragma once
/// Learning-rate schedules as values. A schedule is a pure function of the number of steps made: an engine
/// counts updates, a loop by hand may count epochs. Rates and betas have the bits of DeepSpeed 0.19
/// (deepspeed/runtime/lr_schedules.py), computed in double in its order of operations.
///
///     const LrSchedule schedule = WarmupLr{.max_lr = 1e-3, .num_steps = 100};
///     for (std::int64_t s = 0; s < updates; ++s) {
///       optimizer->set_learning_rate(learning_rate(schedule, s, {.base_lr = 1e-3}));
///       …
///
/// Step s is the rate of the update after s updates. DeepSpeed's warm-up schedules lag: steps 0 and 1 both
/// have the start of the warm-up. OneCycle, LRRangeTest and CosineAnnealingLR do not lag.

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>

#include "sharding/schedules/schedule_types.h"

namespace rz {

const char* name(WarmupType);  ///< "log", "linear"
/// The name in a DeepSpeed configuration: "WarmupLR", "OneCycle", …; "constant" for ConstantLr.
const char* name(const LrSchedule&);

/// Errc::invalid_argument names the field that is out of range, or a list that has not one value for each of
/// `groups`.
void check(const LrSchedule&, std::size_t groups = 1);
/// The rate after `step` steps, from 0. The schedule must pass check().
double learning_rate(const LrSchedule&, std::int64_t step, const ScheduledGroup&);
/// Beta 1 and beta 2 after `step` steps, if the schedule sets them.
std::optional<std::array<double, 2>> scheduled_betas(const LrSchedule&, std::int64_t step,
                                                     std::size_t group = 0);

}  // namespace rz
