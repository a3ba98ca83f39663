#pragma once
/// The MPI communicators of a group.

#include <mpi.h>

#include <chrono>
#include <span>

#include "comm/backends/mpi/mpi_runtime.h"

namespace rz::mpi {

/// Two communicators with the same ranks and MPI_ERRORS_RETURN: one for call verification and control
/// messages, one for data.
struct CommPair {
  MPI_Comm control = MPI_COMM_NULL, data = MPI_COMM_NULL;
};

/// Duplicates `comm` twice. Errc::timeout if not all ranks join.
CommPair duplicate(MPI_Comm comm, std::chrono::milliseconds timeout);
/// Takes ownership of `comm` and duplicates it once.
CommPair adopt(MPI_Comm comm, std::chrono::milliseconds timeout);
/// Collective over `members`, which must be the same list on each of them: communicators of these ranks of
/// `comm`. MPI may send messages with the tag, which no other messages of `comm` have. MPI_Comm_create_group
/// cannot be polled: call it when all members have arrived. MpiRuntime::call_within() bounds it.
CommPair split(MpiRuntime&, MPI_Comm comm, std::span<const int> members, int tag,
               std::chrono::milliseconds timeout);
void free(CommPair);

}  // namespace rz::mpi
