#pragma once
/// Who am I: rank, size and rendezvous, from the environment that torchrun, Open MPI, MPICH, PMIx and Slurm
/// set.

#include <memory>
#include <string>

#include "comm/store.h"

namespace rz {

struct Place {
  int rank = 0;
  int size = 1;
  int local_rank = 0;
  int local_size = 1;
  std::string master;  ///< "host:port" of rank 0's store; empty for a group of one
  std::string
      launcher;  ///< which environment it was: "torchrun", "openmpi", "pmix", "mpich", "slurm", "none"
};

/// Reads RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR, MASTER_PORT, or the equivalents of an
/// MPI or Slurm launcher (OMPI_COMM_WORLD_*, PMIX_*, PMI_*, MPI_LOCAL*, SLURM_*). With none of them: a group
/// of one. Errc::config names each variable that is missing or malformed, and the launcher whose it is.
Place place_from_environment();

/// The store that belongs to the place: rank 0 serves, all connect. Where an MPI launcher gives no
/// MASTER_ADDR and all ranks are on this host, the ranks meet through a private socket directory derived from
/// the job's id.
std::shared_ptr<Store> store_for(const Place&, std::chrono::milliseconds timeout = std::chrono::seconds(30));

}  // namespace rz
