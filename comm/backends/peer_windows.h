#pragma once
/// Symmetric memory of CUDA peers in several processes: every rank's part of a window is mapped by all, so
/// that kernels read it where it lies, by its number and an offset.

#include <memory>
#include <mutex>
#include <vector>

#include "comm/backend.h"
#include "comm/backends/peer_group.h"
#include "comm/backends/window_book.h"

namespace rz {

class PeerWindows {
 public:
  /// The group must live as long.
  explicit PeerWindows(PeerGroup& group) : group_(group) {}

  /// Zeroed, aligned to 256 bytes; every rank calls it with as many bytes, and they talk over `host`. Null,
  /// on every rank, once there are WindowBook::most windows and none that fits is unused by all. It may
  /// outlive this. Where one rank has no memory, all get an error that names it; Errc::mismatch names a rank
  /// that asks for another size.
  std::shared_ptr<std::byte> allocate(Backend& host, std::size_t bytes);
  /// As WindowBook's.
  std::uint64_t source_of(const void* at, std::size_t bytes) const { return book_->source_of(at, bytes); }
  /// Closes the peers' parts, which no kernel of this rank may read any more.
  void let_go() noexcept;
  /// For memory that peers may go on reading: it is never given back.
  void keep() noexcept;

 private:
  struct Lease;
  using Parts = std::vector<std::shared_ptr<std::byte>>;

  int open(Backend& host, std::size_t bytes);
  void tell_kernels(int window, const Parts& parts) const;

  PeerGroup& group_;
  const std::shared_ptr<WindowBook> book_ = std::make_shared<WindowBook>();
  std::mutex mutex_;
  std::vector<Parts> windows_;                   // each rank's part of each window
  std::vector<std::shared_ptr<std::byte>> own_;  // this rank's parts
};

}  // namespace rz
