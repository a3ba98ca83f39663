#pragma once
/// The arenas of a group of ranks on CUDA devices of one node. Every rank maps all arenas: by plain pointers
/// among threads of one process, by CUDA IPC handles among processes.

#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "comm/backend.h"
#include "comm/backends/peer_cuda/kernels/kernel_args.h"
#include "comm/bootstrap/device_location.h"
#include "comm/device/memory.h"

namespace rz {

class PeerArenas {
 public:
  /// Collective over `host`. Errc::unsupported for more than peer::max_ranks ranks, for a rank on another
  /// node, or for a peer whose device memory is not accessible from this device; the message names that rank.
  PeerArenas(Backend& host, int rank, int size, Device, std::size_t slot_bytes);
  ~PeerArenas();
  PeerArenas(const PeerArenas&) = delete;
  PeerArenas& operator=(const PeerArenas&) = delete;

  Device device() const { return device_; }
  const peer::DeviceComm& device_comm() const { return device_comm_; }
  peer::DeviceStatus& status() const { return *device_comm_.status; }
  /// Stream for work that waits for no other rank: zeroing memory, publishing addresses, signal_departure().
  const Stream& control_stream() const { return control_stream_; }
  /// True if all ranks are threads of one process, so that plain pointers are valid on all of them.
  bool one_process() const { return one_process_; }
  /// The first two ranks that are threads of one process and share a GPU, equal on all ranks; none: there are
  /// none.
  const std::optional<std::pair<int, int>>& threads_on_one_gpu() const { return threads_on_one_gpu_; }
  /// Maps each rank's device memory; element `rank` is `mine` itself. Collective over `host`; `mine` must be
  /// the start of an allocation. On failure every rank throws, and the error names a rank that passed null or
  /// could not map a peer's memory. Memory must not be freed while peers have it mapped.
  std::vector<std::shared_ptr<std::byte>> map_peers(Backend& host, const std::shared_ptr<std::byte>& mine);
  /// Sets the departure flag in every peer's arena; their kernels stop waiting for this rank, now and later.
  /// Asynchronous, does not block.
  void signal_departure(peer::Departure) noexcept;
  /// Waits up to 2 s for the writes of signal_departure(). False: they are still in flight.
  bool drain() const noexcept;
  /// Unmaps the peers' arenas. No kernel of this rank may use them any more.
  void unmap_peers() noexcept;
  /// Keeps all mappings for the process lifetime, because a kernel of this rank or of a peer may still access
  /// them.
  void leak() noexcept;

 private:
  const Device device_;
  std::optional<DeferredFrees> deferred_frees_;  // if another rank is a thread of this process
  std::vector<DeviceLocation> locations_;
  peer::DeviceComm device_comm_{};
  bool one_process_ = true;
  std::optional<std::pair<int, int>> threads_on_one_gpu_;
  std::shared_ptr<std::byte> status_;
  Stream control_stream_;
  std::vector<std::shared_ptr<std::byte>> arenas_;  // by rank, including this one
};

}  // namespace rz
