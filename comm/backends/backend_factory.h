#pragma once
/// Creates backends by name, and those that are made from others.

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "../backend.h"
#include "../options.h"
#include "../store.h"

namespace rz {

/// What a group takes over from others.
struct Inherited {
  std::shared_ptr<SharedMemoryAllocator> memory;  ///< host memory that is zero-copy in both; null: none
  /// A failure of either group ends both; null: none.
  std::shared_ptr<class LinkMonitor> failures;
  std::vector<int> ranks;  ///< there, of the ranks of this group
  /// Called while this rank waits for the others to connect; it may throw. Empty: nothing.
  std::function<void()> check_peers;
};

/// Collective over the `size` ranks of `store`: creates the backend named by `options.backend`. Errc::config
/// (with the valid names) for an unknown name. Errc::unsupported if the backend cannot serve
/// `options.device`, or is not available in this build or on this machine.
std::unique_ptr<Backend> make_backend(int rank, int size, const std::shared_ptr<Store>& store,
                                      const CommOptions& options, const Inherited& = {});

/// Collective: a backend for memory of `options.device` over an MPI backend for host memory. Passes device
/// pointers to MPI if every rank's MPI accepts them; otherwise stages all calls.
std::unique_ptr<Backend> host_staged_over_mpi(const std::shared_ptr<Backend>& host, int rank, int size,
                                              const CommOptions& options);

/// Routes each operation to the backend that serves its memory's device. All operations of a group must be on
/// one side; otherwise submit() fails with Errc::invalid_argument. Allocations come from the device backend,
/// register_buffer() from the host's. abort() aborts both backends. describe() includes `why`, the reason for
/// the choice of the device backend, unless it is empty.
std::unique_ptr<Backend> device_and_host_backend(std::shared_ptr<Backend> host,
                                                 std::unique_ptr<Backend> device, std::string why = "");

}  // namespace rz
