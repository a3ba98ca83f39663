// Runs: ci serial alone
// Not under sanitizers: HeartbeatOfRanksThatRun ADebuggerAccuses NothingIsDetected
// Not under sanitizers: AStoppedRankIsLost/(tcp|mixed|apart)
/// A rank that does not run is lost within the period of detection, and one that runs never is.

#include "comm/transport/heartbeats.h"

#include <gtest/gtest.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/ptrace.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <cstdlib>
#include <string>
#include <thread>
#include <vector>

#include "comm/communicator.h"
#include "comm/core/deadline.h"
#include "comm/core/error.h"
#include "tests/support/error_of.h"
#include "tests/support/ranks.h"

namespace rz {
namespace {

using namespace std::chrono_literals;
using Clock = std::chrono::steady_clock;
using test::error_of;

#if defined(__SANITIZE_THREAD__) || defined(__SANITIZE_ADDRESS__)
constexpr auto detection = 2000ms;
#else
constexpr auto detection = 800ms;
#endif

/// "shm", "tcp" (each rank is a node of its own), "mixed" (ranks 0 and 1 share one), "apart" (0 and 2 do).
CommOptions options_of(const std::string& over, int rank) {
  CommOptions options;
  options.timeout = 60s;
  options.detection = detection;
  if (over == "shm" || over == "tcp") options.transport = over;
  if (over == "mixed") options.host_id = rank < 2 ? "a" : "b";
  if (over == "apart") options.host_id = rank != 1 ? "a" : "b";
  return options;
}

pid_t process_of(Store& store, int rank) {
  return std::stoi(store.get("pid/" + std::to_string(rank), Deadline::after(60s)));
}

class Heartbeat : public testing::TestWithParam<std::string> {};
INSTANTIATE_TEST_SUITE_P(Over, Heartbeat, testing::Values("shm", "tcp", "mixed", "apart"),
                         [](const auto& info) { return info.param; });

/// Names of transports, as above.
class HeartbeatOfRanksThatRun : public testing::TestWithParam<std::string> {};
INSTANTIATE_TEST_SUITE_P(Over, HeartbeatOfRanksThatRun, testing::Values("tcp", "apart"),
                         [](const auto& info) { return info.param; });

/// While the others wait in a call, or compute and make one afterwards.
TEST_P(Heartbeat, AStoppedRankIsLost) {
  for (const bool idle : {false, GetParam() == "mixed"}) {
    const auto endings = test::run_processes(3, [&](int rank, auto store) {
      auto comm = Communicator::connect(rank, 3, store, options_of(GetParam(), rank));
      store->set("pid/" + std::to_string(rank), std::to_string(getpid()));
      comm.barrier().wait();
      if (rank == 1) raise(SIGSTOP);
      const auto begin = Clock::now();
      if (idle) std::this_thread::sleep_for(3 * detection);
      const Error e = error_of([&] {
        for (;;) comm.barrier().wait();
      });
      EXPECT_LT(Clock::now() - begin, 4 * detection);
      EXPECT_EQ(e.code(), Errc::peer_lost) << e.what();
      EXPECT_EQ(e.culprit(), 1) << e.what();
      EXPECT_NE(std::string(e.what()).find("stopped"), std::string::npos) << e.what();
      if (rank == 0) kill(process_of(*store, 1), SIGKILL);
    });
    EXPECT_EQ(endings[1].signal, SIGKILL);
    for (const std::size_t survivor : {0, 2})
      EXPECT_EQ(endings[survivor].exit_code, 0) << endings[survivor].error;
  }
}

/// It computes without a call of the library, for longer than the period.
TEST_P(HeartbeatOfRanksThatRun, AreNotLost) {
  test::expect_processes(3, [&](int rank, auto store) {
    auto comm = Communicator::connect(rank, 3, store, options_of(GetParam(), rank));
    if (rank == 1)
      for (const auto end = Clock::now() + 3 * detection; Clock::now() < end;) {
      }
    comm.barrier().wait();
  });
}

/// As a laptop that sleeps, or a control group that is frozen, with all ranks.
TEST_P(HeartbeatOfRanksThatRun, APauseOfAllAccusesNobody) {
  test::expect_processes(4, [&](int rank, auto store) {
    store->set("pid/" + std::to_string(rank), std::to_string(getpid()));
    if (rank == 3) {  // no rank of the group
      store->get("connected", Deadline::after(60s));
      for (const int signal : {SIGSTOP, SIGCONT}) {
        for (int r = 0; r < 3; ++r) kill(process_of(*store, r), signal);
        std::this_thread::sleep_for(3 * detection);
      }
      return store->set("done", "");
    }
    auto comm = Communicator::connect(rank, 3, prefix_store(store, "group/"), options_of(GetParam(), rank));
    comm.barrier().wait();
    store->set("connected", "");
    for (bool done = false; !done;) {
      int more = 1;
      try {
        store->get("done", Deadline::after(10ms));
        more = 0;
      } catch (const Error&) {
      }
      comm.all_reduce(Buffer(&more, 1), ReduceOp::min).wait();
      done = more == 0;
    }
  });
}

TEST(Heartbeats, ADebuggerAccusesNobody) {
  test::expect_processes(3, [&](int rank, auto store) {
    prctl(PR_SET_PTRACER, PR_SET_PTRACER_ANY);
    store->set("pid/" + std::to_string(rank), std::to_string(getpid()));
    auto comm = Communicator::connect(rank, 3, store, options_of("shm", rank));
    comm.barrier().wait();
    if (rank == 0) {
      const pid_t traced = process_of(*store, 1);
      if (ptrace(PTRACE_SEIZE, traced, nullptr, nullptr) == 0) {
        ptrace(PTRACE_INTERRUPT, traced, nullptr, nullptr);
        waitpid(traced, nullptr, __WALL);
        std::this_thread::sleep_for(3 * detection);
        ptrace(PTRACE_DETACH, traced, nullptr, nullptr);
      } else {
        std::fputs("not permitted to trace\n", stderr);
      }
    }
    comm.barrier().wait();
  });
}

TEST(Heartbeats, NothingIsDetectedIfThePeriodIsZero) {
  test::expect_processes(2, [&](int rank, auto store) {
    CommOptions options = options_of("shm", rank);
    options.detection = 0s;
    store->set("pid/" + std::to_string(rank), std::to_string(getpid()));
    auto comm = Communicator::connect(rank, 2, store, options);
    comm.barrier().wait();
    if (rank == 1) raise(SIGSTOP);
    if (rank == 0) {
      std::thread wakes([&] {
        std::this_thread::sleep_for(3 * detection);
        kill(process_of(*store, 1), SIGCONT);
      });
      comm.barrier().wait();
      wakes.join();
    } else {
      comm.barrier().wait();
    }
  });
}

/// Sockets of rank 1, of which one always has data on its way.
struct Sockets final : MonitoredLinks {
  std::optional<Failure> poll_failures() override { return {}; }
  Failure spread_failure(const Failure& failure) override { return failure; }
  std::optional<std::uint32_t> cancelled_after() const override { return {}; }
  void send_wait_message(int, const WaitMessage&) override {}
  std::optional<Failure> judge_silence(const Pulse& pulse, std::chrono::duration<double>) const override {
    return pulse.link ? std::optional(Failure{-1, Errc::peer_lost, "the connection is lost"}) : std::nullopt;
  }
  void add_unacknowledged(std::vector<Unacknowledged>& sockets) const override {
    const auto now = Clock::now();
    const auto sent = std::chrono::duration_cast<std::chrono::milliseconds>(now - begin);
    sockets.push_back({1, 7, answers ? 0ms : sent + silence});
  }
  Clock::time_point begin = Clock::now();
  std::chrono::milliseconds silence{0};  ///< before data was sent
  bool answers = false;                  ///< the other host acknowledges what was sent
};

/// The socket may have been idle for an hour before.
TEST(Heartbeats, DataThatNobodyAcknowledgesIsALostConnection) {
  for (const auto silence : {0ms, 3'600'000ms})
    for (const bool answers : {false, true}) {
      Sockets sockets;
      sockets.answers = answers;
      sockets.silence = silence;
      const auto monitor = std::make_shared<LinkMonitor>(0, std::vector{0, 1}, false);
      monitor->add(sockets, std::vector{1}, LinkData::sockets);
      const auto watch = Heartbeats::watch(monitor, 400ms);
      std::this_thread::sleep_for(1000ms);
      if (answers) {
        monitor->progress(0);
      } else {
        const Error e = error_of([&] { monitor->progress(0); });
        EXPECT_EQ(e.code(), Errc::peer_lost);
        EXPECT_EQ(e.culprit(), -1);
      }
    }
}

/// A group that shares the failures of another has its ranks.
TEST(Heartbeats, ALossEndsGroupsThatShareFailures) {
  const auto endings = test::run_processes(3, [&](int rank, auto store) {
    store->set("pid/" + std::to_string(rank), std::to_string(getpid()));
    auto comm = Communicator::connect(rank, 3, store, options_of("shm", rank));
    auto pair = comm.split(rank == 1 ? 1 : 0, 0, {}, true);
    if (rank == 1) raise(SIGSTOP);
    const Error e = error_of([&] {
      for (;;) pair->barrier().wait();
    });
    EXPECT_EQ(e.code(), Errc::peer_lost) << e.what();
    EXPECT_EQ(e.culprit(), 1) << e.what();
    if (rank == 0) kill(process_of(*store, 1), SIGKILL);
  });
  for (const std::size_t survivor : {0, 2})
    EXPECT_EQ(endings[survivor].exit_code, 0) << endings[survivor].error;
}

}  // namespace
}  // namespace rz
