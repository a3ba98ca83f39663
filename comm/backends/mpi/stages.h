#pragma once
/// A collective as a sequence of stages. A stage posts non-blocking MPI calls and, once they complete,
/// processes the received data. Then the next stage starts.

#include <mpi.h>

#include <functional>
#include <vector>

#include "comm/backends/mpi/operators.h"
#include "comm/collective.h"

namespace rz::mpi {

using Requests = std::vector<MPI_Request>;

struct Stage {
  std::function<void(Requests&)> post;
  std::function<void()> finish;  ///< may be empty
};

/// The communicator and settings of collectives.
struct MpiContext {
  MPI_Comm comm = MPI_COMM_NULL;
  int rank = 0, size = 1;
  bool deterministic = true;
  std::size_t max_call_bytes = 0;  ///< bytes per MPI call
};

/// True for a collective on device memory, which is made of sends and receives: Open MPI accepts device
/// memory in no non-blocking collective, even if it is CUDA-aware.
bool uses_messages(const CollectiveCall&);

/// The stages of a validated collective; empty if there is nothing to move. With `deterministic`,
/// contributions are exchanged and reduced by rz::reduce in rank order, with the same bits as the native
/// backend; otherwise MPI reduces them. The call, the context and the operators must outlive the stages.
/// Errc::unsupported for a reduction of device memory.
std::vector<Stage> plan_stages(const CollectiveCall&, const MpiContext&, Operators&);

}  // namespace rz::mpi
