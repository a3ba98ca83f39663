#include "comm/backends/mpi/session.h"

#if __has_include(<mpi-ext.h>)
#include <mpi-ext.h>
#endif

#include <algorithm>
#include <cstdlib>
#include <thread>

#include "comm/core/deadline.h"
#include "comm/core/environment.h"
#include "comm/core/error.h"

namespace rz::mpi {

namespace {

Deadline patience() {
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

bool knows_cuda() {
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

// MPI_Finalize would wait for a rank that is never coming; a barrier can be given up.
bool all_ranks_are_here() {
  MPI_Request barrier = MPI_REQUEST_NULL;
  if (MPI_Ibarrier(MPI_COMM_WORLD, &barrier) != MPI_SUCCESS) return false;
  int done = 0;
  for (const Deadline end = patience(); !done && !end.expired();) {
    if (MPI_Test(&barrier, &done, MPI_STATUS_IGNORE) != MPI_SUCCESS) return false;
    if (!done) std::this_thread::sleep_for(std::chrono::microseconds(200));
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

// Never destroyed: threads that leave may outlive every static.
Session& Session::start() {
  static Session& session = *new Session;
  require(session.open(), Errc::unsupported,
          "MPI was finalised; a communicator must be connected before that");
  return session;
}

Session::Session() {
  int initialised = 0, finalised = 0;
  check(MPI_Initialized(&initialised), "MPI_Initialized");
  check(MPI_Finalized(&finalised), "MPI_Finalized");
  require(!finalised, Errc::unsupported, "MPI was finalised; a communicator must be connected before that");
  if (!initialised) {
    check(MPI_Init_thread(nullptr, nullptr, MPI_THREAD_MULTIPLE, &level_), "MPI_Init_thread");
    check(MPI_Comm_set_errhandler(MPI_COMM_WORLD, MPI_ERRORS_RETURN), "MPI_Comm_set_errhandler");
    std::atexit([] { start().finalise_at_exit(); });
  } else {
    check(MPI_Query_thread(&level_), "MPI_Query_thread");
  }
  library_ = library_name();
  cuda_aware_ = knows_cuda();
  // MPI_Finalize begins with the attributes of MPI_COMM_SELF.
  int key = MPI_KEYVAL_INVALID;
  const auto closes = [](MPI_Comm, int, void* session, void*) {
    static_cast<Session*>(session)->close();
    return static_cast<int>(MPI_SUCCESS);
  };
  check(MPI_Comm_create_keyval(MPI_COMM_NULL_COPY_FN, closes, &key, nullptr), "MPI_Comm_create_keyval");
  check(MPI_Comm_set_attr(MPI_COMM_SELF, key, this), "MPI_Comm_set_attr");
}

void Session::begin_leaving() {
  const std::lock_guard lock(mutex_);
  ++leaving_;
}

void Session::end_leaving() {
  const std::lock_guard lock(mutex_);
  --leaving_;
  left_.notify_all();
}

void Session::close() {
  std::unique_lock lock(mutex_);
  left_.wait_for(lock, patience().remaining(), [&] { return leaving_ == 0; });
  open_.store(false, std::memory_order_release);
}

void Session::finalise_at_exit() noexcept {
  int finalised = 0;
  if (MPI_Finalized(&finalised) != MPI_SUCCESS || finalised) return;
  {
    std::unique_lock lock(mutex_);
    if (!left_.wait_for(lock, patience().remaining(), [&] { return leaving_ == 0; })) return;
  }
  if (!failed_.load() && all_ranks_are_here()) MPI_Finalize();
}

}  // namespace rz::mpi
