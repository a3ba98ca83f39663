#pragma once
/// The arenas of a group of ranks on CUDA devices of one host, each mapped by all: threads of one process by
/// plain pointers, processes by CUDA's IPC handles.

#include <memory>
#include <vector>

#include "comm/backend.h"
#include "comm/core/memory.h"
#include "comm/kernels/peer_call.h"

namespace rz {

class PeerGroup {
 public:
  /// Every rank calls it; they talk over `host`. Errc::unsupported names a rank that is on another host, or
  /// whose device this one cannot reach.
  PeerGroup(Backend& host, int rank, int size, Device, std::size_t slot_bytes);
  ~PeerGroup();
  PeerGroup(const PeerGroup&) = delete;
  PeerGroup& operator=(const PeerGroup&) = delete;

  const peer::Seat& seat() const { return seat_; }
  peer::Status& status() const { return *seat_.status; }
  /// Whether plain pointers of a rank mean the same to all others.
  bool one_process() const { return one_process_; }
  /// Tells the peers' kernels, now and later, that they wait for this rank in vain. Bounded.
  void leave(peer::Leaving) noexcept;
  /// For memory that peers may go on reading: it is never given back.
  void keep_arena() noexcept;

 private:
  const Device device_;
  peer::Seat seat_{};
  bool one_process_ = true;
  std::shared_ptr<std::byte> status_;
  Stream control_;
  std::vector<std::shared_ptr<std::byte>> arenas_;  // each rank's, this one's too
};

}  // namespace rz
