#pragma once
/// The arenas of a group of ranks on CUDA devices of one host, each mapped by all: threads of one process by
/// plain pointers, processes by CUDA's IPC handles.

#include <memory>
#include <vector>

#include "comm/backend.h"
#include "comm/backends/peer_cuda/kernels/kernel_args.h"
#include "comm/bootstrap/device_location.h"
#include "comm/device/memory.h"

namespace rz {

class PeerArenas {
 public:
  /// Every rank calls it; they talk over `host`. Errc::unsupported names a rank that is on another host, or
  /// whose device this one cannot reach.
  PeerArenas(Backend& host, int rank, int size, Device, std::size_t slot_bytes);
  ~PeerArenas();
  PeerArenas(const PeerArenas&) = delete;
  PeerArenas& operator=(const PeerArenas&) = delete;

  Device device() const { return device_; }
  const peer::DeviceComm& device_comm() const { return device_comm_; }
  peer::DeviceStatus& status() const { return *device_comm_.status; }
  /// For what waits for no other rank: new memory, addresses, and the words of leave().
  const Stream& control_stream() const { return control_stream_; }
  /// Whether plain pointers of a rank mean the same to all others.
  bool one_process() const { return one_process_; }
  /// Each rank's device memory, as this one reaches it, its own as it is; every rank calls it with the start
  /// of an allocation, and they talk over `host`. If that fails, it does on every rank; one that passes
  /// nothing, or cannot map a peer's, is named. Nobody may give back what peers still have mapped.
  std::vector<std::shared_ptr<std::byte>> map_peers(Backend& host, const std::shared_ptr<std::byte>& mine);
  /// Tells the peers' kernels, now and later, that they wait for this rank in vain. Bounded.
  void signal_departure(peer::Departure) noexcept;
  /// Waits for the last words that it told them, at most two seconds. False: they are still on their way.
  bool drain() const noexcept;
  /// Closes the peers' arenas, which nothing of this rank may use any more.
  void unmap_peers() noexcept;
  /// For memory that kernels, here or on peers, may go on using: it is never given back.
  void leak() noexcept;

 private:
  const Device device_;
  std::vector<DeviceLocation> locations_;
  peer::DeviceComm device_comm_{};
  bool one_process_ = true;
  std::shared_ptr<std::byte> status_;
  Stream control_stream_;
  std::vector<std::shared_ptr<std::byte>> arenas_;  // each rank's, this one's too
};

}  // namespace rz
