#pragma once
/// The configuration of an engine.

#include <string>

#include "autograd_lite/nn/module.h"
#include "sharding/config/ds_config.h"
#include "sharding/engine/engine_options.h"
#include "sharding/parallel/world.h"

namespace rz {

/// Reads and checks EngineOptions::config with the arguments, or checks EngineOptions::ds_config. Errors are
/// thrown on every rank; Errc::mismatch if the result differs over the ranks. Collective.
DsConfig read_configuration(World&, Module&, const EngineOptions&);

/// The same without other ranks: errors are thrown here, and nothing is compared.
/// `ranks_per_node`: 0 if it is not known.
DsConfig read_configuration(int ranks, Module&, const EngineOptions&, int ranks_per_node = 0);

/// Errc::config, which names the key, for a schedule that the optimizer cannot follow.
void check_schedule(const DsConfig&, const LrSchedule&, const Optimizer&);

/// Gives the module what the configuration has: activation checkpointing, LoRA. Errc::config for layers
/// that it has not.
void prepare_model(Module&, const DsConfig&);
/// Divides the layers of the module between the ranks of mesh.tp(), by EngineOptions::parallelize or the plan
/// of its family. Not collective. Returns a line on it. Errc::config for a module without a plan.
std::string divide_layers(Module&, const Mesh&, const DsConfig&, const EngineOptions&);

/// The largest smaller extent of the matrices of a model; nullopt if it has none.
std::optional<std::int64_t> hidden_size(Module&);

}  // namespace rz
