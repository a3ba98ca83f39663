#pragma once
/// Who am I: rank, size and rendezvous, from the environment that torchrun, Open MPI, MPICH, PMIx, Flux and
/// Slurm set.

#include <functional>
#include <memory>
#include <optional>
#include <string>

#include "comm/store.h"

namespace rz {

struct LaunchInfo {
  int rank = 0;
  int size = 1;
  int local_rank = 0;
  int local_size = 1;
  /// "host:port" of rank 0's store; "job:<id>" where all ranks are on this host and meet under the job's id;
  /// empty for a group of one.
  std::string master;
  /// Which environment it was: "torchrun", "openmpi", "pmix", "mpich", "flux", "slurm", "none".
  std::string launcher;
  /// What tells this launch from every other: Slurm's job, step and restart, torchrun's run id and port (and
  /// its restart, if all ranks are on one host), PMIx's namespace, Flux's job, and what RZ_LAUNCH holds,
  /// which rzrun sets. Empty if the environment has none of them.
  std::string launch;
};

/// Reads RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR, MASTER_PORT, or the equivalents of an
/// MPI launcher, Flux or Slurm (OMPI_COMM_WORLD_*, PMIX_*, PMI_*, MPI_LOCAL*, FLUX_*, SLURM_*). With none of
/// them: a group of one. Errc::config names each variable that is missing or malformed, and the launcher
/// whose it is. Flux has no variable for the ranks on a host: the same number on each is assumed, and an
/// error where that cannot be.
///
/// MASTER_ADDR and MASTER_PORT count under every launcher, but for ranks of torchrun or rzrun that are all on
/// this host: they meet under their launch, and need no port. Without the two, ranks of an MPI launcher or
/// Flux must all be on this host; Slurm's use its first node, at a port from 20000 on that follows from job
/// and step. Where torchrun's agent itself listens at MASTER_PORT (TORCHELASTIC_USE_AGENT_STORE), the store
/// is at the port after it.
LaunchInfo launch_info_from_environment();

/// A variable's value, or none.
using Variables = std::function<std::optional<std::string>(const std::string& name)>;
/// The same with variables from elsewhere than the process's environment.
LaunchInfo launch_info_from(const Variables&);

/// The store that belongs to the place: rank 0 serves, all connect. Where the launch is known, a port that is
/// taken is not the end: rank 0 takes the first free one of eight, and the others search them, passing over
/// stores of other launches and all else (a firewall must let the eight pass). A place that names a job
/// ("job:<id>") has no port: its ranks meet in a private directory (0700, under XDG_RUNTIME_DIR or the
/// temporary directory) derived from the job's id. Then rank 0 waits for all, which
/// Errc::timeout names if they do not come, and removes the directory with its store; what an earlier job has
/// left there is not taken for this one's.
std::shared_ptr<Store> store_for_launch(const LaunchInfo&,
                                        std::chrono::milliseconds timeout = std::chrono::seconds(30));

}  // namespace rz
