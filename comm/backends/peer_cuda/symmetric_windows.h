#pragma once
/// Symmetric memory of CUDA peers in several processes. Every rank maps all parts of a window, so kernels
/// read it in place, addressed by window number and offset.

#include <memory>
#include <mutex>
#include <vector>

#include "comm/backend.h"
#include "comm/backends/peer_cuda/peer_arenas.h"
#include "comm/backends/peer_cuda/window_registry.h"

namespace rz {

class SymmetricWindows {
 public:
  /// `group` must outlive this object.
  explicit SymmetricWindows(PeerArenas& group) : group_(group) {}

  /// Collective over `host`; every rank must pass the same size. Returns zeroed memory aligned to 256 bytes,
  /// which may outlive this object. Returns null on every rank if there are already
  /// WindowRegistry::max_windows windows and none that fits is unused on all ranks. If a rank cannot allocate
  /// or map, every rank throws an error that names it. Errc::mismatch names a rank that passed another size.
  std::shared_ptr<std::byte> allocate(Backend& host, std::size_t bytes);
  /// As WindowRegistry::handle_of().
  std::uint64_t handle_of(const void* at, std::size_t bytes) const { return registry_->handle_of(at, bytes); }
  /// Unmaps the peers' parts. No kernel of this rank may read them any more.
  void unmap_peers() noexcept;
  /// Leaks all windows, because peers may still read them.
  void leak() noexcept;

 private:
  struct WindowLease;
  using Parts = std::vector<std::shared_ptr<std::byte>>;

  int open_window(Backend& host, std::size_t bytes);
  void publish_addresses(int window, const Parts& parts) const;

  PeerArenas& group_;
  const std::shared_ptr<WindowRegistry> registry_ = std::make_shared<WindowRegistry>();
  std::mutex mutex_;
  std::vector<Parts> windows_;                          // by window, then rank
  std::vector<std::shared_ptr<std::byte>> own_memory_;  // this rank's part, by window
};

}  // namespace rz
