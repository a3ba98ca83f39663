#pragma once
/// Which windows of symmetric memory a group has, and which of them are in use here: bookkeeping that knows
/// of no device. A window is memory that every rank has under one number, each at an address of its own.
/// Thread-safe.

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

  /// A set of windows, a bit each.
  using WindowSet = std::uint64_t;
  static_assert(max_windows <= 64);

  /// Those that nobody uses on this rank.
  WindowSet unused() const;
  /// The smallest of `unused` that holds `bytes`, of several the first: on every rank the same, for the same
  /// question. None: a new one is needed.
  std::optional<int> best_fit(std::size_t bytes, WindowSet unused) const;
  bool is_full() const;
  /// A new window, in use: numbers go up from 0. It is this rank's memory.
  int add(const std::byte* memory, std::size_t bytes);
  void acquire(int window);
  void release(int window) noexcept;

  /// What letters call this memory (peer_call.h); 0 unless all of it lies in one window.
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
