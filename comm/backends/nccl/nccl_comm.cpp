#include "comm/backends/nccl/nccl_comm.h"

#include <thread>
#include <utility>

#include "comm/core/deadline.h"
#include "comm/os/helper_thread.h"
#include "comm/os/wait_policy.h"

namespace rz::nccl {

namespace {

using namespace std::chrono_literals;

/// How long an abort waits for another thread's call. Such calls return at once, unless they hang.
constexpr auto max_call_wait = 300ms;

void set_device(Device device) noexcept { cuda::runtime().set_device(device.index); }

}  // namespace

std::string NcclError::text() const {
  return concat(call, ": ",
                message.empty() ? concat("code ", result) : concat(message, " (code ", result, ")"));
}

std::string NcclComm::error_text(Result result) const {
  const char* last = api_.get_last_error ? api_.get_last_error(comm_) : nullptr;
  std::string text = api_.get_error_string(result);
  if (last && *last) text += concat("; ", last);
  while (text.ends_with('\n')) text.pop_back();
  return text;
}

void NcclComm::init(int rank, int size, const UniqueId& id) {
  Config config;
  config.blocking = 0;
  const std::lock_guard lock(call_mutex_);
  const cuda::DeviceGuard guard(device_);
  Comm comm = nullptr;
  const Result result = api_.comm_init_rank_config(&comm, size, id, rank, &config);
  comm_ = comm;
  if (result == success || result == in_progress) return;
  throw NcclError{"ncclCommInitRankConfig", result, error_text(result)};
}

Result NcclComm::async_state(std::string* message) noexcept {
  const std::unique_lock lock(call_mutex_, std::try_to_lock);
  if (!lock || !comm_) return in_progress;
  Result state = success;
  const Result result = api_.comm_get_async_error(comm_, &state);
  const Result worst = result == success ? state : result;
  if (message && worst != success && worst != in_progress) *message = this->error_text(worst);
  return worst;
}

bool NcclComm::try_lock_for(std::chrono::milliseconds limit) noexcept {
  for (const Deadline end = Deadline::after(limit); !call_mutex_.try_lock();
       std::this_thread::sleep_for(poll_period::nccl_lock))
    if (end.expired()) return false;
  return true;
}

bool NcclComm::abort(std::chrono::milliseconds limit, std::shared_ptr<void> keep) noexcept {
  return run_with_timeout(limit + max_call_wait,
                          [self = shared_from_this(), keep = std::move(keep)] { self->abort_now(); });
}

/// A hanging call of another thread must not block the abort: then comm_abort runs concurrently with it.
void NcclComm::abort_now() noexcept {
  set_device(device_);
  const bool locked = try_lock_for(max_call_wait);
  const Comm comm = comm_.exchange(nullptr);
  std::list<Window> windows;  // destroyed after comm_abort returns
  if (locked) registered_.clear(), windows.swap(windows_);
  if (locked) call_mutex_.unlock();
  if (comm) api_.comm_abort(comm);
}

bool NcclComm::finalize(std::chrono::milliseconds limit) noexcept {
  const auto ok = std::make_shared<bool>(false);
  return run_with_timeout(limit + 100ms,
                          [self = shared_from_this(), limit, ok] { *ok = self->finalize_now(limit); }) &&
         *ok;
}

bool NcclComm::finalize_now(std::chrono::milliseconds limit) noexcept {
  set_device(device_);
  const Deadline end = Deadline::after(limit);
  const auto completes = [&](Result result) {
    for (; result == success || result == in_progress;
         std::this_thread::sleep_for(poll_period::group_teardown)) {
      if (api_.comm_get_async_error(comm_, &result) != success || end.expired()) return false;
      if (result == success) return true;
    }
    return false;
  };
  if (!try_lock_for(limit)) return false;
  const std::lock_guard lock(call_mutex_, std::adopt_lock);
  if (!comm_) return true;
  for (void* handle : std::exchange(registered_, {}))
    if (!completes(api_.comm_deregister(comm_, handle))) return false;
  for (; !windows_.empty(); windows_.pop_front())
    if (void* const handle = windows_.front().handle;
        handle && !completes(api_.comm_window_deregister(comm_, handle)))
      return false;
  if (!completes(api_.comm_finalize(comm_))) return false;
  return api_.comm_destroy(comm_.exchange(nullptr)) == success;
}

void* NcclComm::register_memory(void* memory, std::size_t bytes) {
  if (!api_.comm_register || !api_.comm_deregister) return nullptr;
  void* handle = nullptr;
  call("ncclCommRegister", [&](Comm comm) {
    const Result result = api_.comm_register(comm, memory, bytes, &handle);
    if (handle) registered_.insert(handle);
    return result;
  });
  return handle;
}

bool NcclComm::register_window(std::shared_ptr<std::byte> memory, std::size_t bytes) {
  if (!api_.comm_window_register || !api_.comm_window_deregister) return false;
  call("ncclCommWindowRegister", [&](Comm comm) {
    Window& window = windows_.emplace_back(Window{std::move(memory)});
    return api_.comm_window_register(comm, window.memory.get(), bytes, &window.handle, window_is_symmetric);
  });
  return true;
}

void NcclComm::deregister_memory(void* handle) noexcept {
  const Deadline end = Deadline::after(2s);
  if (!handle || !try_lock_for(2s)) return;
  const std::lock_guard lock(call_mutex_, std::adopt_lock);
  if (!comm_ || registered_.erase(handle) == 0) return;
  // NCCL rejects calls while another is in progress.
  for (Result state = in_progress; state == in_progress && !end.expired();
       std::this_thread::sleep_for(poll_period::device_drain))
    if (api_.comm_get_async_error(comm_, &state) != success || !comm_) return;
  const cuda::DeviceGuard guard(device_, std::nothrow);
  api_.comm_deregister(comm_, handle);
}

}  // namespace rz::nccl
