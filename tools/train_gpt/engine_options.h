#pragma once
/// The engine of a run, from the command line and the configuration.

#include "sharding/engine/engine_options.h"
#include "tools/train_gpt/inputs.h"
#include "tools/train_gpt/options.h"

namespace rz::train_gpt {

/// True if weight decay applies to the parameter.
bool decays(const Options&, const Parameter&);
/// The configuration must have an optimizer. The inputs must outlive initialize().
EngineOptions engine_options(const Options&, const Inputs&);

}  // namespace rz::train_gpt
