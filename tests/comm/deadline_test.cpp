// Deadlines: upper bound of the duration, and the clock in use.

#include "comm/core/deadline.h"

#include <gtest/gtest.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <atomic>
#include <thread>
#include <vector>

#include "comm/communicator.h"
#include "comm/core/error.h"
#include "comm/device/drain.h"
#include "comm/store.h"
#include "tests/support/ranks.h"

namespace {

/// Offset of the system's clock from true time, as this program sees it.
std::atomic<time_t> system_clock_error{0};

}  // namespace

/// In place of the C library's.
extern "C" int clock_gettime(clockid_t clock, timespec* now) {
  const long result = syscall(SYS_clock_gettime, clock, now);
  if (result == 0 && clock == CLOCK_REALTIME) now->tv_sec += system_clock_error.load();
  return static_cast<int>(result);
}

namespace rz {
namespace {

using namespace std::chrono_literals;

TEST(Deadline, NoDurationIsTooLong) {
  for (const Deadline d :
       {Deadline::after(std::chrono::milliseconds::max()), Deadline::after(std::chrono::hours::max()),
        Deadline::after(std::chrono::nanoseconds::max()), Deadline::after(1e300 * 1s)}) {
    EXPECT_FALSE(d.expired());
    EXPECT_GT(d.remaining(), 24h * 365);
    EXPECT_EQ(d.poll_ms(1000), 1000);
  }
  EXPECT_TRUE(Deadline::after({}).expired());
  EXPECT_TRUE(Deadline::after(std::chrono::milliseconds::min()).expired());
  EXPECT_LE(Deadline::after(10ms).remaining(), 10ms);
  EXPECT_GT(Deadline::after(10s).remaining(), 9s);
}

void expect_a_wait(Store& store) {
  std::jthread other([&] {
    std::this_thread::sleep_for(30ms);
    store.set("late", "here");
  });
  EXPECT_EQ(store.get("late", Deadline::after(std::chrono::milliseconds::max())), "here");
  other.join();
}

TEST(Deadline, AStoreWaitsWithoutEnd) {
  expect_a_wait(*memory_store());
  const auto store = tcp_store("127.0.0.1:0", true, std::chrono::milliseconds::max());
  expect_a_wait(*store);
}

// One rank is late, so the other reads the clock while it waits.
TEST(Deadline, OperationsWaitWithoutEnd) {
  for (const char* transport : {"shm", "tcp"})
    test::run_ranks(2, [&](int rank, auto store) {
      CommOptions options;
      options.transport = transport;
      options.timeout = options.rendezvous_timeout = std::chrono::milliseconds::max();
      auto comm = Communicator::connect(rank, 2, store, options);
      for (int late = 0; late < 2; ++late) {
        std::vector<float> x(100'000, static_cast<float>(rank + 1));
        if (rank == late) std::this_thread::sleep_for(60ms);
        comm.all_reduce({x.data(), x.size()}).wait();
        EXPECT_EQ(x[77], 3.0f);
        if (rank == late) std::this_thread::sleep_for(60ms);
        rank == late ? comm.send({x.data(), 10}, 1 - rank).wait()
                     : comm.recv({x.data(), 10}, 1 - rank).wait();
      }
      comm.synchronize(Stream());
      EXPECT_EQ(comm.options().timeout, std::chrono::milliseconds::max());
    });
}

// An administrator or NTP changes the clock during a wait.
TEST(Deadline, AWaitDoesNotFollowTheSystemsClock) {
  const auto store = memory_store();
  system_clock_error = 3600;
  std::atomic<bool> over{false};
  std::jthread rescue([&] {
    for (int i = 0; i < 300 && !over; ++i) std::this_thread::sleep_for(10ms);
    store->set("never", "");
  });
  EXPECT_THROW(store->get("never", Deadline::after(50ms)), Error);
  over = true;
  system_clock_error = 0;
  rescue.join();
}

TEST(Drain, WaitsUntilWorkIsDoneOrTheDeadlineExpires) {
  int polls = 0;
  EXPECT_TRUE(drain([&] { return ++polls == 3; }, Deadline::after(5s)));
  EXPECT_EQ(polls, 3);
  EXPECT_FALSE(drain([] { return false; }, Deadline::after(2ms)));
  EXPECT_TRUE(drain([] { return true; }, Deadline::after(0s))) << "what is done needs no time";
}

}  // namespace
}  // namespace rz
