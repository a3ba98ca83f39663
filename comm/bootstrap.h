#pragma once
/// Rank, size and rendezvous address from the environment of a launcher.

#include <functional>
#include <memory>
#include <optional>
#include <string>

#include "store.h"

namespace rz {

struct LaunchInfo {
  int rank = 0;
  int size = 1;
  int local_rank = 0;
  int local_size = 1;
  /// "host:port" of rank 0's store, or "job:<id>" if all ranks are on this node and meet in a directory named
  /// after the job, or "mpi:" if MPI hands on where rank 0's store is. Empty for a group of one.
  std::string master;
  /// The launcher that was detected: "torchrun", "openmpi", "pmix", "pals", "mpich", "mvapich", "jsrun",
  /// "horovodrun", "flux", "slurm" or "none".
  std::string launcher;
  /// Identifier of this launch: Slurm's job, step and restart; torchrun's run id and port (plus its restart
  /// count if all ranks are on one node); the PMIx namespace; Flux's job id; PALS_APID; RZ_LAUNCH, which
  /// rzrun sets. If the environment has none of them: the launcher's process, where MASTER_ADDR is set and
  /// all ranks are on one node below a launcher other than torchrun. Otherwise, and for a group of one,
  /// empty.
  std::string launch;
};

/// Reads RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT, or the equivalents of
/// another launcher: Open MPI (OMPI_COMM_WORLD_*), PMIx (PMIX_*), MPICH and Intel MPI (PMI_*, MPI_LOCAL*),
/// HPE's PALS (PALS_*, PMI_*), MVAPICH (MV2_*, MVP_*), jsrun (JSM_NAMESPACE_*), horovodrun (HOROVOD_*), Flux
/// (FLUX_*) and Slurm (SLURM_*). Without any of them the result is a group of one. Errc::config lists every
/// missing or malformed variable and names the launcher; it names a variable of a launcher whose rank cannot
/// be read, and an allocation of Slurm with several tasks in which srun has not started this process. Flux
/// has no variable for the number of ranks on a node: the tasks must divide evenly by the nodes, otherwise
/// Errc::config.
///
/// Ranks of one node meet under the identity of their job. MPICH, and some others, have no variable for it;
/// it is then the process of the launcher on this node. Where that is not visible, as in a container with a
/// pid namespace of its own, RZ_LAUNCH must have a text that no other job has, otherwise Errc::config.
///
/// MASTER_ADDR and MASTER_PORT apply under every launcher. Exception: if all ranks of torchrun or rzrun are
/// on this node, they meet under their launch identifier and need no port. Without the two variables:
///   - ranks of Open MPI on several nodes get both by MPI, in store_for_launch();
///   - ranks of another MPI launcher or Flux must all be on this node;
///   - ranks of Slurm use the first node of the job, and a port of at least 20000 derived from job and step.
///
/// If torchrun's agent itself listens at MASTER_PORT (TORCHELASTIC_USE_AGENT_STORE), the store uses the next
/// port.
LaunchInfo launch_info_from_environment();

/// Looks up a variable: its value, or nullopt.
using Variables = std::function<std::optional<std::string>(const std::string& name)>;
/// launch_info_from_environment() with variables from another source than the process environment.
LaunchInfo launch_info_from(const Variables&);

/// Creates the store of a launch: rank 0 serves, all ranks connect.
///   - "host:port" with a launch identifier: rank 0 takes the first free one of eight ports. The other ranks
///     search these ports and skip servers of other launches. Firewalls must pass all eight.
///   - "host:port" without one: that port only.
///   - "job:<id>": no port. The ranks meet in a private directory (mode 0700, under XDG_RUNTIME_DIR or the
///     temporary directory) whose name derives from the job id. Rank 0 waits for all ranks, and removes the
///     directory with its store. Remains of an earlier job are ignored. Errc::rendezvous at once if another
///     process that is alive has this rank of this job: a program that a rank starts must not inherit its
///     variables.
///   - "mpi:": rank 0 takes a free port at each address of its host, or of the interface that RZ_INTERFACE
///     names, and MPI hands these to all ranks, with a secret of this job, unless RZ_SECRET or another
///     variable has one. If MPI is not initialised, this function does that, and finalises MPI before it
///     returns, unless `backend` (CommOptions::backend; empty: RZ_BACKEND) is "mpi", so it works once in a
///     process. It does neither in a program that is linked with MPI, which calls MPI_Init before.
///     Errc::config if MPI is missing.
///
/// Errc::timeout names the ranks that did not arrive.
std::shared_ptr<Store> store_for_launch(const LaunchInfo&,
                                        std::chrono::milliseconds timeout = std::chrono::seconds(30),
                                        const std::string& backend = {});

}  // namespace rz
