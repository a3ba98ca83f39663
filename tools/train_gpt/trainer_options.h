#pragma once
/// What a trainer does, from the command line and the configuration.

#include "tools/train_gpt/inputs.h"
#include "tools/train_gpt/options.h"
#include "tools/train_gpt/training/trainer.h"

namespace rz::train_gpt {

/// True if weight decay applies to the parameter.
bool decays(const Options&, const Parameter&);
/// The configuration must have an optimizer. `threads` of the host stream.
TrainerOptions trainer_options(const Options&, const Inputs&, int threads);

}  // namespace rz::train_gpt
