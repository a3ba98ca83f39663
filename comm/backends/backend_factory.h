#pragma once
/// The one place where a backend is chosen by name.

#include <memory>

#include "comm/backend.h"
#include "comm/communicator.h"

namespace rz {

/// The backend that `options.backend` names, for rank `rank` of `size` that meet in `store`; every rank calls
/// it. Errc::config for a name that is none, with the choices; Errc::unsupported for one that cannot serve
/// `options.device`, or is not in this build or on this machine.
std::unique_ptr<Backend> make_backend(int rank, int size, const std::shared_ptr<Store>& store,
                                      const CommOptions& options);

/// Memory of `options.device` over a backend of MPI for the host's; every rank calls it.
std::unique_ptr<Backend> host_staged_over_mpi(const std::shared_ptr<Backend>& host, int rank, int size,
                                              const CommOptions& options);

}  // namespace rz
