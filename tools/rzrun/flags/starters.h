#pragma once
/// --launcher: what starts the agents of several hosts.

#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "tools/rzrun/flags/flags.h"

namespace rz::rzrun {

/// By --launcher and --launcher_args, in DeepSpeed's words, and --rsh. Errors are Errc::config.
Starter choose_starter(const HostFlags&, Remarks&);

/// The names of the nodes of Slurm's allocation; none outside of one.
std::vector<std::string> nodes_of_allocation();

/// The hosts of the allocation of Slurm that this process is in; nothing if there is none. A host has as many
/// slots as tasks (SLURM_TASKS_PER_NODE); if that is 1 on all or no tasks were asked for, as many as GPUs
/// (SLURM_GPUS_PER_NODE, else SLURM_GPUS_ON_NODE), if there are any, else one. Errors are Errc::config.
std::vector<hosts::Host> hosts_of_allocation();

/// The devices that Slurm gave this process on its host: the words of CUDA_VISIBLE_DEVICES in a job of Slurm.
/// Nothing outside a job, and where Slurm does not manage devices; none if the job has no devices.
using GivenDevices = std::optional<std::vector<std::string>>;
GivenDevices devices_of_slurm();

/// CUDA_VISIBLE_DEVICES for these slots, which are places among the given devices, else numbers of devices.
/// Empty if none are given. Errc::config if too few are.
std::string devices_of_slots(const std::vector<int>& slots, const GivenDevices& given);

/// The variable by which agents that mpirun or srun starts find their secret: RZ_SECRET, which rzrun sets if
/// the user has not, RZ_SECRET_FILE, or RZ_INSECURE, if these are set.
std::string secret_variable();
/// Whether the variable is set, and not empty.
bool has_value(const char* name);

/// The words that start the agents of all hosts at once, through mpirun or srun, whose environment has
/// RZ_AGENT and secret_variable(). mpirun starts that of host i as rank i. An
/// agent that mpirun ends has `grace` for its ranks.
std::vector<std::string> starter_command(const Hosts&, std::chrono::milliseconds grace);

}  // namespace rz::rzrun
