#pragma once
/// The end of a Slurm allocation.

#include <chrono>
#include <optional>

#include "comm/bootstrap.h"

namespace rz {

/// SLURM_JOB_END_TIME, which srun and sbatch set to the job's end in seconds since 1970 (Slurm 22.05 and
/// newer); nullopt without it or if it is 0. Errc::config if it is malformed. A limit that changes while the
/// job runs (scontrol update) does not change the variable.
std::optional<std::chrono::system_clock::time_point> slurm_job_end_time();
/// The same with variables from another source than the process environment.
std::optional<std::chrono::system_clock::time_point> slurm_job_end_time_from(const Variables&);

}  // namespace rz
