#pragma once
/// MPI backend for programs that have an MPI communicator; link ringzero::mpi.
///
///   auto comm = rz::connect_mpi(MPI_COMM_WORLD);
///
/// MPI must be initialised. With MPI_THREAD_MULTIPLE, the communicator's progress thread or a thread blocked
/// in Work::wait() progresses its operations. With a lower level, operations progress only within calls of
/// the communicator, Work::wait() and Work::done(). These calls must then follow MPI's rules
/// (MPI_THREAD_FUNNELED: main thread only; SERIALIZED: never concurrently with another MPI call), and abort()
/// reaches the other ranks at their next such call. MPI_Comm_create_group, in split(), cannot be polled: if
/// it has not returned by the deadline, with MPI_THREAD_MULTIPLE it is left in a thread, and split() throws;
/// with a lower level the process ends, with a line on stderr and status 1.
///
/// A destroyed communicator is released in the background once all its ranks have destroyed theirs;
/// MPI_Finalize waits for that. A communicator may outlive MPI: once MPI_Finalize has begun, calls of it
/// throw Errc::aborted, and neither they, nor its threads, nor its destructor call MPI. After a failure its
/// MPI communicators are leaked. MPI cannot cancel collectives in flight and may still write to their
/// buffers: keep such memory until the process ends.

#include <mpi.h>

#include <chrono>
#include <memory>
#include <utility>

#include "../../backend.h"
#include "../../communicator.h"
#include "../../core/long_wait.h"
#include "../../device/cuda_runtime.h"
#include "../backend_factory.h"

namespace rz {

struct MpiOptions {
  /// Device whose memory operations may use besides host memory, if MPI is CUDA-aware.
  Device device{};
  std::chrono::milliseconds timeout{600'000};            ///< of one operation, from its submission
  std::chrono::milliseconds rendezvous_timeout{30'000};  ///< of duplicating the communicator, and of split()
  bool deterministic = true;
  /// Bytes per MPI call, whose counts are ints; larger transfers are cut into chunks. From 8 to 2^30.
  std::size_t max_call_bytes = std::size_t{1} << 30;
  WaitReportOptions waits;
};

/// Collective over `comm`; works on two duplicates of it, and `comm` stays the caller's.
/// Errc::invalid_argument before MPI_Init, for MPI_COMM_NULL or for a max_call_bytes out of range.
/// Errc::unsupported for an intercommunicator or once MPI was finalised. Errc::timeout if not all ranks call
/// it within `rendezvous_timeout`.
std::unique_ptr<Backend> mpi_backend(MPI_Comm comm, const MpiOptions& = {});

/// A communicator with the ranks of `comm`, for memory of `options.device`. Of the rendezvous and transport
/// options only rendezvous_timeout applies. Errors as mpi_backend().
inline Communicator connect_mpi(MPI_Comm comm, CommOptions options = {}) {
  cuda::require_device(options.device);
  auto backend = mpi_backend(comm, {.device = options.device,
                                    .timeout = options.timeout,
                                    .rendezvous_timeout = options.rendezvous_timeout,
                                    .deterministic = options.deterministic,
                                    .waits = options.waits()});
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
