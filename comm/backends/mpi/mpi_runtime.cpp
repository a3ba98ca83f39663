#include "comm/backends/mpi/mpi_runtime.h"

#if __has_include(<mpi-ext.h>)
#include <mpi-ext.h>
#endif

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <memory>
#include <thread>

#include "comm/core/deadline.h"
#include "comm/core/environment.h"
#include "comm/core/error.h"
#include "comm/os/helper_thread.h"
#include "comm/os/wait_policy.h"

namespace rz::mpi {

namespace {

using std::chrono::milliseconds;

constexpr std::chrono::seconds finalise_limit(30);  // all ranks have come

milliseconds default_timeout() { return milliseconds(static_cast<long>(environment().timeout_s * 1e3)); }
Deadline default_deadline() { return Deadline::after(default_timeout()); }

/// "rank 1 of MPI_COMM_WORLD".
std::string own_rank() {
  int rank = -1;
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  return concat("rank ", rank, " of MPI_COMM_WORLD");
}

/// Runs `f` in a thread that is abandoned after `limit`. Whether it has ended; throws what `f` has thrown.
bool ends_within(milliseconds limit, std::function<void()> f) {
  const auto error = std::make_shared<std::exception_ptr>();
  const bool ended = run_with_timeout(limit, [error, f = std::move(f)] {
    try {
      f();
    } catch (...) {
      *error = std::current_exception();
    }
  });
  if (ended && *error) std::rethrow_exception(*error);
  return ended;
}

/// Ends the process after `limit`, with a line, unless it is destroyed before.
class Watchdog {
 public:
  Watchdog(milliseconds limit, std::string line)
      : thread_(helper_thread([this, end = Deadline::after(limit), line = std::move(line)] {
          std::unique_lock lock(mutex_);
          if (changed_.wait_until(lock, end.at(), [this] { return ended_; })) return;
          std::fputs(line.c_str(), stderr);
          std::fflush(stderr);
          std::_Exit(1);
        })) {}
  ~Watchdog() {
    {
      const std::lock_guard lock(mutex_);
      ended_ = true;
    }
    changed_.notify_all();
    thread_.join();
  }
  Watchdog(const Watchdog&) = delete;

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  bool ended_ = false;
  std::thread thread_;
};

std::string library_name() {
  char text[MPI_MAX_LIBRARY_VERSION_STRING] = "";
  int length = 0;
  check(MPI_Get_library_version(text, &length), "MPI_Get_library_version");
  std::string line(text, static_cast<std::size_t>(length));
  line = line.substr(0, line.find_first_of(",\n"));
  const auto both_space = [](char a, char b) { return (a == ' ' || a == '\t') && (b == ' ' || b == '\t'); };
  line.erase(std::unique(line.begin(), line.end(), both_space), line.end());
  std::replace(line.begin(), line.end(), '\t', ' ');
  return line;
}

bool query_cuda_support() {
#if defined(OMPI_HAVE_MPI_EXT_CUDA)
  return MPIX_Query_cuda_support() != 0;
#elif defined(MPIX_GPU_SUPPORT_CUDA)  // MPICH
  int yes = 0;
  check(MPIX_GPU_query_support(MPIX_GPU_SUPPORT_CUDA, &yes), "MPIX_GPU_query_support");
  return yes != 0;
#else
  return false;
#endif
}

// MPI_Finalize would block for a rank that never arrives; a non-blocking barrier can be abandoned.
bool all_ranks_arrived() {
  MPI_Request barrier = MPI_REQUEST_NULL;
  if (MPI_Ibarrier(MPI_COMM_WORLD, &barrier) != MPI_SUCCESS) return false;
  int done = 0;
  for (const Deadline end = default_deadline(); !done && !end.expired();) {
    if (MPI_Test(&barrier, &done, MPI_STATUS_IGNORE) != MPI_SUCCESS) return false;
    if (!done) std::this_thread::sleep_for(poll_period::mpi_finalize);
  }
  return done != 0;
}

}  // namespace

void check(int result, const char* call) {
  if (result == MPI_SUCCESS) return;
  char text[MPI_MAX_ERROR_STRING] = "unknown error";
  int length = 0;
  MPI_Error_string(result, text, &length);
  std::string line = text;
  std::replace(line.begin(), line.end(), '\n', ' ');
  fail(Errc::system, call, ": ", line);
}

std::string seconds(milliseconds time) { return concat(std::chrono::duration<double>(time).count(), " s"); }

// Never destroyed: departing threads may outlive all static objects.
MpiRuntime& MpiRuntime::instance() {
  static MpiRuntime& runtime = *new MpiRuntime;
  require(runtime.is_open(), Errc::unsupported,
          "MPI was finalised; a communicator must be connected before that");
  return runtime;
}

MpiRuntime& MpiRuntime::started(int rank, milliseconds limit) {
  int initialised = 0;
  check(MPI_Initialized(&initialised), "MPI_Initialized");
  if (!initialised)
    require(ends_within(limit, [] { instance(); }), Errc::timeout, "rank ", rank,
            ": MPI_Init did not return within ", seconds(limit),
            "; another process of this launch has not called it, or has "
            "ended; RZ_RENDEZVOUS_TIMEOUT_S gives it more time");
  return instance();
}

MpiRuntime::MpiRuntime() {
  int initialised = 0, finalised = 0;
  check(MPI_Initialized(&initialised), "MPI_Initialized");
  check(MPI_Finalized(&finalised), "MPI_Finalized");
  require(!finalised, Errc::unsupported, "MPI was finalised; a communicator must be connected before that");
  if (!initialised) {
    check(MPI_Init_thread(nullptr, nullptr, MPI_THREAD_MULTIPLE, &thread_level_), "MPI_Init_thread");
    check(MPI_Comm_set_errhandler(MPI_COMM_WORLD, MPI_ERRORS_RETURN), "MPI_Comm_set_errhandler");
    is_own_ = true;
    std::atexit([] {
      int has_ended = 0;
      if (MPI_Finalized(&has_ended) == MPI_SUCCESS && !has_ended) instance().finalise_at_exit();
    });
  } else {
    check(MPI_Query_thread(&thread_level_), "MPI_Query_thread");
  }
  library_ = library_name();
  cuda_aware_ = query_cuda_support();
  // MPI_Finalize first deletes the attributes of MPI_COMM_SELF, which calls close().
  int key = MPI_KEYVAL_INVALID;
  const auto on_finalize = [](MPI_Comm, int, void* runtime, void*) {
    static_cast<MpiRuntime*>(runtime)->close();
    return static_cast<int>(MPI_SUCCESS);
  };
  check(MPI_Comm_create_keyval(MPI_COMM_NULL_COPY_FN, on_finalize, &key, nullptr), "MPI_Comm_create_keyval");
  check(MPI_Comm_set_attr(MPI_COMM_SELF, key, this), "MPI_Comm_set_attr");
}

void MpiRuntime::call_within(milliseconds limit, const std::string& call, std::function<void()> f) {
  const std::string line = concat(own_rank(), ": ", call, " did not return within ", seconds(limit),
                                  "; a rank that takes part may be stuck or have ended");
  if (!thread_multiple()) {
    const Watchdog watchdog(limit, concat(line,
                                          "; this process ends, since only MPI_THREAD_MULTIPLE lets a "
                                          "thread leave the call\n"));
    return f();
  }
  if (ends_within(limit, std::move(f))) return;
  mark_failed();
  fail(Errc::timeout, line);
}

void MpiRuntime::finalise_if_own(milliseconds limit) {
  if (is_own_) call_within(limit, "MPI_Finalize", [] { check(MPI_Finalize(), "MPI_Finalize"); });
}

void MpiRuntime::begin_departure() {
  const std::lock_guard lock(mutex_);
  ++departing_;
}

void MpiRuntime::end_departure() {
  const std::lock_guard lock(mutex_);
  --departing_;
  departed_.notify_all();
}

void MpiRuntime::close() {
  std::unique_lock lock(mutex_);
  departed_.wait_for(lock, default_deadline().remaining(), [&] { return departing_ == 0; });
  is_open_.store(false);
  for (const Deadline end = default_deadline(); uses_.load() > 0 && !end.expired();)
    std::this_thread::sleep_for(poll_period::mpi_finalize);
}

void MpiRuntime::finalise_at_exit() noexcept {
  {
    std::unique_lock lock(mutex_);
    if (!departed_.wait_for(lock, default_deadline().remaining(), [&] { return departing_ == 0; })) return;
  }
  if (failed_.load()) return;
  try {
    const std::string rank = own_rank();
    if (all_ranks_arrived())
      finalise_if_own(std::min<milliseconds>(finalise_limit, default_timeout()));
    else
      std::fputs(concat(rank, ": other ranks did not come to MPI_Finalize within ",
                        seconds(default_timeout()), "; this process ends without it\n")
                     .c_str(),
                 stderr);
  } catch (const std::exception& e) {
    std::fputs(concat(e.what(), "; this process ends without it\n").c_str(), stderr);
  }
}

}  // namespace rz::mpi
