// Runs: alone

/// Requests to save: signals, clocks, and the decision of all ranks.
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <functional>
#include <map>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "sharding/engine/checkpoints/save_requests.h"
#include "sharding/engine/checkpoints/signal_handler.h"
#include "tests/lab/group.h"
#include "tests/support/error_of.h"
#include "tests/support/ranks.h"

namespace rz {
namespace {

using namespace std::chrono_literals;
using test::error_of;

std::atomic<int> earlier_handler_calls{0};
void earlier_handler(int) { ++earlier_handler_calls; }

struct sigaction action_of(int signal) {
  struct sigaction action {};
  ::sigaction(signal, nullptr, &action);
  return action;
}

TEST(SignalHandler, RecordsSignalsAndRestoresTheHandlersBefore) {
  struct sigaction mine {};
  mine.sa_handler = earlier_handler;
  ::sigaction(SIGUSR1, &mine, nullptr);
  {
    SignalHandler handler;
    EXPECT_FALSE(handler.received().user1);
    ::raise(SIGUSR1);
    ::raise(SIGUSR1);
    const ReceivedSignals first = handler.received();
    EXPECT_TRUE(first.user1);
    EXPECT_FALSE(first.terminate);
    EXPECT_FALSE(handler.received().user1) << "reported once";
    ::raise(SIGTERM);
    EXPECT_TRUE(handler.received().terminate);
    EXPECT_TRUE(handler.received().terminate) << "stays";
    EXPECT_FALSE(handler.received().user1);
  }
  EXPECT_EQ(earlier_handler_calls, 0) << "the handler chains to none";
  EXPECT_EQ(action_of(SIGUSR1).sa_handler, earlier_handler);
  EXPECT_EQ(action_of(SIGTERM).sa_handler, SIG_DFL);
  ::raise(SIGUSR1);
  EXPECT_EQ(earlier_handler_calls, 1);
  ::signal(SIGUSR1, SIG_DFL);
}

TEST(SignalHandler, RecordsTheFirstSigintAloneUnlessItIsIgnored) {
  {
    SignalHandler handler;
    ::raise(SIGINT);
    EXPECT_TRUE(handler.received().interrupt);
    EXPECT_TRUE(handler.received().interrupt) << "stays";
    EXPECT_FALSE(handler.received().terminate);
    EXPECT_EQ(action_of(SIGINT).sa_handler, SIG_DFL) << "the second one ends the process";
    { const UnrecordedTermination phase; }
    EXPECT_EQ(action_of(SIGINT).sa_handler, SIG_DFL);
  }
  ::signal(SIGINT, SIG_IGN);
  {
    SignalHandler handler;
    EXPECT_EQ(action_of(SIGINT).sa_handler, SIG_IGN) << "as a shell has it in the background";
    { const UnrecordedTermination phase; }
    EXPECT_EQ(action_of(SIGINT).sa_handler, SIG_IGN);
  }
  EXPECT_EQ(action_of(SIGINT).sa_handler, SIG_IGN);
  ::signal(SIGINT, SIG_DFL);
  SignalHandler handler;
  EXPECT_FALSE(handler.received().interrupt);
}

TEST(SignalHandler, TheNextOneBeginsWithNothingRecorded) {
  {
    SignalHandler handler;
    ::raise(SIGTERM);
    ::raise(SIGUSR1);
  }
  SignalHandler handler;
  const ReceivedSignals signals = handler.received();
  EXPECT_FALSE(signals.terminate);
  EXPECT_FALSE(signals.user1);
}

TEST(SignalHandler, IsOneAProcess) {
  SignalHandler handler;
  const Error e = error_of([] { SignalHandler second; });
  EXPECT_EQ(e.code(), Errc::invalid_argument);
  ::raise(SIGTERM);
  EXPECT_TRUE(handler.received().terminate) << "the first one works on";
}

TEST(SignalHandler, ASignalDoesNotEndASystemCall) {
  SignalHandler handler;
  int ends[2];
  ASSERT_EQ(::pipe(ends), 0);
  const pthread_t reader = ::pthread_self();
  std::thread writer([&] {
    std::this_thread::sleep_for(50ms);
    ::pthread_kill(reader, SIGUSR1);
    std::this_thread::sleep_for(50ms);
    EXPECT_EQ(::write(ends[1], "x", 1), 1);
  });
  char c = 0;
  EXPECT_EQ(::read(ends[0], &c, 1), 1);
  writer.join();
  EXPECT_TRUE(handler.received().user1);
  ::close(ends[0]);
  ::close(ends[1]);
}

std::optional<std::chrono::system_clock::time_point> end_time(const std::string& text) {
  return slurm_job_end_time_from([&](const std::string& name) -> std::optional<std::string> {
    if (name != "SLURM_JOB_END_TIME") return {};
    return text;
  });
}

/// Loading has nothing to save.
TEST(SignalHandler, SigtermEndsAPhaseThatRecordsNone) {
  const auto action = [] {
    struct sigaction now {};
    ::sigaction(SIGTERM, nullptr, &now);
    return now.sa_handler;
  };
  { const UnrecordedTermination none; }
  EXPECT_EQ(action(), SIG_DFL);
  SignalHandler handler;
  const auto recording = action();
  {
    const UnrecordedTermination outer;
    { const UnrecordedTermination inner; }
    EXPECT_EQ(action(), SIG_DFL);
    ::raise(SIGUSR1);
  }
  EXPECT_EQ(action(), recording);
  EXPECT_TRUE(handler.received().user1);
  const pid_t child = ::fork();
  if (child == 0) {
    const UnrecordedTermination phase;
    ::raise(SIGTERM);
    ::_exit(0);
  }
  int status = 0;
  ::waitpid(child, &status, 0);
  EXPECT_TRUE(WIFSIGNALED(status) && WTERMSIG(status) == SIGTERM);
}

TEST(SlurmEndTime, IsInSecondsSince1970) {
  EXPECT_EQ(end_time("1790000000"), std::chrono::system_clock::time_point(1790000000s));
  EXPECT_FALSE(end_time("0"));
  EXPECT_FALSE(slurm_job_end_time_from([](const std::string&) { return std::nullopt; }));
}

TEST(SlurmEndTime, AMalformedOneIsAnError) {
  for (const char* text : {"", "soon", "12x", "-5", "1e9", " 7", "99999999999"}) {
    const Error e = error_of([&] { end_time(text); });
    EXPECT_EQ(e.code(), Errc::config);
    EXPECT_NE(std::string(e.what()).find(concat("SLURM_JOB_END_TIME='", text, "'")), std::string::npos)
        << e.what();
  }
}

/// A run in which signals arrive and time passes between updates.
struct Script {
  SaveRequestOptions options;
  std::uint64_t steps = 10;
  /// Before the decision of this step and rank.
  std::map<std::pair<std::uint64_t, int>, ReceivedSignals> signals;
  /// Time of a rank's clock at a step.
  std::function<std::chrono::seconds(std::uint64_t step, int rank)> clock = [](std::uint64_t, int) {
    return 0s;
  };
};

/// The decisions of every rank after every step, on ranks that are threads.
std::vector<std::vector<SaveDecision>> run_script(int ranks, const Script& script) {
  std::vector<std::vector<SaveDecision>> decisions(static_cast<std::size_t>(ranks));
  lab::group(ranks, [&](Communicator& communicator) {
    const int rank = communicator.rank();
    std::uint64_t step = 0;
    bool terminated = false;
    SaveRequestOptions options = script.options;
    options.steady_now = [&] { return std::chrono::steady_clock::time_point(script.clock(step, rank)); };
    options.system_now = [&] { return std::chrono::system_clock::time_point(script.clock(step, rank)); };
    const auto received = [&]() -> ReceivedSignals {
      const auto found = script.signals.find({step, rank});
      ReceivedSignals signals = found == script.signals.end() ? ReceivedSignals{} : found->second;
      signals.terminate = terminated = terminated || signals.terminate;
      return signals;
    };
    SaveRequests requests(communicator, options, received);
    for (step = 1; step <= script.steps; ++step)
      decisions[static_cast<std::size_t>(rank)].push_back(requests.decide(step));
  });
  return decisions;
}

/// All ranks have these decisions, in the words of describe(); index 0 is step 1.
void expect_decisions(int ranks, const Script& script, const std::map<std::uint64_t, std::string>& expected) {
  const auto decisions = run_script(ranks, script);
  for (int rank = 0; rank < ranks; ++rank)
    for (std::uint64_t step = 1; step <= script.steps; ++step) {
      const SaveDecision& d = decisions[static_cast<std::size_t>(rank)][step - 1];
      const auto found = expected.find(step);
      EXPECT_EQ(describe(d), found == expected.end() ? "" : found->second)
          << "rank " << rank << ", step " << step;
      EXPECT_EQ(d.saves(), found != expected.end());
    }
}

TEST(SaveRequests, NothingIsRequested) {
  for (int ranks : {1, 3}) expect_decisions(ranks, {}, {});
}

TEST(SaveRequests, ASignalOnOneRankIsTheDecisionOfAll) {
  for (int rank : {0, 1, 2}) {
    Script script;
    script.signals[{4, rank}] = {.user1 = true};
    expect_decisions(3, script, {{4, concat("SIGUSR1 on rank ", rank)}});
  }
}

TEST(SaveRequests, ASignalThatReachesRanksOneAfterTheOtherIsOneRequest) {
  Script script;
  script.signals[{4, 2}] = script.signals[{5, 0}] = script.signals[{5, 1}] = {.user1 = true};
  expect_decisions(3, script, {{4, "SIGUSR1 on rank 2"}});
  script.signals[{6, 1}] = {.user1 = true};
  expect_decisions(3, script, {{4, "SIGUSR1 on rank 2"}, {6, "SIGUSR1 on rank 1"}});
}

TEST(SaveRequests, SigtermStopsAndStays) {
  Script script{.steps = 6};
  script.signals[{4, 1}] = {.terminate = true};
  const std::string stop = "SIGTERM on rank 1";
  expect_decisions(3, script, {{4, stop}, {5, stop}, {6, stop}});
  for (const auto& rank : run_script(3, script)) {
    EXPECT_TRUE(rank[3].stops());
    EXPECT_FALSE(rank[2].stops());
  }
  EXPECT_EQ(stopped_exit_status, 143);
}

/// Micro-batches of 0.1 s on rank 0 and 0.25 s on rank 1: after the first of all, ranks look at every fourth.
TEST(SaveRequests, ALongUpdateIsLookedAtOnceASecond) {
  lab::group(2, [&](Communicator& communicator) {
    int looks = 0;
    bool terminated = false;
    SaveRequests requests(communicator, {}, [&] {
      ++looks;
      return ReceivedSignals{.terminate = terminated};
    });
    const double seconds = communicator.rank() == 0 ? 0.1 : 0.25;
    const auto stops_at = [&](int micro_batches) {
      looks = 0;
      for (int m = 1; m < micro_batches; ++m)
        if (requests.stop_requested_in_update(m, std::chrono::duration<double>(m * seconds))) return m;
      return 0;
    };
    EXPECT_EQ(stops_at(16), 0);
    EXPECT_EQ(looks, 4) << "at 1, 5, 9, 13";
    EXPECT_EQ(stops_at(4), 0);
    EXPECT_EQ(looks, 0) << "an update of less than a second";
    EXPECT_FALSE(requests.stop_requested_in_update(1, std::chrono::duration<double>(0)));
    EXPECT_FALSE(requests.stop_requested_in_update(4, std::chrono::duration<double>(4e-3)));  // a short one
    EXPECT_EQ(stops_at(32), 0);
    EXPECT_EQ(looks, 0);
    EXPECT_EQ(stops_at(33), 0);
    EXPECT_EQ(looks, 1) << "at 32, though micro-batches were short";
    terminated = communicator.rank() == 0;
    EXPECT_EQ(stops_at(16), 4);
    EXPECT_EQ(requests.decide(1).reason, SaveReason::terminate);
    EXPECT_EQ(stops_at(16), 1) << "decided";
  });
}

TEST(SaveRequests, AStopComesBeforeASave) {
  Script script{.options = {.save_steps = 4}, .steps = 4};
  script.signals[{4, 0}] = {.user1 = true};
  script.signals[{4, 2}] = {.terminate = true};
  expect_decisions(3, script, {{4, "SIGTERM on rank 2"}});
}

TEST(SaveRequests, OfSeveralRanksTheLowestIsNamed) {
  Script script;
  script.signals[{4, 1}] = script.signals[{4, 2}] = {.user1 = true};
  expect_decisions(4, script, {{4, "SIGUSR1 on rank 1"}});
}

TEST(SaveRequests, EveryNUpdates) {
  Script script{.options = {.save_steps = 3}};
  for (int ranks : {1, 2})
    expect_decisions(ranks, script, {{3, "save_steps"}, {6, "save_steps"}, {9, "save_steps"}});
}

TEST(SaveRequests, TheIntervalIsThatOfRankZerosClockSinceTheLastSave) {
  Script script{.options = {.save_interval = 25s}};
  // An update takes 10 s on rank 0; the clocks of other ranks run faster.
  script.clock = [](std::uint64_t step, int rank) { return 10s * static_cast<int>(step) * (1 + 10 * rank); };
  expect_decisions(3, script, {{3, "save_interval"}, {6, "save_interval"}, {9, "save_interval"}});
  script.signals[{4, 1}] = {.user1 = true};
  expect_decisions(
      3, script,
      {{3, "save_interval"}, {4, "SIGUSR1 on rank 1"}, {7, "save_interval"}, {10, "save_interval"}});
}

TEST(SaveRequests, TheAllocationsEndStopsWithItsMargin) {
  Script script{.options = {.allocation_end = std::chrono::system_clock::time_point(200s)}, .steps = 8};
  script.clock = [](std::uint64_t step, int) { return 10s * static_cast<int>(step); };
  expect_decisions(2, script, {{8, "the end of the allocation"}});  // 80 s = 200 s - the default 120 s
  script.options.allocation_margin = 121s;
  EXPECT_FALSE(run_script(2, script)[0][6].stops());
  EXPECT_TRUE(run_script(2, script)[0][7].stops());
  script.options.allocation_margin = 130s;
  EXPECT_TRUE(run_script(2, script)[1][6].stops());
}

TEST(SaveRequests, NegativeDurationsAreRefused) {
  lab::group(1, [](Communicator& communicator) {
    for (const SaveRequestOptions& o :
         {SaveRequestOptions{.save_interval = -1s}, SaveRequestOptions{.allocation_margin = -1s}})
      EXPECT_EQ(error_of([&] { SaveRequests(communicator, o); }).code(), Errc::config);
  });
}

/// Sends SIGUSR1 to random ranks at random instants, then SIGTERM to one.
void send_signals(const std::vector<pid_t>& ranks, unsigned seed) {
  std::mt19937 random(seed);
  const auto send = [&](int signal) {
    std::this_thread::sleep_for(std::chrono::microseconds(random() % 20'000));
    ::kill(ranks[random() % ranks.size()], signal);
  };
  for (int i = 0; i < 20; ++i) send(SIGUSR1);
  send(SIGTERM);
}

TEST(SaveRequests, RealSignalsAtRandomInstantsAreDecidedAlike) {
  constexpr int ranks = 3;
  for (unsigned seed = 0; seed < 5; ++seed)
    test::expect_processes(ranks, [&](int rank, std::shared_ptr<Store> store) {
      SignalHandler handler;
      Communicator communicator = Communicator::connect(rank, ranks, store);
      std::vector<pid_t> pids(ranks);
      const pid_t own = ::getpid();
      communicator.all_gather(ConstBuffer(&own, 1), Buffer(pids.data(), pids.size())).wait();
      std::thread sender;
      if (rank == 0) sender = std::thread([&] { send_signals(pids, seed); });
      SaveRequests requests(communicator, {}, [&] { return handler.received(); });
      std::uint64_t saves = 0, steps = 0, hash = 0;
      for (SaveDecision d; !d.stops(); saves += d.saves()) {
        d = requests.decide(++steps);
        if (d.saves()) hash = hash * 31 + steps * 8 + static_cast<std::uint64_t>(d.reason);
      }
      if (sender.joinable()) sender.join();
      EXPECT_GE(saves, 2u);
      std::uint64_t max[] = {steps, saves, hash}, min[] = {steps, saves, hash};
      communicator.all_reduce(Buffer(max, 3), ReduceOp::max).wait();
      communicator.all_reduce(Buffer(min, 3), ReduceOp::min).wait();
      for (int i = 0; i < 3; ++i) EXPECT_EQ(max[i], min[i]);
    });
}

}  // namespace
}  // namespace rz
