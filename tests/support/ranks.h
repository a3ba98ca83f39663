#pragma once
/// Runs a group in one test: ranks as threads, or, where they must be killed, as processes.

#include <chrono>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "comm/store.h"

namespace rz::test {

using RankFunction = std::function<void(int rank, std::shared_ptr<Store> store)>;

/// Each rank is a thread of this process; they share a memory_store. Every exception that a rank throws
/// becomes a test failure that names the rank. A group that has not ended by the deadline ends the process,
/// since threads cannot be killed, with a line that names the ranks that hang.
void run_ranks(int size, const RankFunction&, std::chrono::seconds deadline = std::chrono::seconds(200));

/// How a rank ended.
struct Ending {
  int exit_code = -1;  ///< 0: returned, and no EXPECT failed in it; 1: else; -1: killed
  int signal = 0;      ///< that killed it
  std::string error;   ///< the error it threw, or its test failures
};

/// Each rank is a forked process; they share a file_store in a directory of their own. Call it before the
/// test process has started any thread. A rank that has not ended by the deadline is killed (SIGKILL).
std::vector<Ending> run_processes(int size, const RankFunction&,
                                  std::chrono::seconds deadline = std::chrono::seconds(200));
/// As run_processes, and a test failure for every rank that did not end with 0.
void expect_processes(int size, const RankFunction&,
                      std::chrono::seconds deadline = std::chrono::seconds(200));

}  // namespace rz::test
