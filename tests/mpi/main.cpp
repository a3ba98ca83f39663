// Tests that every rank of an mpirun runs. This program owns MPI, as an embedding program does.
#include <gtest/gtest.h>
#include <mpi.h>

#include <chrono>
#include <cstdio>
#include <cstring>
#include <memory>

#include "comm/backends/mpi/mpi.h"
#include "comm/bootstrap.h"
#include "comm/core/error.h"

namespace {

/// A communicator with a call in flight that outlives MPI. Nothing of it may call MPI then, or MPI ends the
/// job.
class Survivor {
 public:
  Survivor() : comm_(rz::connect_mpi(MPI_COMM_WORLD)) {
    sum();
    comm_.recv({&x_, 1}, (comm_.rank() + 1) % comm_.size());  // never sent
  }
  /// Whether calls fail as they should.
  bool fails() {
    try {
      sum();
    } catch (const rz::Error& e) {
      return e.code() == rz::Errc::aborted;
    }
    return false;
  }

 private:
  void sum() {
    float one = 1;
    comm_.all_reduce({&one, 1}).wait();
  }
  float x_ = 0;
  rz::Communicator comm_;
};

/// A program that is linked with MPI initialises it by itself, once.
bool is_refused_before_init() {
  rz::LaunchInfo launch = rz::launch_info_from_environment();
  if (launch.size == 1) return true;
  launch.master = "mpi:";
  try {
    rz::store_for_launch(launch, std::chrono::seconds(30), "native");
  } catch (const rz::Error& e) {
    return e.code() == rz::Errc::config && std::strstr(e.what(), "has not called MPI_Init");
  }
  return false;
}

}  // namespace

int main(int argc, char** argv) {
  testing::InitGoogleTest(&argc, argv);
  const bool funneled = argc > 1 && std::strcmp(argv[1], "funneled") == 0;
  if (!is_refused_before_init()) {
    std::fprintf(stderr, "a rendezvous by MPI before MPI_Init was not refused\n");
    return 1;
  }
  int provided = 0;
  MPI_Init_thread(nullptr, nullptr, funneled ? MPI_THREAD_FUNNELED : MPI_THREAD_MULTIPLE, &provided);
  int status = RUN_ALL_TESTS(), ranks = 1;
  MPI_Barrier(MPI_COMM_WORLD);
  MPI_Comm_size(MPI_COMM_WORLD, &ranks);
  const bool last = argc > 2 && std::strcmp(argv[2], "outlived") == 0 && ranks > 1;
  const auto used = last ? std::make_unique<Survivor>() : nullptr,
             left = last ? std::make_unique<Survivor>() : nullptr;
  MPI_Finalize();
  if (used && !used->fails()) {
    std::fprintf(stderr, "a call after MPI_Finalize did not fail with Errc::aborted\n");
    status = 1;
  }
  return status;
}
