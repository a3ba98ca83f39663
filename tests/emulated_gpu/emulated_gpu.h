#pragma once
/// A device available on every machine, behind the table of comm/device/cuda_runtime.h: for tests that link
/// rz_emulated_gpu. Four devices, each with 1 GiB.

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <set>
#include <string>
#include <string_view>

#include "comm/device/cuda_runtime.h"

namespace rz::emulated {

inline constexpr int devices = 4;

/// When tasks run: at once, at random, or only during a wait.
enum class Pace { eager, any, lazy };

/// Begins a schedule: the same seed repeats the order of tasks, as far as one host thread decides it. Its end
/// checks, with a test failure, that all streams are empty and all memory is freed.
class Schedule {
 public:
  explicit Schedule(std::uint64_t seed = 1, Pace = Pace::any);
  ~Schedule();
  Schedule(const Schedule&) = delete;
  Schedule& operator=(const Schedule&) = delete;

 private:
  std::size_t bytes_before_;
};

/// The call of this name fails with `status`, once, after `after` further calls have succeeded. Names are
/// those of cuda::Runtime, e.g. "malloc".
void fail_call(const std::string& name, cuda::Status status, int after = 0);

/// The devices on which this process has a context. As in CUDA, a context is made on a device that becomes
/// current, and on the current one, at first 0, by the first call that is not about devices as such.
std::set<int> contexts();
/// Resets the state to that of a process without any call.
void reset_contexts();
/// How many streams there are on a device, its null stream included once it was used.
std::size_t streams(int device);
/// How many kernels this process has launched.
std::size_t launches();
/// How long the devices may make no progress during a wait, until that counts as a failure.
void set_patience(std::chrono::milliseconds);

/// Bytes now allocated on all devices.
std::size_t bytes_in_use();
/// How often these bytes occur in this process's own memory, on all its devices.
std::size_t places_of(std::string_view bytes);
/// Of each device, from now on.
void set_capacity(std::size_t bytes);

}  // namespace rz::emulated
