#pragma once
/// The threads that a library has started, and the signals that they receive.

#include <gtest/gtest.h>
#include <signal.h>
#include <unistd.h>

#include <cstdint>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <latch>
#include <mutex>
#include <set>
#include <string>

namespace rz::test {

/// Ids of this process's threads.
inline std::set<int> threads_of_process() {
  std::set<int> all;
  for (const auto& entry : std::filesystem::directory_iterator("/proc/self/task"))
    all.insert(std::stoi(entry.path().filename()));
  return all;
}

/// Signals that a thread blocks: bit s - 1 is signal s.
inline std::uint64_t blocked_by(int thread) {
  std::ifstream status("/proc/self/task/" + std::to_string(thread) + "/status");
  for (std::string line; std::getline(status, line);)
    if (line.starts_with("SigBlk:")) return std::stoull(line.substr(7), nullptr, 16);
  return ~std::uint64_t{0};  // it has ended
}

/// Signals raised by a thread's own instructions.
inline bool is_fault(int signal) {
  return signal == SIGSEGV || signal == SIGBUS || signal == SIGFPE || signal == SIGILL || signal == SIGTRAP ||
         signal == SIGSYS;
}

/// The threads that a library starts between begin() and expect_no_signals(), which each rank calls.
class HelperThreads {
 public:
  explicit HelperThreads(int ranks = 1) : here_(ranks), begun_(ranks), checked_(ranks) {}

  /// All threads that exist now are the test's.
  void begin() {
    here_.arrive_and_wait();
    {
      const std::lock_guard lock(mutex_);
      own_.merge(threads_of_process());
    }
    begun_.arrive_and_wait();
  }

  /// There are `min_threads` new threads, and they block all signals but those of their own faults.
  void expect_no_signals(std::size_t min_threads) {
    std::size_t helpers = 0;
    for (const int thread : threads_of_process()) {
      if (own_.contains(thread)) continue;
      ++helpers;
      const std::uint64_t blocked = blocked_by(thread);
      for (int s = 1; s <= 31; ++s) {
        if (s == SIGKILL || s == SIGSTOP || is_fault(s)) continue;
        EXPECT_TRUE(blocked >> (s - 1) & 1) << strsignal(s);
      }
    }
    EXPECT_GE(helpers, min_threads);
    checked_.arrive_and_wait();  // no thread ends before
  }

 private:
  std::latch here_, begun_, checked_;
  std::mutex mutex_;
  std::set<int> own_;
};

}  // namespace rz::test
