#pragma once
/// Rendezvous of ranks on several hosts to which MPI hands on where rank 0 is. Internal: users call
/// store_for_launch().

#include <chrono>
#include <memory>
#include <string>

#include "comm/bootstrap.h"
#include "comm/store.h"

namespace rz {

/// Rank 0 listens at a free port of each address of its host, or of the interface that RZ_INTERFACE names,
/// and hands these and the port to all ranks by exchange_over_mpi(); and a secret of this job alone, unless a
/// variable has one, or RZ_INSECURE is set. The file of the home is not used. MPI stays initialised if
/// `backend` is "mpi".
///
/// Errc::config names a rank whose variables of the secret, or whose backend, differ from those of rank 0;
/// and the variables that are missing, if MPI cannot hand anything on. Errors of the exchange are thrown on
/// all ranks.
std::shared_ptr<Store> mpi_rendezvous_store(const LaunchInfo&, const std::string& backend,
                                            std::chrono::milliseconds timeout);

}  // namespace rz
