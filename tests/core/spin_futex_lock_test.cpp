// A lock that threads acquire in turn; some of them have to sleep.

#include "comm/os/spin_futex_lock.h"

#include <gtest/gtest.h>

#include <chrono>
#include <condition_variable>
#include <mutex>
#include <thread>
#include <vector>

namespace rz {
namespace {

TEST(SpinFutexLock, OneThreadAtATime) {
  constexpr int threads = 4, times = 20000;
  SpinFutexLock lock;
  int count = 0, inside = 0;
  std::vector<std::thread> all;
  for (int t = 0; t < threads; ++t)
    all.emplace_back([&] {
      for (int i = 0; i < times; ++i) {
        const std::lock_guard held(lock);
        EXPECT_EQ(++inside, 1);
        if (i % 64 == 0) std::this_thread::yield();
        ++count;
        --inside;
      }
    });
  for (auto& t : all) t.join();
  EXPECT_EQ(count, threads * times);
}

TEST(SpinFutexLock, ASleepingThreadAcquiresIt) {
  SpinFutexLock lock;
  bool done = false;
  std::vector<std::thread> sleepers;
  int got = 0;
  {
    const std::lock_guard held(lock);
    for (int i = 0; i < 3; ++i)
      sleepers.emplace_back([&] {
        const std::lock_guard mine(lock);
        EXPECT_TRUE(done);
        ++got;
      });
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
    EXPECT_EQ(got, 0);
    done = true;
  }
  for (auto& t : sleepers) t.join();
  EXPECT_EQ(got, 3);
}

TEST(SpinFutexLock, WorksWithConditionVariables) {
  SpinFutexLock lock;
  std::condition_variable_any changed;
  int turn = 0;
  const auto progress_in_random_order = [&](int mine) {
    for (int i = 0; i < 200; ++i) {
      std::unique_lock held(lock);
      changed.wait(held, [&] { return turn % 2 == mine; });
      ++turn;
      changed.notify_all();
    }
  };
  std::thread other(progress_in_random_order, 1);
  progress_in_random_order(0);
  other.join();
  EXPECT_EQ(turn, 400);
}

}  // namespace
}  // namespace rz
