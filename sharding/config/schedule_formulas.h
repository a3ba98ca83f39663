#pragma once
/// The formula of each schedule.

#include "sharding/config/lr_schedule.h"

namespace rz::schedules {

double rate(const ConstantLr&, std::int64_t step, const ScheduledGroup&);
double rate(const WarmupLr&, std::int64_t step, const ScheduledGroup&);
double rate(const WarmupDecayLr&, std::int64_t step, const ScheduledGroup&);
double rate(const WarmupCosineLr&, std::int64_t step, const ScheduledGroup&);
double rate(const OneCycle&, std::int64_t step, const ScheduledGroup&);
double rate(const LrRangeTest&, std::int64_t step, const ScheduledGroup&);
double rate(const StepLr&, std::int64_t step, const ScheduledGroup&);
double rate(const MultiStepLr&, std::int64_t step, const ScheduledGroup&);
double rate(const ConstantFactorLr&, std::int64_t step, const ScheduledGroup&);
double rate(const LinearLr&, std::int64_t step, const ScheduledGroup&);
double rate(const ExponentialLr&, std::int64_t step, const ScheduledGroup&);
double rate(const PolynomialLr&, std::int64_t step, const ScheduledGroup&);
double rate(const CosineAnnealingLr&, std::int64_t step, const ScheduledGroup&);
double rate(const CosineAnnealingWarmRestarts&, std::int64_t step, const ScheduledGroup&);
double rate(const OneCycleLr&, std::int64_t step, const ScheduledGroup&);
/// The base rate: that before the first metric.
double rate(const ReduceLrOnPlateau&, std::int64_t step, const ScheduledGroup&);
/// Beta 1. DeepSpeed begins with the minimum, and only the second update has the maximum of the cycle.
double momentum(const OneCycle&, std::int64_t step, std::size_t group);
double momentum(const OneCycleLr&, std::int64_t step, std::size_t group);

}  // namespace rz::schedules
