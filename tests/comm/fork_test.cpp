// Runs: ci alone

// A child of fork() must not affect its parent's group.

#include <gtest/gtest.h>
#include <malloc.h>
#include <signal.h>
#include <sys/mman.h>

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <fstream>
#include <functional>
#include <mutex>
#include <optional>
#include <thread>
#include <vector>

#include "comm/bootstrap/local_rendezvous.h"
#include "comm/communicator.h"
#include "comm/core/error.h"
#include "comm/core/lazy.h"
#include "comm/os/process.h"
#include "comm/os/thread_team.h"
#include "comm/shared_memory/allocator.h"
#include "tests/support/error_of.h"
#include "tests/support/forked.h"
#include "tests/support/ranks.h"

namespace rz {
namespace {

using namespace std::chrono_literals;
using test::error_of;
using test::Gate;
using test::in_forked_child;

constexpr std::size_t n = 1 << 20;

CommOptions quick(const std::string& transport) {
  CommOptions options;
  options.timeout = 20s;
  options.transport = transport == "tls" ? "tcp" : transport;
  if (transport == "tls") options.encryption = "always";
  return options;
}

/// An array that malloc allocated by mmap.
std::vector<int> alone(int value) {
  mallopt(M_MMAP_THRESHOLD, 128 << 10);
  return std::vector<int>(n, value);
}

bool is_shared(const void* address) {
  std::ifstream maps("/proc/self/maps");
  const auto wanted = reinterpret_cast<std::uintptr_t>(address);
  for (std::string line; std::getline(maps, line);) {
    std::uintptr_t begin = 0, end = 0;
    if (std::sscanf(line.c_str(), "%lx-%lx ", &begin, &end) == 2 && begin <= wanted && wanted < end)
      return line.find("rw-s") != std::string::npos;
  }
  return false;
}

bool all_are(const std::vector<int>& x, int value) {
  return std::all_of(x.begin(), x.end(), [&](int v) { return v == value; });
}

template <class T>
bool sums_to(Communicator& comm, T& x, int expected) {
  comm.all_reduce({x.data(), x.size()}).wait();
  return all_are(x, expected);
}

// ---- registrations

TEST(Fork, ARegistrationThatEndsInTheChildLeavesTheParentsMemory) {
  test::expect_processes(2, [](int rank, auto store) {
    auto comm = Communicator::connect(rank, 2, store, quick("shm"));
    auto x = alone(2);
    Registration r = comm.register_buffer(x.data(), n * sizeof(int));
    ASSERT_TRUE(r.zero_copy()) << r.reason();
    if (rank == 0) {
      EXPECT_EQ(in_forked_child([&] {
                  r = {};
                  return all_are(x, 2) && is_shared(x.data());
                }),
                0);
    }
    EXPECT_TRUE(all_are(x, 2)) << "x[0] is " << x[0];
    comm.barrier().wait();
    EXPECT_TRUE(sums_to(comm, x, 4)) << "x[0] is " << x[0];
  });
}

TEST(Fork, ARegistrationThatEndsInTheParentLeavesTheChildItsContents) {
  const auto arena = std::make_shared<SharedMemoryAllocator>();
  auto x = alone(2);
  Registration r = arena->register_buffer(std::as_writable_bytes(std::span(x)));
  ASSERT_TRUE(r.zero_copy()) << r.reason();
  Gate ended, seen;
  const pid_t child = fork();
  if (child == 0) {
    alarm(20);
    ended.wait();
    _exit(all_are(x, 2) ? 0 : 1);
  }
  r = {};
  EXPECT_TRUE(all_are(x, 2));
  ended.open();
  int status = -1;
  waitpid(child, &status, 0);
  EXPECT_EQ(status, 0) << "the child found other contents";
}

TEST(Fork, MemoryOfAllocateThatTheParentFreesLeavesTheChildItsContents) {
  const auto arena = std::make_shared<SharedMemoryAllocator>();
  constexpr std::size_t bytes = 4 << 20;
  auto memory = arena->allocate(bytes);
  std::fill_n(memory.get(), bytes, std::byte{7});
  Gate freed;
  const pid_t child = fork();
  if (child == 0) {
    alarm(20);
    freed.wait();
    _exit(std::count(memory.get(), memory.get() + bytes, std::byte{7}) == bytes ? 0 : 1);
  }
  memory.reset();
  freed.open();
  int status = -1;
  waitpid(child, &status, 0);
  EXPECT_EQ(status, 0) << "the child found other contents";
}

// ---- communicators

void end_in_a_child(int rank, int size, const std::shared_ptr<Store>& store, const std::string& transport) {
  std::optional<Communicator> comm = Communicator::connect(rank, size, store, quick(transport));
  std::vector<int> x(5000, 1);
  EXPECT_TRUE(sums_to(*comm, x, size));
  const auto block = comm->allocate(1000);
  // The progress thread sleeps. Its condition variable has a waiter in the child that never returns.
  std::this_thread::sleep_for(1200ms);
  if (rank == 0) {
    EXPECT_EQ(in_forked_child([&] {
                comm.reset();
                return true;
              }),
              0)
        << "the child could not end its copy";
  }
  comm->barrier().wait();
  for (int i = 0; i < 20; ++i) {
    std::fill(x.begin(), x.end(), 1);
    EXPECT_TRUE(sums_to(*comm, x, size));
  }
}

class ForkOver : public testing::TestWithParam<const char*> {};

TEST_P(ForkOver, ACommunicatorThatEndsInTheChildGoesOnInTheParent) {
  // So many that epoll watches their sockets; parent and child share it.
  test::expect_processes(4, [](int rank, auto store) { end_in_a_child(rank, 4, store, GetParam()); });
}

TEST_P(ForkOver, AParentThatDiesLaterIsStillDetected) {
  const auto endings = test::run_processes(2, [](int rank, auto store) {
    std::optional<Communicator> comm = Communicator::connect(rank, 2, store, quick(GetParam()));
    std::vector<int> x(5000, 1);
    EXPECT_TRUE(sums_to(*comm, x, 2));
    if (rank == 0) {
      in_forked_child([&] {
        comm.reset();
        return true;
      });
      store->set("child has ended", "");
      kill(getpid(), SIGKILL);
    }
    store->get("child has ended", Deadline::after(30s));
    const Error e = error_of([&] {
      for (;;) comm->all_reduce({x.data(), x.size()}, ReduceOp::max).wait();
    });
    EXPECT_EQ(e.code(), Errc::peer_lost) << e.what();
    EXPECT_EQ(std::string(e.what()).find("left"), std::string::npos) << e.what();
  });
  EXPECT_EQ(endings[0].signal, SIGKILL) << endings[0].error;
  EXPECT_EQ(endings[1].exit_code, 0) << endings[1].error;
}

TEST_P(ForkOver, CallsOfTheChildAreRefusedAndChangeNothing) {
  test::expect_processes(2, [](int rank, auto store) {
    auto comm = Communicator::connect(rank, 2, store, quick(GetParam()));
    std::vector<int> x(5000, 1);
    EXPECT_TRUE(sums_to(comm, x, 2));
    if (rank == 0) {
      EXPECT_EQ(in_forked_child([&] {
                  const auto refused = [&](const auto& call) {
                    const Error e = error_of(call);
                    return e.code() == Errc::invalid_argument &&
                           std::string(e.what()).find(concat("process ", getppid())) != std::string::npos;
                  };
                  comm.abort("the child's");
                  return refused([&] {
                           comm.all_reduce({x.data(), x.size()}).wait();
                         }) &&
                         refused([&] {
                           comm.all_reduce({x.data(), std::size_t{1}}).wait();
                         }) &&
                         refused([&] { comm.allocate(1000); }) &&
                         refused([&] { (void)comm.register_buffer(x.data(), 5000 * sizeof(int)); });
                }),
                0);
    }
    comm.barrier().wait();
    EXPECT_TRUE(sums_to(comm, x, 4));
  });
}

INSTANTIATE_TEST_SUITE_P(Transports, ForkOver, testing::Values("shm", "tcp", "tls"),
                         [](const auto& info) { return std::string(info.param); });

// ---- forks at any moment

#if defined(__SANITIZE_THREAD__) || defined(__SANITIZE_ADDRESS__)
// Not supported by the one; a child inherits the locks of the other's allocator from the parent's threads.
constexpr bool starts_threads_in_children = false;
#else
constexpr bool starts_threads_in_children = true;
#endif

/// Connects two ranks, reduces, allocates, and makes memory zero-copy: what a child of fork() may do.
bool can_use_a_group_of_its_own() {
  const auto store = memory_store();
  std::atomic<int> right{0};
  const auto rank = [&](int r) {
    auto comm = Communicator::connect(r, 2, store, quick("shm"));
    auto x = alone(r + 1);
    const Registration registration = comm.register_buffer(x.data(), n * sizeof(int));
    const auto y = comm.allocate(1 << 20);
    right += registration.zero_copy() && sums_to(comm, x, 3);
  };
  std::thread other(rank, 1);
  rank(0);
  other.join();
  return right == 2;
}

/// Whether each of `children` can, of which a process is forked while another thread of it runs `work` again
/// and again.
bool children_can_while(int children, const std::function<void()>& work) {
  std::atomic<bool> stop{false}, begun{false};
  std::thread busy([&] {
    while (!stop) begun = true, work();
  });
  while (!begun) std::this_thread::yield();
  int failed = 0;
  for (int i = 0; i < children; ++i) failed += in_forked_child(can_use_a_group_of_its_own) != 0;
  stop = true;
  busy.join();
  return failed == 0;
}

TEST(Fork, AChildConnectsWhateverItsParentIsInitializing) {
  if (!starts_threads_in_children) GTEST_SKIP();
  // Each process connects for the first time, if this test runs alone.
  for (int i = 0; i < 10; ++i)
    ASSERT_EQ(in_forked_child([i] {
                std::thread first(can_use_a_group_of_its_own);
                std::this_thread::sleep_for(i * 500us);
                const bool can = in_forked_child(can_use_a_group_of_its_own) == 0;
                first.join();
                return can;
              }),
              0)
        << "forked " << i * 500 << " us after the first connect()";
}

TEST(Fork, AChildRegistersAndAllocatesWhateverItsParentDoes) {
  if (!starts_threads_in_children) GTEST_SKIP();
  const auto arena = std::make_shared<SharedMemoryAllocator>();
  std::vector<int> large = alone(2);
  EXPECT_TRUE(children_can_while(10, [&] {
    const Registration r = arena->register_buffer(std::as_writable_bytes(std::span(large)));
    const auto block = arena->allocate(5000), blocks = arena->allocate(5 << 20);
  }));
}

TEST(Fork, AMutexOfTheProcessIsFreeInTheChild) {
  static constinit ProcessMutex mutex;
  const auto fork_while_locked = [] {
    Gate locked, forked;
    std::thread holder([&] {
      const std::lock_guard lock(mutex);
      locked.open();
      forked.wait();
    });
    locked.wait();
    const int end = in_forked_child([] {
      for (int i = 0; i < 2; ++i) const std::lock_guard lock(mutex);
      return true;
    });
    forked.open();
    holder.join();
    return end;
  };
  EXPECT_EQ(fork_while_locked(), 0);
  EXPECT_EQ(in_forked_child([&] { return fork_while_locked() == 0; }), 0) << "in a child of the child";
  int count = 0;
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t)
    threads.emplace_back([&] {
      for (int i = 0; i < 2000; ++i) {
        const std::lock_guard lock(mutex);
        ++count;
      }
    });
  for (auto& thread : threads) thread.join();
  EXPECT_EQ(count, 8000);
}

TEST(Fork, AValueThatTheParentIsMakingIsMadeByTheChild) {
  static constinit Lazy<int> value;
  Gate making, forked;
  std::thread maker([&] {
    value.get([&] {
      making.open();
      forked.wait();
      return 1;
    });
  });
  making.wait();
  EXPECT_EQ(in_forked_child([] { return value.get([] { return 2; }) == 2; }), 0);
  forked.open();
  maker.join();
  EXPECT_EQ(value.get([] { return 3; }), 1);
}

TEST(Fork, AThreadTeamOfTheParentRunsInTheChildsOnlyThread) {
  auto team = std::make_unique<ThreadTeam>(3);
  EXPECT_EQ(in_forked_child([&] {
              std::vector<int> calls(3);
              team->run([&](int member) { ++calls[static_cast<std::size_t>(member)]; });
              team.reset();
              return calls == std::vector<int>(3, 1);
            }),
            0);
}

// ---- rendezvous

TEST(Fork, ARendezvousDirectoryStaysWhenTheChildEndsItsStore) {
  const std::string job = concat("fork_test/", getpid());
  auto store = local_rendezvous_store(job, 0, 1, Deadline::after(20s));
  store->set("key", "value");
  EXPECT_EQ(in_forked_child([&] {
              store.reset();
              return true;
            }),
            0);
  EXPECT_EQ(store->get("key", Deadline::after(0s)), "value");
}

TEST(Fork, ATcpStoreIsServedOnWhenTheChildEndsItsOwn) {
  auto store = tcp_store("127.0.0.1:0", true);
  EXPECT_EQ(in_forked_child([&] {
              store.reset();
              return true;
            }),
            0);
  store->set("key", "value");
  EXPECT_EQ(store->get("key", Deadline::after(5s)), "value");
}

}  // namespace
}  // namespace rz
