#include "comm/backends/nccl/run_with_timeout.h"

#include <condition_variable>
#include <memory>
#include <mutex>
#include <thread>

#include "comm/core/deadline.h"
#include "comm/os/helper_thread.h"

namespace rz::nccl {

bool run_with_timeout(std::chrono::milliseconds limit, std::function<void()> f) {
  struct Ending {
    std::mutex mutex;
    std::condition_variable changed;
    bool reached = false;
  };
  const auto ending = std::make_shared<Ending>();
  std::thread thread = helper_thread([ending, f = std::move(f)]() mutable {
    f();
    f = nullptr;  // releases its captures before completion is signalled
    {
      const std::lock_guard lock(ending->mutex);
      ending->reached = true;
    }
    ending->changed.notify_all();
  });
  bool reached = false;
  {
    std::unique_lock lock(ending->mutex);
    reached = ending->changed.wait_until(lock, Deadline::after(limit).at(), [&] { return ending->reached; });
  }
  if (reached)
    thread.join();
  else
    thread.detach();
  return reached;
}

}  // namespace rz::nccl
