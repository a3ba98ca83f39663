// Needs: rzrun_lib rz_bench rzrun all_reduce_perf sendrecv_perf

// rzrun --max-restarts, with real processes.

#include <gtest/gtest.h>
#include <signal.h>
#include <sys/wait.h>

#include <chrono>
#include <fstream>
#include <map>
#include <random>
#include <set>
#include <sstream>
#include <thread>

#include "tests/support/rzrun.h"
#include "tools/rzrun/ranks/restart_policy.h"

namespace rz {
namespace {

using namespace std::chrono_literals;
using test::content;
using test::Folder;
using test::lines;
using test::Program;
using test::ranks_of;
using test::rzrun;
using test::until;

std::size_t count(const std::string& text, const std::string& part) {
  std::size_t n = 0;
  for (std::size_t at = 0; (at = text.find(part, at)) != std::string::npos; at += part.size()) ++n;
  return n;
}

TEST(RzrunRestart, AGroupThatFailsIsStartedAgain) {
  Program p(rzrun({"-n", "2", "--max-restarts", "3"},
                  "[ $TORCHELASTIC_RESTART_COUNT = 2 ] && exit 0; [ $RANK = 1 ] && kill -KILL $$; sleep 60"));
  EXPECT_EQ(p.wait(), 0);
  EXPECT_EQ(p.err(),
            "rzrun: first failure: rank 1 of 2 killed by SIGKILL (Killed); restart 1 of 3 in 0.1 s\n"
            "rzrun: first failure: rank 1 of 2 killed by SIGKILL (Killed); restart 2 of 3 in 0.2 s\n");
}

TEST(RzrunRestart, TheFailureAfterTheLastRestartIsReported) {
  Program p(rzrun({"-n", "2", "--max-restarts", "1"},
                  "[ $RANK = $TORCHELASTIC_RESTART_COUNT ] && exit $((5 + RANK)); sleep 60"));
  EXPECT_EQ(p.wait(), 6);
  EXPECT_EQ(p.err(),
            "rzrun: first failure: rank 0 of 2 exited with 5; restart 1 of 1 in 0.1 s\n"
            "rzrun: first failure: rank 1 of 2 exited with 6; no restart is left after 1 of 1\n");
}

TEST(RzrunRestart, EveryGroupHasALaunchOfItsOwnInTheSameRun) {
  Program p(rzrun({"-n", "2", "--max-restarts", "2"},
                  "echo $TORCHELASTIC_RUN_ID $TORCHELASTIC_MAX_RESTARTS $TORCHELASTIC_RESTART_COUNT "
                  "$RZ_LAUNCH $MASTER_PORT; sleep 0.3; exit 3"));
  EXPECT_EQ(p.wait(), 3);
  std::set<std::string> runs;
  std::map<int, std::set<std::string>> launches;  // by the number of restarts
  for (const auto& line : lines(p.out())) {
    std::string run, max, launch, port;
    int restarts = -1;
    std::istringstream(line) >> run >> max >> restarts >> launch >> port;
    EXPECT_EQ(max, "2");
    runs.insert(run);
    launches[restarts].insert(launch + " " + port);
  }
  EXPECT_EQ(runs.size(), 1u);
  ASSERT_EQ(launches.size(), 3u) << p.out();
  std::set<std::string> different;
  for (const auto& [restarts, group] : launches) {
    EXPECT_EQ(group.size(), 1u) << "the ranks disagree after restart " << restarts;
    different.insert(group.begin()->substr(0, 16));
  }
  EXPECT_EQ(different.size(), 3u) << "a rank of an earlier group could connect";
}

TEST(RzrunRestart, WrongInputAndRequestedEndsAreFinal) {
  for (int status : {2, 126, 127, 130, 143}) {
    Program p(rzrun({"-n", "1", "--max-restarts", "3"}, "exit " + std::to_string(status)));
    EXPECT_EQ(p.wait(), status);
    ASSERT_EQ(lines(p.err()).size(), 1u) << p.err();
    EXPECT_NE(p.err().find("; no restart: "), std::string::npos) << p.err();
  }
}

TEST(RzrunRestart, AProgramThatCannotStartIsFinal) {
  Program p({test::built("rzrun"), "-n", "2", "--max-restarts", "3", "/no/such/program"});
  EXPECT_EQ(p.wait(), 127);
  EXPECT_EQ(lines(p.err()).size(), 1u) << p.err();
}

TEST(RzrunRestart, ASignalToRzrunEndsTheJob) {
  for (int signal : {SIGINT, SIGTERM}) {
    Program p(rzrun({"-n", "2", "--max-restarts", "3"}, "echo up; exec sleep 60"));
    while (lines(p.out()).size() < 2) p.wait_for("up");
    p.signal(signal);
    EXPECT_EQ(p.wait(45s), 128 + signal);
    EXPECT_EQ(count(p.err(), "restart"), 0u) << p.err();
  }
}

TEST(RzrunRestart, ASignalWhileAGroupIsBeingEndedEndsTheJob) {
  Folder directory;
  const std::string ready = directory / "ready", end = directory / "end";
  Program p(rzrun({"-n", "2", "--max-restarts", "3", "--grace", "300"},
                  "echo up $TORCHELASTIC_RESTART_COUNT; [ $RANK = 1 ] && { " + until({ready}) +
                      "exit 5; }; trap '' TERM; : > " + ready + "; " + until({end})));
  p.wait_for("rzrun: a rank has failed; rank 0 has got SIGTERM");
  p.signal(SIGTERM);
  p.wait_for("rzrun: SIGTERM");
  std::ofstream(end) << "";
  EXPECT_EQ(p.wait(45s), 128 + SIGTERM);
  EXPECT_EQ(count(p.out(), "up 1"), 0u) << p.out();
}

TEST(RzrunRestart, ASignalBeforeARestartEndsTheJob) {
  Program p(rzrun({"-n", "1", "--max-restarts", "9"}, "echo up $TORCHELASTIC_RESTART_COUNT; exit 5"));
  p.wait_for("; restart 5 of 9 in 1.6 s");
  p.signal(SIGTERM);
  EXPECT_EQ(p.wait(45s), 128 + SIGTERM);
  EXPECT_EQ(count(p.out(), "up 5"), 0u) << p.out();
}

TEST(RzrunRestart, NoProcessOfAGroupLivesWhenTheNextStarts) {
  // A rank that ignores SIGTERM, and a child that left its process group.
  Folder directory;
  const std::string pids = directory / "pids", ready = directory / "ready";
  Program p(rzrun({"-n", "2", "--max-restarts", "1", "--grace", "0.3"},
                  "if [ $TORCHELASTIC_RESTART_COUNT = 1 ]; then for p in $(cat " + pids +
                      "); do kill -0 $p 2>&- && echo $p lives; done; exit 0; fi; "
                      "[ $RANK = 1 ] && { " +
                      until({ready}) + "exit 5; }; trap '' TERM; echo $$ >> " + pids +
                      "; setsid sh -c 'echo $$ >> " + pids + "; : > " + ready +
                      "; exec sleep 61' & while :; do sleep 62; done"));
  EXPECT_EQ(p.wait(), 0) << p.err();
  EXPECT_EQ(lines(content(pids)).size(), 2u);
  EXPECT_EQ(p.out(), "");
  EXPECT_NE(p.err().find("rank 0 has not ended since SIGTERM: SIGKILL (--grace 0.3 s)"), std::string::npos)
      << p.err();
}

TEST(RzrunRestart, AnOrphanOfAGroupEndsBeforeTheNextStarts) {
  // It left its process group and ignores SIGTERM, which ends its rank.
  Folder directory;
  const std::string pid = directory / "pid", left = directory / "left", ready = directory / "ready";
  Program p(rzrun({"-n", "2", "--max-restarts", "1", "--grace", "0.5"},
                  "if [ $TORCHELASTIC_RESTART_COUNT = 1 ]; then kill -0 $(cat " + pid +
                      ") 2>&- && echo lives; exit 0; fi; [ $RANK = 1 ] && { " + until({ready}) +
                      "exit 5; }; (trap '' TERM; exec setsid sh -c ': > " + left +
                      "; exec sleep 61') & echo $! > " + pid + "; " + until({left}) + ": > " + ready +
                      "; exec sleep 62"));
  EXPECT_EQ(p.wait(), 0) << p.err();
  EXPECT_EQ(lines(content(pid)).size(), 1u);
  EXPECT_EQ(p.out(), "");
}

TEST(RzrunRestart, RestartedRanksDieWithTheirLauncher) {
  Program p(rzrun({"-n", "2", "--max-restarts", "1"},
                  "[ $TORCHELASTIC_RESTART_COUNT = 0 ] && exit 5; echo up $$; exec sleep 60"));
  while (count(p.out(), "up") < 2) p.wait_for("up");
  p.signal(SIGKILL);
  EXPECT_EQ(p.wait(), 128 + SIGKILL);
  for (const auto& line : lines(p.out())) EXPECT_TRUE(test::gone(std::stoi(line.substr(3)))) << line;
}

TEST(RzrunRestart, EveryGroupHasLogFilesOfItsOwn) {
  Folder directory;
  Program p(rzrun({"-n", "2", "--max-restarts", "1", "--log-dir", directory.path(), "--tee", "--prefix"},
                  "done=" + (directory / "done") +
                      "$TORCHELASTIC_RESTART_COUNT; echo group $TORCHELASTIC_RESTART_COUNT; "
                      "[ $RANK = 0 ] && : > $done; " +
                      until({"$done"}) + "exit $((RANK * 3))"));
  EXPECT_EQ(p.wait(), 3);
  EXPECT_EQ(content(directory / "rank0.stdout"), "group 0\n");
  EXPECT_EQ(content(directory / "restart1/rank1.stdout"), "group 1\n");
  EXPECT_EQ(count(p.out(), "[0] group 1\n"), 1u) << p.out();
  const auto errors = lines(p.err());
  ASSERT_EQ(errors.size(), 2u);
  EXPECT_TRUE(errors[0].ends_with("its log: " + (directory / "rank1.stderr"))) << errors[0];
  EXPECT_TRUE(errors[1].ends_with("its log: " + (directory / "restart1/rank1.stderr"))) << errors[1];
}

/// Kills a random rank at a random instant of the group's start or of its communication.
void kill_one(const Program& p, std::mt19937& random) {
  while (ranks_of(p).empty()) std::this_thread::sleep_for(1ms);
  std::this_thread::sleep_for(std::chrono::microseconds(random() % 300'000));
  const auto ranks = ranks_of(p);
  ASSERT_FALSE(ranks.empty()) << p.err();
  ASSERT_EQ(::kill(ranks[random() % ranks.size()], SIGKILL), 0);
}

TEST(RzrunRestart, KillsOfRandomRanksAtRandomInstantsAreCounted) {
  std::mt19937 random(17);
  for (int run = 0; run < 6; ++run) {
    SCOPED_TRACE(run);
    Folder directory;
    Program p(rzrun({"-n", "3", "--max-restarts", "3"},
                    "echo group $TORCHELASTIC_RESTART_COUNT; " + test::built("all_reduce_perf") +
                        " -b 8 -e 64K -n 200 -w 20 || exit 1; " + until({directory / "done"})));
    for (std::size_t kills = 1; kills <= 3; ++kills) {
      p.wait_for("group " + std::to_string(kills - 1));  // the one before has ended
      kill_one(p, random);
      p.wait_for("; restart " + std::to_string(kills) + " of 3");
    }
    std::ofstream(directory / "done") << "";
    EXPECT_EQ(p.wait(), 0) << p.err();
    EXPECT_EQ(count(p.err(), "; restart "), 3u) << p.err();
    EXPECT_EQ(count(p.err(), "rzrun: first failure: rank "), 3u) << p.err();
    EXPECT_TRUE(ranks_of(p).empty());
  }
}

TEST(RestartPolicy, PausesGrowWhileGroupsFailEarly) {
  rzrun::RestartPolicy policy(100);
  const rzrun::ExitStatus killed{0, SIGKILL, false};
  for (int ms : {100, 200, 400, 800, 1600, 3200, 6400, 10000, 10000})
    EXPECT_EQ(policy.next(killed, 9s), 1ms * ms);
  EXPECT_EQ(policy.next(killed, 10s), 0ms);
  EXPECT_EQ(policy.next(killed, 9s), 100ms);
  EXPECT_EQ(policy.restarts(), 11);
}

TEST(RestartPolicy, AllowsThatManyRestarts) {
  rzrun::RestartPolicy none(0), two(2);
  EXPECT_FALSE(none.next({1, 0, false}, 1h));
  EXPECT_TRUE(two.next({1, 0, false}, 1h));
  EXPECT_FALSE(two.next({2, 0, false}, 1h)) << "wrong input";
  EXPECT_TRUE(two.next({0, SIGTERM, false}, 1h)) << "killed, not ended by itself";
  EXPECT_FALSE(two.next({1, 0, false}, 1h));
  EXPECT_EQ(two.restarts(), 2);
}

}  // namespace
}  // namespace rz
