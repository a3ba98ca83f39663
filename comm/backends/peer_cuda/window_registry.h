#pragma once
/// Bookkeeping of a group's symmetric windows and of their use on this rank; makes no device calls. A window
/// has the same number on every rank and a different address on each. Thread-safe.

#include <cstddef>
#include <cstdint>
#include <mutex>
#include <optional>
#include <vector>

#include "comm/backends/peer_cuda/kernels/kernel_args.h"

namespace rz {

class WindowRegistry {
 public:
  static constexpr std::size_t max_windows = peer::max_windows;

  /// Set of windows, one bit each.
  using WindowSet = std::uint64_t;
  static_assert(max_windows <= 64);

  /// Windows not in use on this rank.
  WindowSet unused() const;
  /// The smallest window of `unused` that holds `bytes`; the lowest number among equals. A function of its
  /// arguments and the windows' sizes, so all ranks get the same result. nullopt: none fits.
  std::optional<int> best_fit(std::size_t bytes, WindowSet unused) const;
  bool is_full() const;
  /// Registers this rank's part of a new window, in use. Returns its number; numbers count up from 0.
  int add(const std::byte* memory, std::size_t bytes);
  void acquire(int window);
  void release(int window) noexcept;

  /// Location of the range for peers, encoded as peer::SyncSlot::source; 0 unless one window contains it.
  std::uint64_t handle_of(const void* at, std::size_t bytes) const;

 private:
  struct Window {
    const std::byte* memory;
    std::size_t bytes;
    bool used;
  };
  mutable std::mutex mutex_;
  std::vector<Window> windows_;
};

}  // namespace rz
