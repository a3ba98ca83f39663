#pragma once
/// Failure state of a group of devices, and the thread that detects failures: it reads what the kernels write
/// to pinned memory.

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <exception>
#include <memory>
#include <mutex>
#include <string>
#include <thread>

#include "comm/backend.h"
#include "comm/backends/peer_cuda/kernels/kernel_args.h"
#include "comm/backends/peer_cuda/peer_cuda_options.h"
#include "comm/core/error.h"
#include "comm/core/long_wait.h"

namespace rz {

/// Accesses to pinned memory that kernels read and write.
template <class T>
T load_acquire(const T& word) {
  return __atomic_load_n(&word, __ATOMIC_ACQUIRE);
}
template <class T>
void store_release(T& word, T value) {
  __atomic_store_n(&word, value, __ATOMIC_RELEASE);
}

/// The first failure wins; from then on no kernel of this rank waits for a peer. Thread-safe.
class DeviceWatchdog {
 public:
  /// `status` outlives the watchdog. Once `host` has failed, so has the group.
  DeviceWatchdog(const std::shared_ptr<Backend>& host, peer::DeviceStatus& status, const PeerCudaOptions&);
  ~DeviceWatchdog();

  /// Throws the group's failure.
  void check();
  bool failed() noexcept;
  /// A collective's kernel was launched, or captured: then the numbers of later ones are not known.
  void launched(std::uint64_t signature, std::uint64_t count, bool captured);
  void fail_with(const Error&) noexcept;
  /// Stops the kernels of `channel`, which then mark the ranks they wait for; fails with such a rank as
  /// culprit.
  void fail_timeout(int channel) noexcept;

 private:
  using Clock = std::chrono::steady_clock;
  struct ChannelProgress {
    std::uint64_t call = 0;
    Clock::time_point since;
  };
  struct Launched {
    std::uint64_t number = 0, signature = 0, count = 0;
  };

  void run();
  void check_progress(int channel, ChannelProgress&);
  void report_long_wait(int channel, std::uint64_t call);
  std::string text_of(int channel, std::uint64_t call);
  Error timeout_error(int channel) const;
  void check_host(Clock::duration waited) noexcept;
  void check_device_error();

  const PeerCudaOptions options_;
  const std::weak_ptr<Backend> host_;  // weak: Works keep the watchdog alive, but not the host backend
  peer::DeviceStatus& status_;
  LongWait long_waits_[peer::channel_count];  // of the thread
  std::mutex mutex_;
  Launched launched_[64];  // the last collectives, by number
  std::uint64_t launches_ = 0;
  bool is_numbered_ = true;  // launches_ is the number of the device: no graph was captured
  std::condition_variable changed_, decided_;
  bool stopping_ = false, deciding_ = false;
  std::exception_ptr failure_;
  std::thread thread_;
};

}  // namespace rz
