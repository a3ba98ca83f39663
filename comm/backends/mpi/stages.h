#pragma once
/// A collective as stages: non-blocking calls of MPI that run together, then work on what they brought. A
/// stage begins when the one before has ended.

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

/// Where and how collectives run.
struct MpiContext {
  MPI_Comm comm = MPI_COMM_NULL;
  int rank = 0, size = 1;
  bool deterministic = true;
  std::size_t max_call_bytes = 0;  ///< of one count of MPI
};

/// True of a collective that is made of messages because its memory is a device's: Open MPI, CUDA-aware as it
/// may be, takes such memory in no collective that does not block.
bool uses_messages(const CollectiveCall&);

/// The stages of a checked collective; none if there is nothing to move. With `deterministic`, contributions
/// are exchanged whole and combined by rz::reduce in rank order, which gives the bits of the scheduled
/// backend; else MPI combines them. Operation, wire and operators outlive the stages. Errc::unsupported for a
/// reduction of a device's memory.
std::vector<Stage> plan_stages(const CollectiveCall&, const MpiContext&, Operators&);

}  // namespace rz::mpi
