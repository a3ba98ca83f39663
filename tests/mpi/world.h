#pragma once
/// Helpers shared by the tests under mpirun.

#include <gtest/gtest.h>
#include <mpi.h>

#include <chrono>
#include <string>

#include "comm/backends/mpi/mpi.h"
#include "comm/bootstrap.h"
#include "comm/core/error.h"
#include "tests/support/error_of.h"

namespace rz::test {

inline const LaunchInfo& place() {
  static const LaunchInfo here = launch_info_from_environment();
  return here;
}
inline int world_rank() { return place().rank; }
inline int world_size() { return place().size; }
inline bool threaded() {
  int level = 0;
  MPI_Query_thread(&level);
  return level == MPI_THREAD_MULTIPLE;
}

inline CommOptions quick(const std::string& backend,
                         std::chrono::milliseconds timeout = std::chrono::seconds(30)) {
  CommOptions options;
  options.timeout = timeout;
  options.backend = backend;
  return options;
}

/// One store for all tests; each call of connect() uses keys of its own.
inline std::shared_ptr<Store> world_store() {
  static const std::shared_ptr<Store> store = store_for_launch(place());
  return store;
}
inline Communicator connect(const CommOptions& options) {
  static int number = 0;
  return Communicator::connect(world_rank(), world_size(),
                               prefix_store(world_store(), concat("comm", number++, "/")), options);
}

}  // namespace rz::test
