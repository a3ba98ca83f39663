// Runs: ci

#include "comm/os/thread_team.h"

#include <gtest/gtest.h>
#include <sched.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <mutex>
#include <set>
#include <thread>

namespace rz {
namespace {

TEST(ThreadTeam, EveryPartRunsOnceInEveryRun) {
  ThreadTeam team(4);
  std::array<std::atomic<int>, 4> runs{};
  for (int round = 1; round <= 2000; ++round) {
    team.run([&](int part) { ++runs[static_cast<std::size_t>(part)]; });
    for (const auto& r : runs) ASSERT_EQ(r, round);
    if (round % 500 == 0) std::this_thread::sleep_for(std::chrono::milliseconds(5));  // the threads sleep
  }
}

TEST(ThreadTeam, RunsOfSeveralCallersAreSerialized) {
  ThreadTeam team(2);
  int unguarded = 0;
  const auto caller = [&] {
    for (int i = 0; i < 500; ++i)
      team.run([&](int part) {
        if (part == 0) ++unguarded;
      });
  };
  std::thread other(caller);
  caller();
  other.join();
  EXPECT_EQ(unguarded, 1000);
}

// All threads share one processor, as on a machine that is used by others: the caller does not wait for
// threads that do not run, and no thread is left on fewer processors than before.
TEST(ThreadTeam, AffinityIsAsBefore) {
  cpu_set_t before, one;
  ASSERT_EQ(sched_getaffinity(0, sizeof before, &before), 0);
  ThreadTeam team(3);
  std::mutex mutex;
  std::set<pid_t> threads;
  CPU_ZERO(&one);
  CPU_SET(static_cast<std::size_t>(sched_getcpu()), &one);
  ASSERT_EQ(sched_setaffinity(0, sizeof one, &one), 0);
  for (int round = 0; round < 2000; ++round)
    team.run([&](int) {
      const std::lock_guard lock(mutex);
      threads.insert(gettid());
    });
  ASSERT_EQ(sched_setaffinity(0, sizeof before, &before), 0);
  for (const pid_t t : threads) {
    cpu_set_t now;
    ASSERT_EQ(sched_getaffinity(t, sizeof now, &now), 0);
    EXPECT_TRUE(CPU_EQUAL(&now, &before));
  }
}

TEST(ThreadTeam, AChildOfForkRunsAllPartsAlone) {
  ThreadTeam team(3);
  team.run([](int) {});
  const pid_t child = fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    alarm(20);
    int parts = 0;
    team.run([&](int part) { parts += 1 << part; });
    _exit(parts == 7 ? 0 : 1);
  }
  int status = 0;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0) << status;
}

}  // namespace
}  // namespace rz
