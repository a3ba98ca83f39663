#pragma once
/// Typed sections of the settings.

#include "sharding/config/ds_config.h"
#include "sharding/config/settings.h"

namespace rz::ds {

/// The section must have been read.
/// torch's own AdamW has another default of weight_decay, which enters the settings.
OptimizerConfig typed_optimizer(Settings&, const std::string& file, std::vector<std::string>& warnings);
/// ConstantLr if there is no section.
LrSchedule typed_schedule(const Settings&, const std::string& file, std::vector<std::string>& warnings);
/// Errc::config for combinations that exclude each other.
PrecisionConfig typed_precision(const Settings&, const std::string& file);
/// Errc::config or Errc::unsupported for an offload that the stage or this build does not have.
ZeroConfig typed_zero(const Settings&, const std::string& file, std::vector<std::string>& warnings);
/// Errc::config for combinations that exclude each other. Call before typed_zero(): what it shares with that
/// section enters the settings.
DdpConfig typed_ddp(Settings&, const PrecisionConfig&, const std::string& file);
/// ringzero.deterministic. Errc::config for a number of ranks, or keys of the configuration so far, with
/// which results would depend on the number of ranks.
bool typed_world_size_invariant(const Settings&, const DsConfig&, int ranks);
/// Errc::config for keys that need others. A folder that follows from resume_from_checkpoint enters the
/// settings.
CheckpointConfig typed_checkpoint(Settings&, const std::string& file);

}  // namespace rz::ds
