#pragma once
/// The engine of a run, from the command line and the configuration, and what it will hold and send.

#include <vector>

#include "sharding/engine/engine_options.h"
#include "sharding/engine/training_plan.h"
#include "sharding/lm/inputs.h"
#include "sharding/lm/options.h"

namespace rz::lm {

/// True if weight decay applies to the parameter.
bool decays(const Options&, const Parameter&);
/// The configuration must have an optimizer. The inputs must outlive initialize().
EngineOptions engine_options(const Options&, const Inputs&);

/// What train_lm would hold and send with these options on ranks of this kind of device.
TrainingPlan plan_run(const Options&, const Inputs&, RankOf, Device::Kind);
/// The same of every rank.
std::vector<TrainingPlan> plan_ranks(const Options&, const Inputs&, int ranks, Device::Kind);

}  // namespace rz::lm
