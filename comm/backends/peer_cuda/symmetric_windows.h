#pragma once
/// Symmetric memory of CUDA peers in several processes: every rank's part of a window is mapped by all, so
/// that kernels read it where it lies, by its number and an offset.

#include <memory>
#include <mutex>
#include <vector>

#include "comm/backend.h"
#include "comm/backends/peer_cuda/peer_arenas.h"
#include "comm/backends/peer_cuda/window_registry.h"

namespace rz {

class SymmetricWindows {
 public:
  /// The group must live as long.
  explicit SymmetricWindows(PeerArenas& group) : group_(group) {}

  /// Zeroed, aligned to 256 bytes; every rank calls it with as many bytes, and they talk over `host`. Null,
  /// on every rank, once there are WindowRegistry::max_windows windows and none that fits is unused by all.
  /// It may outlive this. Where one rank has no memory, all get an error that names it; Errc::mismatch names
  /// a rank that asks for another size.
  std::shared_ptr<std::byte> allocate(Backend& host, std::size_t bytes);
  /// As WindowRegistry's.
  std::uint64_t handle_of(const void* at, std::size_t bytes) const { return registry_->handle_of(at, bytes); }
  /// Closes the peers' parts, which no kernel of this rank may read any more.
  void unmap_peers() noexcept;
  /// For memory that peers may go on reading: it is never given back.
  void leak() noexcept;

 private:
  struct WindowLease;
  using Parts = std::vector<std::shared_ptr<std::byte>>;

  int open_window(Backend& host, std::size_t bytes);
  void publish_addresses(int window, const Parts& parts) const;

  PeerArenas& group_;
  const std::shared_ptr<WindowRegistry> registry_ = std::make_shared<WindowRegistry>();
  std::mutex mutex_;
  std::vector<Parts> windows_;                          // each rank's part of each window
  std::vector<std::shared_ptr<std::byte>> own_memory_;  // this rank's parts
};

}  // namespace rz
