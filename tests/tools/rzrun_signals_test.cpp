// Needs: rzrun_lib rz_bench rzrun all_reduce_perf sendrecv_perf

// Signals to rzrun that its ranks handle.

#include <gtest/gtest.h>
#include <signal.h>

#include <algorithm>
#include <chrono>
#include <fstream>

#include "tests/support/rzrun.h"

namespace rz {
namespace {

using namespace std::chrono_literals;
using test::Folder;
using test::lines;
using test::Program;
using test::rzrun;

std::size_t count_lines(const std::string& text, const std::string& line) {
  const auto all = lines(text);
  return static_cast<std::size_t>(std::count(all.begin(), all.end(), line));
}

TEST(RzrunSignals, Usr1And2AreForwardedToRanksThatHandleThem) {
  // Rank 2 has no handler, which would end it. The ranks wait without children: those of a shell have its
  // handler until they execute another program.
  for (const auto& [name, signal] : {std::pair("USR1", SIGUSR1), std::pair("USR2", SIGUSR2)}) {
    Folder directory;
    const std::string done = directory / "done";
    Program p(rzrun({"-n", "3"}, std::string("[ $RANK = 2 ] || trap 'echo got' ") + name +
                                     "; echo up; while [ ! -e " + done + " ]; do :; done"));
    while (count_lines(p.out(), "up") < 3) p.wait_for("up");
    p.signal(signal);
    while (count_lines(p.out(), "got") < 2) p.wait_for("got");
    const int other = signal == SIGUSR1 ? SIGUSR2 : SIGUSR1;
    p.signal(signal);  // within a second: the same request
    p.signal(other);
    p.wait_for("not forwarded");
    std::ofstream(done) << "";
    EXPECT_EQ(p.wait(), 0) << p.err();
    EXPECT_EQ(count_lines(p.out(), "got"), 2u);
    EXPECT_EQ(p.err(), std::string("rzrun: SIGUSR") + (other == SIGUSR1 ? "1" : "2") +
                           ": not forwarded, since no rank has a handler for it\n");
  }
}

TEST(RzrunSignals, Usr1WithoutAHandlerChangesNothing) {
  Folder directory;
  const std::string done = directory / "done";
  Program p(rzrun({"-n", "1"}, "echo up; while [ ! -e " + done + " ]; do sleep 0.02; done; exit 4"));
  p.wait_for("up");
  p.signal(SIGUSR1);
  p.wait_for("SIGUSR1: not forwarded, since no rank has a handler for it");
  std::ofstream(done) << "";
  EXPECT_EQ(p.wait(), 4);
}

TEST(RzrunSignals, RanksThatSaveAtSigtermHaveTheGracePeriod) {
  Program p(rzrun({"-n", "2", "--max-restarts", "3"},
                  "trap 'sleep 0.5; echo saved; exit 143' TERM; echo up; while :; do sleep 0.02; done"));
  while (count_lines(p.out(), "up") < 2) p.wait_for("up");
  p.signal(SIGTERM);
  EXPECT_EQ(p.wait(45s), 143);
  EXPECT_EQ(count_lines(p.out(), "saved"), 2u);
  EXPECT_EQ(count_lines(p.err(), "rzrun: SIGTERM: ending 2 ranks (once more kills them at once)"), 1u);
  EXPECT_EQ(p.err().find("restart"), std::string::npos) << p.err();
  EXPECT_EQ(p.err().find("SIGKILL"), std::string::npos) << p.err();
}

TEST(RzrunSignals, SignalsWithinASecondAreOne) {
  // As timeout(1) sends them, and a terminal that closes.
  for (const auto& [first, second] :
       {std::pair(SIGTERM, SIGTERM), std::pair(SIGHUP, SIGTERM), std::pair(SIGQUIT, SIGINT)}) {
    Program p(rzrun({"-n", "2"},
                    "trap 'sleep 0.3; echo saved; exit 143' TERM; echo up; while :; do sleep 0.02; done"));
    while (count_lines(p.out(), "up") < 2) p.wait_for("up");
    p.signal(first);
    p.wait_for("ending 2 ranks");
    p.signal(second);
    EXPECT_EQ(p.wait(45s), 128 + first);
    EXPECT_EQ(count_lines(p.out(), "saved"), 2u);
    const auto all = lines(p.err());  // a shell prints "Terminated" for its sleep
    EXPECT_EQ(std::ranges::count_if(all, [](const auto& line) { return line.starts_with("rzrun:"); }), 1)
        << p.err();
  }
}

TEST(RzrunSignals, ARankThatIsKilledAfterTheGracePeriodIsNamed) {
  Program p(rzrun({"-n", "2", "--grace", "0.2"},
                  "[ $RANK = 1 ] || trap '' TERM; echo up; while :; do sleep 60; done"));
  while (count_lines(p.out(), "up") < 2) p.wait_for("up");
  p.signal(SIGTERM);
  EXPECT_EQ(p.wait(45s), 143);
  EXPECT_NE(p.err().find("rank 0 has not ended since SIGTERM: SIGKILL (--grace 0.2 s)"), std::string::npos)
      << p.err();
}

}  // namespace
}  // namespace rz
