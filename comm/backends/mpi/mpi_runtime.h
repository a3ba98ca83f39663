#pragma once
/// MPI in this process. Initialised here unless the program has done so; then finalised at exit.

#include <mpi.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <functional>
#include <mutex>
#include <string>

namespace rz::mpi {

/// Throws Errc::system with MPI's error text unless `result` is MPI_SUCCESS.
void check(int result, const char* call);
/// "1.5 s".
std::string seconds(std::chrono::milliseconds);

/// Process-wide singleton. Thread-safe.
class MpiRuntime {
 public:
  /// Initialises MPI with MPI_THREAD_MULTIPLE unless it is initialised already. Errc::unsupported once MPI
  /// was finalised.
  static MpiRuntime& instance();
  /// instance(), from a thread that is abandoned if MPI_Init does not return within `limit`: it waits for all
  /// ranks. Errc::timeout then.
  static MpiRuntime& started(int rank, std::chrono::milliseconds limit);

  /// True if several threads may call MPI concurrently.
  bool thread_multiple() const { return thread_level_ == MPI_THREAD_MULTIPLE; }
  /// False once MPI_Finalize has begun.
  bool is_open() const { return is_open_.load(std::memory_order_acquire); }
  /// True if MPI reports that it accepts CUDA device memory. In Open MPI this holds for point-to-point
  /// messages and blocking collectives, never for non-blocking collectives.
  bool cuda_aware() const { return cuda_aware_; }
  /// Name and version, e.g. "Open MPI v4.1.4".
  const std::string& library() const { return library_; }

  /// Scope of calls of MPI on a thread. MPI_Finalize waits for its end. Once MPI_Finalize has begun it is
  /// empty, and nothing of MPI may be called.
  class Use {
   public:
    explicit Use(MpiRuntime& runtime) : runtime_(runtime) {
      runtime_.uses_.fetch_add(1);
      open_ = runtime_.is_open_.load();
    }
    ~Use() { runtime_.uses_.fetch_sub(1); }
    Use(const Use&) = delete;
    Use& operator=(const Use&) = delete;
    explicit operator bool() const { return open_; }

   private:
    MpiRuntime& runtime_;
    bool open_ = false;
  };

  // Departures in progress. After mark_failed() MPI is not finalised at exit, because that might block
  // forever.
  void begin_departure();
  void end_departure();
  void mark_failed() { failed_.store(true); }

  /// Runs `f`, which calls a function of MPI that cannot be polled: `call`, for the error. `f` owns all that
  /// it accesses. With MPI_THREAD_MULTIPLE it runs in another thread, which is abandoned after `limit`:
  /// Errc::timeout. With a lower level it runs here, and the process ends after `limit`, with status 1 and a
  /// line on stderr.
  void call_within(std::chrono::milliseconds limit, const std::string& call, std::function<void()> f);

  /// Finalises MPI if it was initialised here. Collective over MPI_COMM_WORLD. Errc::timeout.
  void finalise_if_own(std::chrono::milliseconds limit);

  /// Called within MPI_Finalize: waits for departing communicators and for threads that call MPI.
  void close();

 private:
  MpiRuntime();
  void finalise_at_exit() noexcept;

  bool is_own_ = false;  // initialised here
  int thread_level_ = 0;
  bool cuda_aware_ = false;
  std::string library_;
  std::atomic<bool> is_open_{true}, failed_{false};
  std::atomic<int> uses_{0};
  std::mutex mutex_;
  std::condition_variable departed_;
  int departing_ = 0;
};

}  // namespace rz::mpi
