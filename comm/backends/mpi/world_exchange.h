#pragma once
/// An exchange of short texts within MPI_COMM_WORLD, before there is a store.

#include <string>

#include "comm/backends/mpi/mpi_runtime.h"
#include "comm/bootstrap/mpi_library.h"

namespace rz::mpi {

/// The tag of messages within MPI_COMM_WORLD, and of MPI_Comm_create_group(), which sends them. The program
/// must not use it.
inline constexpr int world_tag = 21082;

/// Errc::unsupported unless MPI_COMM_WORLD has the `launched` processes of the launcher. Under another MPI's
/// launcher, every process has one of size 1.
void require_world(int rank, int launched, const std::string& launcher, const MpiRuntime&);

/// exchange_over_mpi().
std::string exchange(const MpiExchange&);

}  // namespace rz::mpi
