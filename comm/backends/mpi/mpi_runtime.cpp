#include "comm/backends/mpi/mpi_runtime.h"

#if __has_include(<mpi-ext.h>)
#include <mpi-ext.h>
#endif

#include <algorithm>
#include <cstdlib>
#include <thread>

#include "comm/core/deadline.h"
#include "comm/core/environment.h"
#include "comm/core/error.h"
#include "comm/os/wait_policy.h"

namespace rz::mpi {

namespace {

Deadline default_deadline() {
  return Deadline::after(std::chrono::milliseconds(static_cast<long>(environment().timeout_s * 1e3)));
}

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

// Never destroyed: departing threads may outlive all static objects.
MpiRuntime& MpiRuntime::instance() {
  static MpiRuntime& runtime = *new MpiRuntime;
  require(runtime.is_open(), Errc::unsupported,
          "MPI was finalised; a communicator must be connected before that");
  return runtime;
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

void MpiRuntime::finalise_if_own() {
  if (is_own_) check(MPI_Finalize(), "MPI_Finalize");
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
  if (!failed_.load() && all_ranks_arrived()) MPI_Finalize();
}

}  // namespace rz::mpi
