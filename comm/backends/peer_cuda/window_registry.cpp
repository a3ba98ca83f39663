#include "comm/backends/peer_cuda/window_registry.h"

#include <functional>

namespace rz {

WindowRegistry::WindowSet WindowRegistry::unused() const {
  const std::lock_guard lock(mutex_);
  WindowSet set = 0;
  for (std::size_t i = 0; i < windows_.size(); ++i)
    if (!windows_[i].used) set |= WindowSet{1} << i;
  return set;
}

std::optional<int> WindowRegistry::best_fit(std::size_t bytes, WindowSet unused) const {
  const std::lock_guard lock(mutex_);
  std::optional<std::size_t> best;
  for (std::size_t i = 0; i < windows_.size(); ++i)
    if ((unused >> i & 1) && windows_[i].bytes >= bytes &&
        (!best || windows_[i].bytes < windows_[*best].bytes))
      best = i;
  if (!best) return std::nullopt;
  return static_cast<int>(*best);
}

bool WindowRegistry::is_full() const {
  const std::lock_guard lock(mutex_);
  return windows_.size() == max_windows;
}

int WindowRegistry::add(const std::byte* memory, std::size_t bytes) {
  const std::lock_guard lock(mutex_);
  windows_.push_back({memory, bytes, true});
  return static_cast<int>(windows_.size()) - 1;
}

void WindowRegistry::acquire(int window) {
  const std::lock_guard lock(mutex_);
  windows_[static_cast<std::size_t>(window)].used = true;
}

void WindowRegistry::release(int window) noexcept {
  const std::lock_guard lock(mutex_);
  windows_[static_cast<std::size_t>(window)].used = false;
}

std::uint64_t WindowRegistry::handle_of(const void* at, std::size_t bytes) const {
  const std::lock_guard lock(mutex_);
  const std::less_equal<const std::byte*> up_to;
  const auto* const p = static_cast<const std::byte*>(at);
  for (std::size_t i = 0; i < windows_.size(); ++i) {
    const Window& w = windows_[i];
    if (!up_to(w.memory, p) || !up_to(p, w.memory + w.bytes)) continue;
    const auto offset = static_cast<std::size_t>(p - w.memory);
    if (bytes <= w.bytes - offset) return peer::window_source(static_cast<int>(i), offset);
  }
  return 0;
}

}  // namespace rz
