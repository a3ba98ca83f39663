#include "comm/backends/mpi/comm_pair.h"

#include <memory>
#include <thread>

#include "comm/core/deadline.h"
#include "comm/core/error.h"
#include "comm/os/wait_policy.h"

namespace rz::mpi {

namespace {

MPI_Comm idup(MPI_Comm comm, std::chrono::milliseconds timeout) {
  MPI_Comm copy = MPI_COMM_NULL;
  MPI_Request request = MPI_REQUEST_NULL;
  check(MPI_Comm_idup(comm, &copy, &request), "MPI_Comm_idup");
  int done = 0;
  for (const Deadline end = Deadline::after(timeout);;) {
    check(MPI_Test(&request, &done, MPI_STATUS_IGNORE), "MPI_Test");
    if (done) break;
    require(!end.expired(), Errc::timeout, "the MPI communicator could not be duplicated within ",
            seconds(timeout), "; does every rank of it connect?");
    std::this_thread::sleep_for(poll_period::mpi_comm_dup);
  }
  check(MPI_Comm_set_errhandler(copy, MPI_ERRORS_RETURN), "MPI_Comm_set_errhandler");
  return copy;
}

}  // namespace

CommPair duplicate(MPI_Comm comm, std::chrono::milliseconds timeout) {
  return adopt(idup(comm, timeout), timeout);
}

CommPair adopt(MPI_Comm comm, std::chrono::milliseconds timeout) {
  check(MPI_Comm_set_errhandler(comm, MPI_ERRORS_RETURN), "MPI_Comm_set_errhandler");
  return {comm, idup(comm, timeout)};
}

CommPair split(MpiRuntime& runtime, MPI_Comm comm, std::span<const int> members, int tag,
               std::chrono::milliseconds timeout) {
  MPI_Group all, subset;
  check(MPI_Comm_group(comm, &all), "MPI_Comm_group");
  const int chosen = MPI_Group_incl(all, static_cast<int>(members.size()), members.data(), &subset);
  MPI_Group_free(&all);
  check(chosen, "MPI_Group_incl");
  const auto part = std::make_shared<MPI_Comm>(MPI_COMM_NULL);
  runtime.call_within(timeout, "MPI_Comm_create_group", [comm, subset, tag, part]() mutable {
    const int made = MPI_Comm_create_group(comm, subset, tag, part.get());
    MPI_Group_free(&subset);
    check(made, "MPI_Comm_create_group");
  });
  return adopt(*part, timeout);
}

void free(CommPair comms) {
  check(MPI_Comm_free(&comms.data), "MPI_Comm_free");
  check(MPI_Comm_free(&comms.control), "MPI_Comm_free");
}

}  // namespace rz::mpi
