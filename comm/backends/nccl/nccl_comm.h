#pragma once
/// One ncclComm_t: created without blocking, called by one thread at a time, ended in bounded time whatever
/// NCCL does.

#include <atomic>
#include <chrono>
#include <list>
#include <memory>
#include <mutex>
#include <set>
#include <string>

#include "comm/backends/nccl/api/api.h"
#include "comm/device/cuda_runtime.h"

namespace rz::nccl {

/// A failed NCCL call: its name, result code and NCCL's message.
struct NcclError {
  const char* call;
  Result result;
  std::string message;
  std::string text() const;  ///< "ncclGroupEnd: unhandled cuda error (code 1): …"
};

/// Thread-safe. Calls after abort() throw NcclError with in_progress.
class NcclComm : public std::enable_shared_from_this<NcclComm> {
 public:
  NcclComm(const NcclApi& api, Device device) : api_(api), device_(device) {}

  const NcclApi& api() const { return api_; }
  Device device() const { return device_; }

  /// Starts ncclCommInitRankConfig; async_state() reports its completion.
  void init(int rank, int size, const UniqueId&);

  /// Calls f(comm) with the device current, serialized with other calls. Throws NcclError unless the result
  /// is success or in_progress.
  template <class F>
  void call(const char* name, const F& f) {
    const std::lock_guard lock(call_mutex_);
    const cuda::DeviceGuard guard(device_);
    const Comm comm = comm_;
    const Result result = comm ? f(comm) : in_progress;
    if (!comm || (result != success && result != in_progress))
      throw NcclError{name, result, error_text(result)};
  }
  /// Result of ncclCommGetAsyncError: success, in_progress (also while another call runs), or the error, with
  /// its text in `message`. Never blocks.
  Result async_state(std::string* message = nullptr) noexcept;

  /// Aborts everything in flight. `keep` is released once ncclCommAbort has returned. False: it had not
  /// returned within `limit` (plus 300 ms for a concurrent call) and continues in the background.
  bool abort(std::chrono::milliseconds limit, std::shared_ptr<void> keep) noexcept;
  /// Finalizes and destroys the communicator; requires that nothing is in flight. False if this fails or
  /// exceeds `limit`; abort() is still possible then.
  bool finalize(std::chrono::milliseconds limit) noexcept;

  /// Registers memory for zero-copy access by NCCL (2.19). Null if the version does not support it.
  void* register_memory(void* memory, std::size_t bytes);
  void deregister_memory(void* handle) noexcept;
  /// Registers a symmetric window (NCCL 2.27). Collective; every rank passes the same size. Deregistration is
  /// collective, too, so the memory is kept until the communicator ends. False if the version does not
  /// support it.
  bool register_window(std::shared_ptr<std::byte> memory, std::size_t bytes);

 private:
  std::string error_text(Result) const;
  void abort_now() noexcept;
  bool finalize_now(std::chrono::milliseconds limit) noexcept;
  bool try_lock_for(std::chrono::milliseconds limit) noexcept;

  const NcclApi& api_;
  const Device device_;
  std::mutex call_mutex_;
  std::atomic<Comm> comm_{nullptr};  // atomic: abort() uses it even while another thread's call hangs
  std::set<void*> registered_;       // handles of register_memory()
  struct Window {
    std::shared_ptr<std::byte> memory;
    void* handle = nullptr;  // written when the call completes, possibly later
  };
  std::list<Window> windows_;
};

}  // namespace rz::nccl
