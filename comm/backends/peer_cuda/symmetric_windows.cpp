#include "comm/backends/peer_cuda/symmetric_windows.h"

#include <exception>
#include <optional>

#include "comm/bootstrap/device_location.h"
#include "comm/core/error.h"
#include "comm/core/integer_math.h"

namespace rz {

namespace {

// CUDA IPC maps memory in units of 2 MiB: a smaller window would expose neighbouring memory to the peers.
constexpr std::size_t window_granularity = std::size_t{2} << 20;

/// Exchanged by allocate(): the requested size and the windows unused on a rank.
struct WindowRequest {
  std::size_t bytes;
  WindowRegistry::WindowSet unused;
};

/// Windows that no rank uses. Errc::mismatch if the sizes differ.
WindowRegistry::WindowSet intersect_unused(Backend& host, const peer::DeviceComm& comm,
                                           const WindowRequest& mine) {
  const std::vector<WindowRequest> all = all_gather_value(host, mine, comm.size);
  WindowRegistry::WindowSet unused = ~WindowRegistry::WindowSet{0};
  for (const WindowRequest& r : all) unused &= r.unused;
  for (int r = 0; r < comm.size; ++r) {
    const std::size_t theirs = all[static_cast<std::size_t>(r)].bytes;
    if (theirs != mine.bytes)
      throw Error(Errc::mismatch,
                  concat("rank ", comm.rank, " called allocate_symmetric of ", mine.bytes,
                         " bytes, but rank ", r, " of ", theirs, " bytes"),
                  r);
  }
  return unused;
}

}  // namespace

/// Keeps a window in use: its memory and its registry entry.
struct SymmetricWindows::WindowLease {
  std::shared_ptr<WindowRegistry> registry;
  std::shared_ptr<std::byte> memory;
  int window;
  ~WindowLease() { registry->release(window); }
};

std::shared_ptr<std::byte> SymmetricWindows::allocate(Backend& host, std::size_t bytes) {
  const std::lock_guard one_at_a_time(mutex_);
  const WindowRegistry::WindowSet unused =
      intersect_unused(host, group_.device_comm(), {bytes, registry_->unused()});
  std::optional<int> window = registry_->best_fit(bytes, unused);
  if (window)
    registry_->acquire(*window);
  else if (registry_->is_full())
    return nullptr;
  else
    window = open_window(host, round_up(std::max<std::size_t>(bytes, 1), window_granularity));
  const auto& memory = own_memory_[static_cast<std::size_t>(*window)];
  const std::shared_ptr<WindowLease> lease(new WindowLease{registry_, memory, *window});
  memset_async(memory.get(), 0, bytes, group_.control_stream());
  group_.control_stream().synchronize();
  return {lease, memory.get()};
}

int SymmetricWindows::open_window(Backend& host, std::size_t bytes) {
  std::shared_ptr<std::byte> memory;
  std::exception_ptr allocation_error;
  try {
    memory = allocate_on(group_.device(), bytes);
  } catch (const Error&) {
    allocation_error = std::current_exception();
  }
  Parts parts;
  try {
    parts = group_.map_peers(host, memory);
  } catch (const Error&) {
    if (allocation_error) std::rethrow_exception(allocation_error);  // has the reason
    throw;
  }
  own_memory_.push_back(memory);
  windows_.push_back(parts);
  publish_addresses(static_cast<int>(own_memory_.size()) - 1, parts);
  return registry_->add(memory.get(), bytes);
}

void SymmetricWindows::publish_addresses(int window, const Parts& parts) const {
  const peer::DeviceComm& comm = group_.device_comm();
  std::uint64_t addresses[peer::max_ranks] = {};
  for (std::size_t r = 0; r < parts.size(); ++r)
    addresses[r] = reinterpret_cast<std::uint64_t>(parts[r].get());
  memcpy_async(comm.arenas[comm.rank] + comm.layout.window(window), addresses, sizeof addresses,
               group_.control_stream());
  group_.control_stream().synchronize();
}

void SymmetricWindows::unmap_peers() noexcept { windows_.clear(); }

void SymmetricWindows::leak() noexcept {
  static_cast<void>(new std::vector<Parts>(windows_));
  static_cast<void>(new std::vector<std::shared_ptr<std::byte>>(own_memory_));
}

}  // namespace rz
