#pragma once
/// MPI in this process: initialised here if nobody else has, and then finalised at exit.

#include <mpi.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <mutex>
#include <string>

namespace rz::mpi {

/// Throws Errc::system with MPI's own words unless `result` is MPI_SUCCESS.
void check(int result, const char* call);

/// What a process has one of. Thread-safe.
class MpiRuntime {
 public:
  /// Initialises MPI with MPI_THREAD_MULTIPLE, unless it is. Errc::unsupported once MPI was finalised.
  static MpiRuntime& instance();

  /// Several threads may call MPI at once.
  bool thread_multiple() const { return thread_level_ == MPI_THREAD_MULTIPLE; }
  /// False from MPI_Finalize on.
  bool is_open() const { return is_open_.load(std::memory_order_acquire); }
  /// MPI says that it reads and writes memory of CUDA devices. In Open MPI that goes for messages and for
  /// collectives that block, never for those that do not.
  bool cuda_aware() const { return cuda_aware_; }
  /// "Open MPI v4.1.4".
  const std::string& library() const { return library_; }

  // A communicator lives, leaves, is gone. After a failure MPI is not finalised: it might wait for ever.
  void begin_departure();
  void end_departure();
  void mark_failed() { failed_.store(true); }

  /// Before MPI_Finalize, whoever calls it: waits for those that leave.
  void close();

 private:
  MpiRuntime();
  void finalise_at_exit() noexcept;

  int thread_level_ = 0;
  bool cuda_aware_ = false;
  std::string library_;
  std::atomic<bool> is_open_{true}, failed_{false};
  std::mutex mutex_;
  std::condition_variable departed_;
  int departing_ = 0;
};

}  // namespace rz::mpi
