#pragma once
/// One communicator of NCCL and its life: made without blocking, called by one thread at a time, ended in
/// bounded time whatever NCCL does.

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

/// A call of NCCL that failed: its name, code, and NCCL's own words.
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

  /// Begins ncclCommInitRankConfig; state() says when it is over.
  void init(int rank, int size, const UniqueId&);

  /// f(comm) with the device current and no other call in between; throws NcclError unless its result is
  /// success or in_progress.
  template <class F>
  void call(const char* name, const F& f) {
    const std::lock_guard lock(call_mutex_);
    const cuda::DeviceGuard guard(device_);
    const Comm comm = comm_;
    const Result result = comm ? f(comm) : in_progress;
    if (!comm || (result != success && result != in_progress))
      throw NcclError{name, result, error_text(result)};
  }
  /// What ncclCommGetAsyncError says: success, in_progress (also while another call runs), or what failed.
  /// Never blocks.
  Result async_state(std::string* words = nullptr) noexcept;

  /// Ends everything in flight. `keep` lives until NCCL lets go. False: ncclCommAbort had not returned by the
  /// limit, and was left behind.
  bool abort(std::chrono::milliseconds limit, std::shared_ptr<void> keep) noexcept;
  /// Ends the communicator when nothing is in flight; false, and nothing done that could not be followed by
  /// abort(), if that takes longer than the limit or fails.
  bool finalize(std::chrono::milliseconds limit) noexcept;

  /// Lets NCCL read and write this memory in place, where the version can. Null: it cannot.
  void* register_memory(void* memory, std::size_t bytes);
  void deregister_memory(void* handle) noexcept;
  /// Lets all ranks reach this memory at the same place of a window, where the version can; every rank calls
  /// it, with as many bytes. Deregistering is every rank's too: it is kept until the communicator ends.
  /// False: it cannot.
  bool register_window(std::shared_ptr<std::byte> memory, std::size_t bytes);

 private:
  std::string error_text(Result) const;
  void abort_now() noexcept;
  bool finalize_now(std::chrono::milliseconds limit) noexcept;
  bool try_lock_for(std::chrono::milliseconds limit) noexcept;

  const NcclApi& api_;
  const Device device_;
  std::mutex call_mutex_;
  std::atomic<Comm> comm_{nullptr};  // abort() takes it even from a call that hangs
  std::set<void*> registered_;       // handles that it holds
  struct Window {
    std::shared_ptr<std::byte> memory;
    void* handle = nullptr;  // written when the call is over, perhaps later
  };
  std::list<Window> windows_;
};

}  // namespace rz::nccl
