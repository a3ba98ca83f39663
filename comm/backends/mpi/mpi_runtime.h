#pragma once
/// MPI in this process. Initialised here unless the program has done so; then finalised at exit.

#include <mpi.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <mutex>
#include <string>

namespace rz::mpi {

/// Throws Errc::system with MPI's error text unless `result` is MPI_SUCCESS.
void check(int result, const char* call);

/// Process-wide singleton. Thread-safe.
class MpiRuntime {
 public:
  /// Initialises MPI with MPI_THREAD_MULTIPLE unless it is initialised already. Errc::unsupported once MPI
  /// was finalised.
  static MpiRuntime& instance();

  /// True if several threads may call MPI concurrently.
  bool thread_multiple() const { return thread_level_ == MPI_THREAD_MULTIPLE; }
  /// False once MPI_Finalize has begun.
  bool is_open() const { return is_open_.load(std::memory_order_acquire); }
  /// True if MPI reports that it accepts CUDA device memory. In Open MPI this holds for point-to-point
  /// messages and blocking collectives, never for non-blocking collectives.
  bool cuda_aware() const { return cuda_aware_; }
  /// Name and version, e.g. "Open MPI v4.1.4".
  const std::string& library() const { return library_; }

  // Departures in progress. After mark_failed() MPI is not finalised at exit, because that might block
  // forever.
  void begin_departure();
  void end_departure();
  void mark_failed() { failed_.store(true); }

  /// Called within MPI_Finalize: waits for departing communicators.
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
