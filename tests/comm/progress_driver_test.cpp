// The progress thread of a process: turns, sleeps and wakes of what it drives, and communicators that share
// it.

#include "comm/progress/progress_driver.h"

#include <gtest/gtest.h>
#include <signal.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <filesystem>
#include <fstream>
#include <latch>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "comm/communicator.h"
#include "comm/core/deadline.h"
#include "comm/core/error.h"
#include "tests/lab/group.h"
#include "tests/support/error_of.h"
#include "tests/support/forked.h"
#include "tests/support/ranks.h"

namespace rz {
namespace {

using namespace std::chrono_literals;
using Turn = Driven::Turn;
using test::error_of;

template <class F>
bool within_seconds(const F& is_true) {
  for (const Deadline end = Deadline::after(20s); !is_true();) {
    if (end.expired()) return false;
    std::this_thread::sleep_for(200us);
  }
  return true;
}

/// Number of progress threads of this process.
int progress_threads() {
  int n = 0;
  for (const auto& entry : std::filesystem::directory_iterator("/proc/self/task")) {
    std::ifstream file(entry.path() / "comm");
    std::string name;
    if (std::getline(file, name) && name == "rz-progress") ++n;
  }
  return n;
}

int threads() {
  return static_cast<int>(std::ranges::distance(std::filesystem::directory_iterator("/proc/self/task")));
}

// ---- processes come first: they fork before this process has threads

CommOptions over(const std::string& transport) {
  CommOptions options;
  options.timeout = 30s;
  options.transport = transport;
  return options;
}

/// Sums on a communicator that no thread waits for.
bool sums_unattended(Communicator& comm, std::vector<int>& x, int times) {
  for (int i = 0; i < times; ++i) {
    std::fill(x.begin(), x.end(), 1);
    const Work work = comm.all_reduce({x.data(), x.size()});
    if (!within_seconds([&] { return work.done(); })) return false;
    if (std::ranges::count(x, comm.size()) != std::ssize(x)) return false;
  }
  return true;
}

class ProcessesOver : public testing::TestWithParam<const char*> {};
INSTANTIATE_TEST_SUITE_P(Transports, ProcessesOver, testing::Values("shm", "tcp"),
                         [](const auto& info) { return std::string(info.param); });

/// Rank 0 is in two groups: with rank 1, which lives, and with rank 2, which stops and then dies.
TEST_P(ProcessesOver, AStoppedAndADeadPeerDelayOnlyTheirOwnCommunicator) {
  const auto endings = test::run_processes(3, [](int rank, auto store) {
    const auto with = [&](const char* name, int peer) {
      return Communicator::connect(rank == 0 ? 0 : 1, 2, prefix_store(store, concat(name, peer)),
                                   over(GetParam()));
    };
    std::vector<int> x(300'000), y(300'000);
    std::optional<Communicator> live, doomed;
    if (rank < 2) live = with("live", 1);
    if (rank != 1) doomed = with("doomed", 2);
    if (rank == 2) {
      store->set("pid", concat(getpid()));
      raise(SIGSTOP);
    }
    if (rank == 1) {
      EXPECT_TRUE(sums_unattended(*live, x, 40));
    }
    if (rank > 0) return;
    const pid_t peer = std::stoi(store->get("pid", Deadline::after(20s)));
    Work stuck = doomed->all_reduce({y.data(), y.size()});
    EXPECT_TRUE(sums_unattended(*live, x, 20));
    EXPECT_FALSE(stuck.done());
    EXPECT_EQ(progress_threads(), 1);
    kill(peer, SIGKILL);
    EXPECT_TRUE(within_seconds([&] { return stuck.done(); })) << "the thread finds the death by itself";
    const Error e = error_of([&] { stuck.wait(); });
    EXPECT_EQ(e.code(), Errc::peer_lost) << e.what();
    EXPECT_EQ(e.culprit(), 1);
    doomed.reset();
    EXPECT_TRUE(sums_unattended(*live, x, 20));
  });
  for (const std::size_t r : {0, 1}) EXPECT_EQ(endings[r].exit_code, 0) << endings[r].error;
  EXPECT_EQ(endings[2].signal, SIGKILL);
}

TEST_P(ProcessesOver, ACommunicatorEndsWhileAnotherIsInFlight) {
  test::expect_processes(2, [](int rank, auto store) {
    auto stays = Communicator::connect(rank, 2, store, over(GetParam()));
    auto ends = stays.split(0, rank);
    std::vector<int> x(300'000, 1), y(300'000, 1);
    if (rank == 0) {
      Work unanswered = ends->all_reduce({y.data(), y.size()});
      std::this_thread::sleep_for(20ms);  // the thread has begun it
      ends.reset();
      EXPECT_EQ(error_of([&] { unanswered.wait(); }).code(), Errc::aborted);
    }
    EXPECT_TRUE(sums_unattended(stays, x, 10));
    EXPECT_EQ(progress_threads(), 1);
  });
}

TEST(ProgressThread, AChildOfForkHasItsOwn) {
#ifdef __SANITIZE_THREAD__
  GTEST_SKIP() << "the thread sanitizer lets no child of a process with threads start one";
#endif
  test::expect_processes(1, [](int, auto) {
    auto in_parent = Communicator::connect(0, 1, nullptr);
    EXPECT_TRUE(within_seconds([] { return progress_threads() == 1; }));
    EXPECT_EQ(test::in_forked_child([&] {
                if (progress_threads() != 0) return false;
                const auto driver = ProgressDriver::of_process();
                return within_seconds([] { return progress_threads() == 1; });
              }),
              0);
    EXPECT_EQ(progress_threads(), 1);
  });
}

TEST(ProgressThread, IsOneForAllCommunicators) {
  test::expect_processes(1, [](int, auto) {
    EXPECT_EQ(progress_threads(), 0);
    std::vector<Communicator> all;
    all.push_back(Communicator::connect(0, 1, nullptr));
    EXPECT_TRUE(within_seconds([] { return progress_threads() == 1; }));
    const int with_one = threads();
    for (int i = 1; i < 6; ++i) all.push_back(Communicator::connect(0, 1, nullptr));
    EXPECT_EQ(threads(), with_one);
    all.erase(all.begin() + 1, all.end());
    EXPECT_EQ(progress_threads(), 1);
    all.clear();
    EXPECT_TRUE(within_seconds([] { return progress_threads() == 0; }));
  });
}

// ---- turns

/// Counts its turns. `next` is what they return.
class Member final : public Driven {
 public:
  Turn turn() noexcept override {
    if (log) log->push_back(this);
    if (gate) begun = true, gate->wait();
    std::uint64_t rings = 0;
    if (event >= 0 && ::read(event, &rings, sizeof rings) > 0) events += static_cast<int>(rings);
    if (waker && turns < 50) waker->wake(*this);
    ++turns;
    return next;
  }
  Sleep begin_sleep() noexcept override {
    ++sleeps;
    return {.allowed = true, .descriptor = event};
  }
  void end_sleep() noexcept override { ++ends; }
  void ring() const {
    const std::uint64_t one = 1;
    ASSERT_EQ(::write(event, &one, sizeof one), static_cast<ssize_t>(sizeof one));
  }
  bool is_asleep() const { return sleeps == ends + 1; }

