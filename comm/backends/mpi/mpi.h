#pragma once
/// The MPI backend for programs that have an MPI communicator of their own: link ringzero::mpi.
///
///   auto comm = rz::connect_mpi(MPI_COMM_WORLD);
///
/// MPI must have been initialised. With MPI_THREAD_MULTIPLE a progress thread of the communicator's own, or
/// whoever waits, moves its operations. With less, operations move only within calls of the communicator and
/// Work::wait() and done(), which must then come from where MPI allows calls (MPI_THREAD_FUNNELED: the main
/// thread; SERIALIZED: never beside another call of MPI), and abort() reaches the other ranks at their next
/// such call.
///
/// A communicator that is destroyed leaves in the background, once all its ranks have; MPI_Finalize waits for
/// that. After a failure its MPI communicators are given up, not freed, and MPI may still write to buffers of
/// collectives that were in flight, as it has no way to withdraw them: keep such memory until the process
/// ends.

#include <mpi.h>

#include <chrono>
#include <memory>
#include <utility>

#include "comm/backend.h"
#include "comm/backends/backend_factory.h"
#include "comm/backends/composite_backend.h"
#include "comm/communicator.h"
#include "comm/device/cuda_runtime.h"

namespace rz {

struct MpiOptions {
  /// Whose memory operations may lie on besides the host's, where MPI is CUDA-aware.
  Device device{};
  std::chrono::milliseconds timeout{600'000};            ///< of one operation, from its submission
  std::chrono::milliseconds rendezvous_timeout{30'000};  ///< of duplicating the communicator
  bool deterministic = true;
  /// Of one count handed to MPI, whose counts are ints: larger calls go in pieces. At least 8.
  std::size_t max_call_bytes = std::size_t{1} << 30;
};

/// On two duplicates of `comm`, which stays the caller's; every rank of it calls this. Errc::unsupported for
/// an intercommunicator, Errc::timeout if the other ranks do not come.
std::unique_ptr<Backend> mpi_backend(MPI_Comm comm, const MpiOptions& = {});

/// The communicator of all ranks of `comm`, under the same numbers, and of memory of `options.device`. Of the
/// options, those of the rendezvous and of transports are not looked at.
inline Communicator connect_mpi(MPI_Comm comm, CommOptions options = {}) {
  cuda::require_device(options.device);
  auto backend = mpi_backend(comm, {.device = options.device,
                                    .timeout = options.timeout,
                                    .rendezvous_timeout = options.rendezvous_timeout,
                                    .deterministic = options.deterministic});
  int rank = 0, size = 1;
  MPI_Comm_rank(comm, &rank);
  MPI_Comm_size(comm, &size);
  options.backend = "mpi";
  if (options.device.kind != Device::host) {
    const std::shared_ptr<Backend> host = std::move(backend);
    backend = device_and_host_backend(host, host_staged_over_mpi(host, rank, size, options));
  }
  return Communicator::from_backend(rank, size, std::move(backend), std::move(options));
}

}  // namespace rz
