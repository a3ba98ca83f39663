#pragma once
/// Memory and traffic of a run before it starts.

#include <vector>

#include "sharding/engine/training_plan.h"
#include "tools/train_gpt/inputs.h"
#include "tools/train_gpt/options.h"

namespace rz::train_gpt {

/// What train_gpt would hold and send with these options on ranks of this kind of device.
TrainingPlan plan_run(const Options&, const Inputs&, RankOf, Device::Kind);
/// The same of every rank.
std::vector<TrainingPlan> plan_ranks(const Options&, const Inputs&, int ranks, Device::Kind);

}  // namespace rz::train_gpt