  Turn next{.state = Turn::idle, .next = Time::max()};
  int event = -1;
  std::vector<const Driven*>* log = nullptr;
  std::latch* gate = nullptr;
  ProgressDriver* waker = nullptr;
  std::atomic<bool> begun{false};  // a turn with a gate
  std::atomic<int> turns{0}, sleeps{0}, ends{0}, events{0};
};

/// Blocked until its descriptor is readable; its turns count the events.
struct Blocked {
  Blocked() : file(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {
    member.next = {.state = Turn::blocked, .next = Driven::Time::max()};
    member.event = file.get();
  }
  UniqueFd file;
  Member member;
};

TEST(ProgressDriver, MembersThatMoveHaveTurnsInTurn) {
  std::vector<const Driven*> log;
  Member a, b, c;
  {
    const auto driver = ProgressDriver::of_process();
    for (Member* const m : {&a, &b, &c}) m->next = {.state = Turn::moved}, m->log = &log;
    for (Member* const m : {&a, &b, &c}) driver->add(*m);
    EXPECT_TRUE(within_seconds([&] { return c.turns > 100; }));
  }
  const auto first = std::ranges::find(log, &c) - log.begin();
  for (auto i = first; i + 3 < std::ssize(log); ++i)
    ASSERT_EQ(log[static_cast<std::size_t>(i)], log[static_cast<std::size_t>(i + 3)]) << i;
}

TEST(ProgressDriver, AnIdleMemberIsLeftAloneUntilItIsWoken) {
  const auto driver = ProgressDriver::of_process();
  Member idle, busy;
  busy.next = {.state = Turn::moved};
  driver->add(idle);
  EXPECT_TRUE(within_seconds([&] { return idle.turns == 1; }));
  driver->add(busy);
  EXPECT_TRUE(within_seconds([&] { return busy.turns > 100; }));
  EXPECT_EQ(idle.turns, 1);
  driver->wake(idle);
  EXPECT_TRUE(within_seconds([&] { return idle.turns == 2; }));
  driver->remove(busy);
  driver->remove(idle);
}

TEST(ProgressDriver, NoWakeIsMissed) {
  const auto driver = ProgressDriver::of_process();
  Member member;
  driver->add(member);
  // A wake that is missed costs DriverWaitPolicy::max_sleep.
  const Deadline end = Deadline::after(20s);
  for (int i = 1; i < 20'000; ++i) {
    while (member.turns < i && !end.expired()) std::this_thread::yield();
    ASSERT_EQ(member.turns, i);
    driver->wake(member);
  }
  driver->remove(member);
}

TEST(ProgressDriver, AWakeDuringATurnIsNotMissed) {
  const auto driver = ProgressDriver::of_process();
  Member member;
  member.waker = driver.get();
  driver->add(member);
  EXPECT_TRUE(within_seconds([&] { return member.turns == 51; }));
  driver->remove(member);
}

TEST(ProgressDriver, AnIdleMemberIsDueAtItsTime) {
  const auto driver = ProgressDriver::of_process();
  Member member;
  member.next = {.state = Turn::idle, .next = {}};
  driver->add(member);
  EXPECT_TRUE(within_seconds([&] { return member.turns > 10; }));
  driver->remove(member);
}

TEST(ProgressDriver, SleepsUntilOneOfAllEvents) {
  const auto driver = ProgressDriver::of_process();
  Blocked a, b;
  driver->add(a.member);
  driver->add(b.member);
  EXPECT_TRUE(within_seconds([&] { return a.member.is_asleep() && b.member.is_asleep(); }));
  // Without events it sleeps for DriverWaitPolicy::max_sleep.
  const Deadline end = Deadline::after(10s);
  for (int i = 1; i <= 20; ++i)
    for (Member* const m : {&a.member, &b.member}) {
      m->ring();
      EXPECT_TRUE(within_seconds([&] { return m->events == i && m->is_asleep(); }));
    }
  EXPECT_FALSE(end.expired());
  driver->remove(a.member);
  driver->remove(b.member);
  EXPECT_EQ(a.member.sleeps, a.member.ends);
  EXPECT_EQ(b.member.sleeps, b.member.ends);
}

TEST(ProgressDriver, RemoveWaitsForTheTurn) {
  const auto driver = ProgressDriver::of_process();
  std::latch gate(1);
  Member member;
  member.gate = &gate;
  driver->add(member);
  EXPECT_TRUE(within_seconds([&] { return member.begun.load(); }));
  std::atomic<bool> removed = false;
  std::thread other([&] {
    driver->remove(member);
    EXPECT_EQ(member.turns, 1);
    removed = true;
  });
  std::this_thread::sleep_for(20ms);
  EXPECT_FALSE(removed);
  gate.count_down();
  other.join();
}

TEST(ProgressDriver, RemoveEndsASleep) {
  const auto driver = ProgressDriver::of_process();
  Blocked blocked;
  driver->add(blocked.member);
  EXPECT_TRUE(within_seconds([&] { return blocked.member.is_asleep(); }));
  driver->remove(blocked.member);
  EXPECT_EQ(blocked.member.sleeps, blocked.member.ends);
}

TEST(ProgressDriver, LivesAsLongAsItIsUsed) {
  auto first = ProgressDriver::of_process();
  auto second = ProgressDriver::of_process();
  EXPECT_EQ(first, second);
  EXPECT_TRUE(within_seconds([] { return progress_threads() == 1; }));
  first.reset();
  EXPECT_EQ(progress_threads(), 1);
  second.reset();
  EXPECT_TRUE(within_seconds([] { return progress_threads() == 0; }))
      << "the kernel lists a joined thread briefly";
}

// ---- communicators of ranks that are threads

TEST(ProgressThread, SurvivesCommunicatorsThatComeAndGo) {
  lab::group(2, [&](Communicator& comm) {
    auto second = comm.split(0, comm.rank());
    std::thread churn([&] {
      for (int i = 0; i < 20; ++i) {
        auto brief = second->split(0, comm.rank());
        std::vector<int> x(20'000);
        EXPECT_TRUE(sums_unattended(*brief, x, 2));
        if (i % 2) brief->barrier().wait();
      }
    });
    std::vector<int> x(50'000);
    EXPECT_TRUE(sums_unattended(comm, x, 100));
    churn.join();
    EXPECT_EQ(progress_threads(), 1);
  });
}

TEST(ProgressThread, SurvivesAnAbortDuringItsSteps) {
  for (int round = 0; round < 10; ++round) {
    lab::group(2, [&](Communicator& comm) {
      auto aborted = comm.split(0, comm.rank());
      std::vector<int> x(50'000), y(1 << 20, 1);
      Work work = aborted->all_reduce({y.data(), y.size()}, ReduceOp::max);
      std::thread aborting([&] {
        std::this_thread::sleep_for(1ms);
        if (comm.rank() == 0) aborted->abort("enough");
      });
      EXPECT_TRUE(sums_unattended(comm, x, 5));
      EXPECT_TRUE(within_seconds([&] { return work.done(); }));
      aborting.join();
      EXPECT_EQ(error_of([&] {
                  for (;;) aborted->barrier().wait();
                }).code(),
                Errc::aborted);
    });
  }
}

}  // namespace
}  // namespace rz
