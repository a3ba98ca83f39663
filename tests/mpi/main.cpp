// Tests that every rank of an mpirun runs. This program owns MPI, as an embedding program does.
#include <gtest/gtest.h>
#include <mpi.h>

#include <chrono>
#include <cstdio>
#include <cstring>
#include <memory>
#include <thread>

#include "comm/backends/mpi/mpi.h"
#include "comm/backends/mpi/mpi_runtime.h"
#include "comm/bootstrap.h"
#include "comm/core/error.h"

namespace {

/// A communicator with a call in flight that outlives MPI. Nothing of it may call MPI then, or MPI ends the
/// job.
class Survivor {
 public:
  Survivor() : comm_(rz::connect_mpi(MPI_COMM_WORLD)) {
    sum();
    static_cast<void>(comm_.recv({&x_, 1}, (comm_.rank() + 1) % comm_.size()));  // never sent
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

/// MPI is initialised by the communicator. Rank 1 does not come to MPI_Init.
int starts() {
  if (rz::launch_info_from_environment().rank == 1)
    return std::this_thread::sleep_for(std::chrono::seconds(4)), 0;
  rz::CommOptions options;
  options.backend = "mpi";
  options.rendezvous_timeout = std::chrono::seconds(1);
  for (int times = 0; times < 2; ++times) try {
      rz::Communicator::connect(0, 1, rz::memory_store(), options);
    } catch (const rz::Error& e) {
      std::printf("%s\n", e.what()), std::fflush(stdout);
    }
  return 0;
}

/// MPI is finalised at exit, to which rank 1 comes late.
int exits() {
  const rz::LaunchInfo launch = rz::launch_info_from_environment();
  rz::CommOptions options;
  options.backend = "mpi";
  rz::Communicator::connect(launch.rank, launch.size, rz::store_for_launch(launch), options).barrier().wait();
  if (launch.rank == 1) std::this_thread::sleep_for(std::chrono::seconds(8));
  return 0;
}

/// Without MPI_THREAD_MULTIPLE no other thread could call MPI_Recv.
void stuck() {
  rz::mpi::MpiRuntime::instance().call_within(std::chrono::seconds(1), "MPI_Recv", [] {
    int x = 0;
    MPI_Recv(&x, 1, MPI_INT, 0, 77, MPI_COMM_WORLD, MPI_STATUS_IGNORE);
  });
}

}  // namespace

int main(int argc, char** argv) {
  testing::InitGoogleTest(&argc, argv);
  if (argc > 1 && std::strcmp(argv[1], "starts") == 0) return starts();
  if (argc > 1 && std::strcmp(argv[1], "exits") == 0) return exits();
  const bool funneled = argc > 1 && std::strcmp(argv[1], "funneled") == 0;
  if (!is_refused_before_init()) {
    std::fprintf(stderr, "a rendezvous by MPI before MPI_Init was not refused\n");
    return 1;
  }
  int provided = 0;
  MPI_Init_thread(nullptr, nullptr, funneled ? MPI_THREAD_FUNNELED : MPI_THREAD_MULTIPLE, &provided);
  if (argc > 2 && std::strcmp(argv[2], "stuck") == 0) stuck();
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
