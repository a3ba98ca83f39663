// Needs: rzrun_lib rz_bench rzrun all_reduce_perf sendrecv_perf

// The launcher, with real processes.

#include "tests/support/rzrun.h"

#include <gtest/gtest.h>
#include <poll.h>
#include <signal.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <map>
#include <set>
#include <sstream>
#include <thread>

#include "comm/core/deadline.h"
#include "comm/core/error.h"
#include "comm/net/socket.h"
#include "comm/topology.h"
#include "tests/support/program.h"
#include "tools/rzrun/flags/job.h"
#include "tools/rzrun/ranks/exit_status.h"
#include "tools/rzrun/ranks/launch.h"
#include "tools/rzrun/ranks/processes.h"

namespace rz {
namespace {

using test::child_of;
using test::content;
using test::Directory;
using test::lines;
using test::Program;
using test::rzrun;
using test::until;

TEST(Rzrun, PortsAreThoseThatTheEnvironmentPermits) {
  const UniqueFd busy = net::listen_tcp(net::resolve({"127.0.0.1", 0}).front());
  const int port = net::local_address(busy.get()).port();
  const auto run = [](int first, int last, const std::string& script) {
    std::vector<std::string> command = rzrun({"-n", "2"}, script);
    command.insert(command.begin(), {"env", "RZ_TRANSPORT=tcp", concat("RZ_PORTS=", first, "-", last)});
    return command;
  };
  // A range that is in use serves neither rzrun nor ranks.
  Program none(run(port, port, "true"));
  EXPECT_NE(none.wait(), 0);
  const std::string reason = concat("none of the ports RZ_PORTS=", port, "-", port, " is free");
  EXPECT_NE(none.err().find(reason), std::string::npos) << none.err();
  const int first = port > 40000 ? port - 20 : port + 1, last = first + 18;
  Program some(run(first, last,
                   concat("echo $MASTER_PORT; exec ", test::built("all_reduce_perf"), " -b 8 -e 8 -n 1")));
  EXPECT_EQ(some.wait(), 0) << some.err();
  const int chosen = std::stoi(lines(some.out()).at(0));
  EXPECT_GE(chosen, first);
  EXPECT_LE(chosen, last);
}

/// Ports of a job that has ended are in TIME_WAIT for a minute.
TEST(Rzrun, APortOfConnectionsThatHaveEndedIsFree) {
  UniqueFd listener = net::listen_tcp(net::resolve({"127.0.0.1", 0}).front());
  const net::SocketAddress at = net::local_address(listener.get());
  UniqueFd client = net::start_connect(at);
  pollfd comes{listener.get(), POLLIN, 0};
  ASSERT_EQ(::poll(&comes, 1, 10000), 1);
  UniqueFd server(::accept(listener.get(), nullptr, nullptr));
  ASSERT_TRUE(server);
  server.close();  // the end that closes first waits
  client.close();
  listener.close();
  const std::string ports = concat("RZ_PORTS=", at.port(), "-", at.port());
  Program p(rzrun({"-n", "1", "-x", ports}, "echo $MASTER_PORT $RZ_PORTS"), {{"RZ_PORTS", "1-1"}});
  EXPECT_EQ(p.wait(), 0) << p.err();
  EXPECT_EQ(p.out(), concat(at.port(), " ", at.port(), "-", at.port(), "\n"));
}

TEST(Rzrun, EveryRankGetsTorchrunsEnvironment) {
  Program p(
      rzrun({"-n", "3"},
            "echo $RANK $LOCAL_RANK $WORLD_SIZE $LOCAL_WORLD_SIZE $GROUP_RANK $ROLE_RANK $MASTER_ADDR "
            "$OMP_NUM_THREADS $TORCHELASTIC_RESTART_COUNT $MASTER_PORT $TORCHELASTIC_RUN_ID $RZ_LAUNCH"));
  EXPECT_EQ(p.wait(), 0) << p.err();
  std::set<std::string> ports_and_ids;
  std::set<int> ranks;
  for (const auto& line : lines(p.out())) {
    std::istringstream in(line);
    int rank, local_rank, port;
    std::string size, local_size, group, role, address, omp, restarts, id, launch;
    in >> rank >> local_rank >> size >> local_size >> group >> role >> address >> omp >> restarts >> port >>
        id >> launch;
    EXPECT_EQ(local_rank, rank);
    EXPECT_EQ(size + local_size + group + role, "330" + std::to_string(rank));
    EXPECT_EQ(address, "127.0.0.1");
    EXPECT_EQ(omp + restarts, "10");
    EXPECT_GT(port, 0);
    EXPECT_EQ(id.size(), 16u);
    EXPECT_EQ(launch, id);
    ranks.insert(rank);
    ports_and_ids.insert(std::to_string(port) + id);
  }
  EXPECT_EQ(ranks, (std::set<int>{0, 1, 2}));
  EXPECT_EQ(ports_and_ids.size(), 1u) << "the ranks disagree about port or run id";
}

/// The ranks read the secret from a descriptor. It is in no argument and no variable of a rank or of rzrun.
TEST(Rzrun, EveryRankGetsTheSecretOfItsJobInADescriptor) {
  const auto secrets_of = [] {
    Program p(rzrun({"-n", "2"},
                    "readlink /proc/self/fd/$RZ_SECRET_FD; "
                    "s=$(od -An -v -tx1 /proc/self/fd/$RZ_SECRET_FD | tr -d ' \\n'); echo $s; unset s; "
                    "tr '\\0' '\\n' </proc/$PPID/cmdline; env"));
    EXPECT_EQ(p.wait(), 0) << p.err();
    std::set<std::string> files, secrets;
    for (const auto& line : lines(p.out())) {
      const std::string text = line.substr(line.find("] ") == line.npos ? 0 : line.find("] ") + 2);
      if (text.starts_with("/memfd")) files.insert(text);
      if (text.size() == 64 && text.find_first_not_of("0123456789abcdef") == text.npos) secrets.insert(text);
    }
    EXPECT_EQ(files, std::set<std::string>{"/memfd:ringzero-secret (deleted)"}) << p.out();
    EXPECT_EQ(secrets.size(), 1u) << p.out();
    const std::string secret = secrets.empty() ? "" : *secrets.begin();
    std::size_t shown = 0;
    for (auto at = p.out().find(secret); at != std::string::npos; at = p.out().find(secret, at + 1)) ++shown;
    EXPECT_EQ(shown, 2u) << "beside the two of od";
    return secret;
  };
  EXPECT_NE(secrets_of(), secrets_of());
}

TEST(Rzrun, OmpNumThreadsIsLeftAloneIfSetOrAlone) {
  Program set(rzrun({"-n", "2"}, "echo $OMP_NUM_THREADS"), {{"OMP_NUM_THREADS", "3"}});
  EXPECT_EQ(set.wait(), 0);
  EXPECT_EQ(set.out(), "3\n3\n");
  Program alone(rzrun({"-n", "1"}, "echo ${OMP_NUM_THREADS-unset}"));
  EXPECT_EQ(alone.wait(), 0);
  EXPECT_EQ(alone.out(), "unset\n");
}

TEST(Rzrun, TheMasterPortIsFree) {
  Program p(rzrun({"-n", "1"},
                  "exec python3 -c 'import os, socket; "
                  "socket.create_server((os.environ[\"MASTER_ADDR\"], int(os.environ[\"MASTER_PORT\"])))'"));
  EXPECT_EQ(p.wait(), 0) << p.err();
}

TEST(Rzrun, AllRanksDoneIsSilentSuccess) {
  Program p(rzrun({"-n", "3"}, "exit 0"));
  EXPECT_EQ(p.wait(), 0);
  EXPECT_EQ(p.out() + p.err(), "");
}

TEST(Rzrun, TheFirstFailureIsNamedAndItsCodeReturned) {
  // Rank 2 fails; the others fail too when they are terminated.
  Directory folder;
  const std::string ready = folder / "ready";
  Program p(
      rzrun({"-n", "3"}, concat("[ $RANK = 2 ] && { ", until({ready + "0", ready + "1"}),
                                "exit 5; }; trap 'exit 9' TERM; : > ", ready, "$RANK; sleep 60 & wait")));
  EXPECT_EQ(p.wait(), 5);
  EXPECT_EQ(p.err(),
            "rzrun: after the first failure ranks 0, 1 exited with 9\n"
            "rzrun: first failure: rank 2 of 3 exited with 5\n");
}

TEST(Rzrun, ASignalIsNamed) {
  Program p(rzrun({"-n", "2"}, "[ $RANK = 1 ] && kill -USR1 $$; sleep 60"));
  EXPECT_EQ(p.wait(), 128 + SIGUSR1);
  EXPECT_NE(p.err().find("first failure: rank 1 of 2 killed by SIGUSR1"), std::string::npos) << p.err();
}

TEST(Rzrun, ARankThatIgnoresSigtermIsKilledAfterTheGracePeriod) {
  Directory folder;
  const std::string ready = folder / "ready";
  Program p(rzrun({"-n", "2", "--grace", "0.3"},
                  concat("[ $RANK = 1 ] && { ", until({ready}), "exit 4; }; trap '' TERM; echo pid $$; : > ",
                         ready, "; while :; do sleep 60; done")));
  p.wait_for("pid ");
  const pid_t stubborn = std::stoi(p.out().substr(p.out().find("pid ") + 4));
  EXPECT_EQ(p.wait(std::chrono::seconds(45)), 4);
  EXPECT_TRUE(test::gone(stubborn));
}

TEST(Rzrun, GrandchildrenEndToo) {
  // One in the rank's process group, one that left it.
  Directory folder;
  const std::string ready = folder / "ready";
  Program p(rzrun({"-n", "1", "--grace", "0.3"},
                  concat("sleep 61 & echo child $!; setsid sh -c 'echo child $$; : > ", ready,
                         "; exec sleep 62' & ", until({ready}), "exit 6")));
  EXPECT_EQ(p.wait(std::chrono::seconds(45)), 6);
  const auto all = lines(p.out());
  ASSERT_EQ(all.size(), 2u) << p.out();
  for (const auto& line : all) EXPECT_TRUE(test::gone(std::stoi(line.substr(6)))) << line;
}

TEST(Rzrun, LeftoverProcessesAreEnded) {
  Program p(rzrun({"-n", "1", "--prefix"}, "sleep 60 & echo $!"));
  EXPECT_EQ(p.wait(std::chrono::seconds(45)), 0);
  EXPECT_NE(p.err().find("left behind"), std::string::npos) << p.err();
  EXPECT_TRUE(test::gone(std::stoi(p.out().substr(4)))) << p.out();
}

TEST(Rzrun, CtrlCEndsEverything) {
  Program p(rzrun({"-n", "2"}, "echo up $$; exec sleep 60"));
  while (lines(p.out()).size() < 2) p.wait_for("up");
  p.signal(SIGINT);
  EXPECT_EQ(p.wait(std::chrono::seconds(45)), 128 + SIGINT);
  for (const auto& line : lines(p.out())) EXPECT_TRUE(test::gone(std::stoi(line.substr(3)))) << line;
  EXPECT_NE(p.err().find("SIGINT"), std::string::npos);
  EXPECT_EQ(p.err().find("first failure"), std::string::npos) << "no rank failed";
}

TEST(Rzrun, CtrlCTwiceKillsAtOnce) {
  Program p(rzrun({"-n", "1", "--grace", "3600"}, "trap '' TERM INT; echo up; while :; do sleep 60; done"));
  p.wait_for("up");
  p.signal(SIGINT);
  p.wait_for("rzrun: SIGINT");
  std::this_thread::sleep_for(std::chrono::milliseconds(1050));  // signals within a second are one
  p.signal(SIGINT);
  EXPECT_EQ(p.wait(std::chrono::seconds(45)), 128 + SIGINT);
  EXPECT_NE(p.err().find("rank 0 has not ended since SIGTERM: SIGKILL (SIGINT once more)"), std::string::npos)
      << p.err();
}

TEST(Rzrun, TheReasonIsPrintedByARankThatEndsLater) {
  // Rank 0 begins to print when rzrun has collected rank 1.
  Directory directory;
  const std::string pid = directory / "pid";
  for (const char* status : {"2", "7"}) {
    Program p(rzrun({"-n", "2"}, std::string("[ $RANK = 1 ] && { echo $$ > ") + pid + "; exit " + status +
                                     "; }; while [ ! -s " + pid + " ] || kill -0 $(cat " + pid +
                                     ") 2>&-; do sleep 0.02; done; echo the reason >&2; exit " + status));
    EXPECT_EQ(p.wait(), std::stoi(status));
    auto all = lines(p.err());
    std::ranges::sort(all);
    EXPECT_EQ(
        all, (std::vector<std::string>{std::string("rzrun: first failure: rank 1 of 2 exited with ") + status,
                                       "the reason"}));
    std::filesystem::remove(pid);
  }
}

TEST(Rzrun, SignalsEndItWhileItReadsTheTopology) {
  Directory directory;
  const std::string pipe = directory / "topology.xml";  // its reader waits for a writer
  ASSERT_EQ(::mkfifo(pipe.c_str(), 0600), 0);
  Program p(rzrun({"-n", "1"}, "exit 0"), {{"HWLOC_XMLFILE", pipe}});
  const auto waits = [&] {
    return std::ranges::any_of(rzrun::processes(), [&](const rzrun::Process& child) {
      return child.parent == p.pid() && content(concat("/proc/", child.pid, "/wchan")) == "wait_for_partner";
    });
  };
  const auto end = Deadline::after(std::chrono::seconds(30));
  while (!waits() && !end.expired()) std::this_thread::sleep_for(std::chrono::milliseconds(5));
  p.signal(SIGTERM);
  EXPECT_EQ(p.wait(std::chrono::seconds(45)), 128 + SIGTERM);
  EXPECT_EQ(p.err(), "");
}

TEST(Rzrun, RanksDieWithTheirLauncher) {
  Program p(rzrun({"-n", "1"}, "echo up $$; exec sleep 60"));
  p.wait_for("up");
  const pid_t rank = std::stoi(p.out().substr(3));
  p.signal(SIGKILL);
  EXPECT_EQ(p.wait(), 128 + SIGKILL);
  EXPECT_TRUE(test::gone(rank));
}

/// Ranks that ignore SIGTERM, with children in their group and in sessions of their own.
const char* const stubborn_families =
    "trap '' TERM; sleep 1001 & echo up $!; setsid sh -c 'sleep 1002 & echo up $!; wait' & echo up $$; wait";

TEST(Rzrun, NoProcessOutlivesAKillOfEitherOfItsProcesses) {
  for (const bool kills_keeper : {true, false}) {
    SCOPED_TRACE(kills_keeper);
    Program p(rzrun({"-n", "2", "--max-restarts", "2", "--grace", "2"}, stubborn_families));
    while (lines(p.out()).size() < 6) p.wait_for("up");
    ::kill(kills_keeper ? p.pid() : child_of(p.pid()), SIGKILL);
    EXPECT_EQ(p.wait(), 128 + SIGKILL);
    if (kills_keeper) p.wait_for("rzrun: SIGKILL: killing 2 ranks\n");
    EXPECT_EQ(lines(p.err()).size(), 1u) << p.err();
    for (const auto& line : lines(p.out())) EXPECT_TRUE(test::gone(std::stoi(line.substr(3)))) << line;
  }
}

TEST(Rzrun, ARankDiesWithBothOfItsProcesses) {
  Program p(rzrun({"-n", "1"}, "trap '' TERM; echo up $$; exec sleep 1003"));
  p.wait_for("up");
  const pid_t keeper = p.pid(), supervisor = child_of(keeper);
  for (const pid_t pid : {keeper, supervisor})
    ::kill(pid, SIGSTOP);  // so that none acts before both are gone
  for (const pid_t pid : {keeper, supervisor}) ::kill(pid, SIGKILL);
  EXPECT_EQ(p.wait(), 128 + SIGKILL);
  EXPECT_TRUE(test::gone(std::stoi(p.out().substr(3))));
}

TEST(Rzrun, AStopOfItsFirstProcessAloneDelaysItsStatus) {
  Directory folder;
  const std::string go = folder / "go";
  Program p(
      rzrun({"-n", "2"}, concat("echo up; until [ -e ", go, " ]; do sleep 0.05; done; echo end; exit 5")));
  p.wait_for("up");
  p.signal(SIGSTOP);
  const pid_t supervisor = child_of(p.pid());
  std::ofstream{go};
  p.wait_for("end");
  EXPECT_TRUE(test::gone(supervisor));
  EXPECT_TRUE(std::filesystem::exists(concat("/proc/", p.pid())));
  p.signal(SIGCONT);
  EXPECT_EQ(p.wait(), 5);
}

TEST(Rzrun, CtrlZStopsItAloneAndItsRanksGoOn) {
  if (!test::can_be_stopped_by_a_terminal())
    GTEST_SKIP() << "the kernel stops no orphaned group of processes";
  Directory folder;
  const std::string go = folder / "go";
  Program p(
      rzrun({"-n", "2"}, concat("echo up; until [ -e ", go, " ]; do sleep 0.05; done; echo end; exit 5")));
  p.wait_for("up");
  const auto ranks = ranks_of(p);
  p.signal(SIGTSTP);
  EXPECT_TRUE(test::stopped(p.pid()));
  EXPECT_TRUE(test::stopped(child_of(p.pid())));
  std::ofstream{go};
  for (const pid_t rank : ranks) EXPECT_TRUE(test::gone(rank));
  p.signal(SIGCONT);
  EXPECT_EQ(p.wait(), 5);
}

TEST(Rzrun, PrefixedLinesStayWhole) {
  // Long lines written in parts by several ranks at once, and a last one without its newline.
  constexpr int length = 30000;
  Program p(rzrun({"-n", "3", "--prefix"},
                  "i=0; while [ $i -lt 20 ]; do head -c 15000 /dev/zero | tr '\\0' $RANK; sleep 0.01; "
                  "head -c 15000 /dev/zero | tr '\\0' $RANK; echo; i=$((i+1)); done; printf end"));
  EXPECT_EQ(p.wait(), 0) << p.err();
  std::map<char, int> count;
  for (const auto& line : lines(p.out())) {
    ASSERT_EQ(line[0], '[');
    const char rank = line[1];
    ASSERT_EQ(line.substr(2, 2), "] ");
    if (line.substr(4) == "end") continue;
    ASSERT_EQ(line.substr(4), std::string(length, rank));
    ++count[rank];
  }
  EXPECT_EQ(count, (std::map<char, int>{{'0', 20}, {'1', 20}, {'2', 20}}));
  EXPECT_EQ(lines(p.out()).size(), 63u);
}

/// rzrun with these flags and this script, whose reader begins when the file exists; rzrun's standard error
/// is that of the program.
std::vector<std::string> with_a_late_reader(const std::string& flags, const std::string& script,
                                            const std::string& file) {
  return {"sh", "-c",
          "{ " + test::built("rzrun") + " " + flags + " sh -c '" + script + "'; echo status $? >&2; } | " +
              "{ while [ ! -e " + file + " ]; do sleep 0.02; done; cat; }"};
}

bool wait_for_file(const std::string& file) {
  const auto end = Deadline::after(std::chrono::seconds(30));
  while (content(file).empty() && !end.expired()) std::this_thread::sleep_for(std::chrono::milliseconds(5));
  return !content(file).empty();
}

std::string numbers(int count) {
  std::string text;
  for (int i = 1; i <= count; ++i) text += std::to_string(i) + "\n";
  return text;
}

TEST(Rzrun, ASlowReaderLosesNothing) {
  // Even ranks print 300,000 lines, and wait for the reader. Odd ranks get a signal by rzrun, and end: rzrun
  // supervises although nothing is read.
  const std::string expected = numbers(75'000);
  for (const bool tee : {false, true}) {
    Directory directory;
    const std::string pid = directory / "pid", read = directory / "read";
    Program p(with_a_late_reader("-n 8 " + (tee ? "--tee --log-dir " + directory.string() : "--prefix"),
                                 "case $RANK in [0246]) exec seq 1 75000; esac; trap \"exit 0\" USR1; "
                                 "[ $RANK = 1 ] && echo $PPID > " +
                                     pid + "; echo $$ > " + pid + "$RANK; while :; do :; done",
                                 read));
    for (const char* rank : {"1", "3", "5", "7"}) ASSERT_TRUE(wait_for_file(pid + rank));
    ::kill(std::stoi(content(pid)), SIGUSR1);
    for (const char* rank : {"1", "3", "5", "7"}) {
      const int odd = std::stoi(content(pid + rank));
      const auto end = Deadline::after(std::chrono::seconds(30));
      while (::kill(odd, 0) == 0 && !end.expired()) std::this_thread::sleep_for(std::chrono::milliseconds(5));
      EXPECT_NE(::kill(odd, 0), 0) << "rank " << rank << " has not been collected";
    }
    std::ofstream(read) << "now";
    EXPECT_EQ(p.wait(), 0);
    EXPECT_EQ(p.err(), "status 0\n");
    std::map<std::string, std::string> printed;
    std::istringstream in(p.out());
    for (std::string line; !tee && std::getline(in, line);)
      printed[line.substr(0, 4)].append(line, 4).push_back('\n');
    for (const std::string rank : {"0", "2", "4", "6"})
      EXPECT_TRUE((tee ? content(directory / ("rank" + rank + ".stdout")) : printed["[" + rank + "] "]) ==
                  expected)
          << rank;
    EXPECT_EQ(p.out().size(), 4 * (expected.size() + (tee ? 0u : 4u * 75'000u)));
  }
}

TEST(Rzrun, WhatNobodyReadsIsCounted) {
  Directory directory;
  const std::string printed = directory / "printed", read = directory / "read";
  Program p(with_a_late_reader("-n 1 --prefix --grace 0.2",
                               "seq 1 30000; echo $PPID > " + printed + "; exec sleep 60", read));
  ASSERT_TRUE(wait_for_file(printed));
  ::kill(std::stoi(content(printed)), SIGTERM);
  p.wait_for("status 143");
  std::ofstream(read) << "now";
  EXPECT_EQ(p.wait(), 0);
  const std::string out = p.out();
  const std::size_t size = numbers(30'000).size() + 4 * 30'000;
  const auto lines_read = static_cast<std::size_t>(std::ranges::count(out, '\n'));
  EXPECT_EQ(p.err(), "rzrun: SIGTERM: ending 1 ranks (once more kills them at once)\nrzrun: SIGTERM: " +
                         std::to_string(size - out.size()) + " bytes (" +
                         std::to_string(30'000 - lines_read) +
                         " lines) of output are dropped, since nothing reads them\nstatus 143\n");
}

TEST(Rzrun, StandardDescriptorsMayBeClosed) {
  // No pipe of rzrun takes their place, in it or in its ranks: what is printed there is lost.
  Directory directory;
  for (const char* flag : {"", "--prefix"}) {
    const std::string file = directory / "descriptors";
    Program p({"sh", "-c",
               "exec " + test::built("rzrun") + " -n 2 " + flag +
                   " sh -c 'echo lost; echo lost >&2; echo $(" +
                   (*flag ? "echo pipe" : "readlink /proc/$$/fd/1") + ") >> " + file +
                   "; exit $((RANK * 3))' <&- >&- 2>&-"});
    EXPECT_EQ(p.wait(), 3);
    EXPECT_EQ(content(file), *flag ? "pipe\npipe\n" : "/dev/null\n/dev/null\n");
    std::filesystem::remove(file);
  }
}

TEST(Rzrun, AFullDiskIsReported) {
  Program p({"sh", "-c", test::built("rzrun") + " -n 1 --prefix echo text > /dev/full"});
  EXPECT_EQ(p.wait(), 0);
  EXPECT_EQ(p.err(), "rzrun: standard output: No space left on device; the ranks' output is not printed\n");
}

TEST(Rzrun, LogFilesInsteadOfTheConsole) {
  Directory directory;
  Program p(rzrun({"-n", "2", "--log-dir", directory / "deep/logs"},
                  "echo out $RANK; echo err $RANK >&2; exit $RANK"));
  EXPECT_EQ(p.wait(), 1);
  EXPECT_EQ(p.out(), "");
  EXPECT_EQ(content(directory / "deep/logs/rank0.stdout"), "out 0\n");
  EXPECT_EQ(content(directory / "deep/logs/rank1.stderr"), "err 1\n");
  EXPECT_NE(p.err().find("its log: " + (directory / "deep/logs/rank1.stderr")), std::string::npos) << p.err();
}

TEST(Rzrun, ALogFolderHasNoFileOfAnEarlierJob) {
  Directory directory;
  Program before(
      rzrun({"-n", "3", "--max-restarts", "1", "--log-dir", directory.string()}, "echo old; exit 3"));
  EXPECT_EQ(before.wait(), 3);
  EXPECT_EQ(content(directory / "restart1/rank2.stdout"), "old\n");
  std::filesystem::create_directory(directory / "restart2");
  for (const char* own : {"notes", "rank7.txt", "rank.stdout", "restart2/notes"})
    std::ofstream(directory / own) << "the user's";
  Program p(rzrun({"--nproc-per-node", "2", "--log-dir", directory.string(), "-r", "1"}, "echo new"));
  EXPECT_EQ(p.wait(), 0) << p.err();
  std::set<std::string> found;
  for (const auto& entry : std::filesystem::recursive_directory_iterator(directory.string()))
    found.insert(std::filesystem::relative(entry.path(), directory.string()));
  EXPECT_EQ(found, (std::set<std::string>{"notes", "rank.stdout", "rank0.stdout", "rank1.stdout", "rank7.txt",
                                          "restart2", "restart2/notes"}));
}

TEST(Rzrun, TeeWritesBoth) {
  Directory directory;
  Program p(
      rzrun({"-n", "2", "--log-dir", directory.string(), "--tee", "--prefix"}, "echo out; echo err >&2"));
  EXPECT_EQ(p.wait(), 0);
  EXPECT_EQ(content(directory / "rank0.stdout"), "out\n");
  EXPECT_EQ(content(directory / "rank1.stderr"), "err\n");
  const auto all = lines(p.out());
  EXPECT_EQ(std::set<std::string>(all.begin(), all.end()), (std::set<std::string>{"[0] out", "[1] out"}));
  EXPECT_NE(p.err().find("[1] err\n"), std::string::npos);
}

TEST(Rzrun, ARankMayCloseItsOutput) {
  Program p(rzrun({"-n", "2", "--prefix"}, "exec >&- 2>&-; sleep 0.2; exit $((RANK * 3))"));
  EXPECT_EQ(p.wait(), 3);
}

TEST(Rzrun, OnlyRankZeroReadsStandardInput) {
  Program p({"sh", "-c", "echo hello | " + test::built("rzrun") + " -n 2 --prefix cat"});
  EXPECT_EQ(p.wait(), 0);
  EXPECT_EQ(p.out(), "[0] hello\n");
}

std::string affinity_of(const std::string& status) {
  for (const auto& line : lines(status))
    if (line.starts_with("Cpus_allowed:")) return line;
  return "";
}

TEST(Rzrun, BindsRanksToProcessorsOfTheirOwn) {
  Program bound(rzrun({"-n", "2", "--prefix"}, "grep Cpus_allowed: /proc/self/status"));
  EXPECT_EQ(bound.wait(), 0);
  auto masks = lines(bound.out());
  ASSERT_EQ(masks.size(), 2u);
  std::ranges::sort(masks);
  for (int rank = 0; rank < 2; ++rank) {
    unsigned long long expected = 0;
    for (int p : processors_for(rank, 2)) expected |= p < 32 ? 1ull << p : 0;
    const auto digits = masks[rank].substr(masks[rank].find_last_of("\t,") + 1);  // the lowest 32 processors
    EXPECT_EQ(std::stoull(digits, nullptr, 16), expected) << masks[rank];
  }
}

TEST(Rzrun, BindingCanBeTurnedOff) {
  Program free(rzrun({"-n", "2", "--bind", "none"}, "grep Cpus_allowed: /proc/self/status"));
  EXPECT_EQ(free.wait(), 0);
  const std::string own = affinity_of(content("/proc/self/status"));
  EXPECT_EQ(lines(free.out()), (std::vector<std::string>{own, own}));
}

TEST(Rzrun, AProgramThatCannotStart) {
  Program missing({test::built("rzrun"), "-n", "2", "/no/such/program"});
  EXPECT_EQ(missing.wait(), 127);
  EXPECT_EQ(missing.err(), "rzrun: cannot start '/no/such/program': No such file or directory\n");
  Program folder({test::built("rzrun"), "-n", "1", "/tmp"});
  EXPECT_EQ(folder.wait(), 126);
}

struct BadLine {
  std::vector<std::string> flags;
  std::string expected;
};

TEST(Rzrun, AWrongCommandLineIsOneLineAndTwo) {
  for (const auto& bad : std::vector<BadLine>{{{"-n", "0", "true"}, "at least 1"},
                                              {{"-n", "-3", "true"}, "at least 1"},
                                              {{"-n", "two", "true"}, "two"},
                                              {{"true"}, "give -n N, such as -n "},
                                              {{"-n", "2"}, "no program"},
                                              {{"-n", "2", "--prefx", "true"}, "did you mean --prefix?"},
                                              {{"-n", "2", "--bind", "socket", "true"}, "bind"},
                                              {{"-n", "2", "--tee", "true"}, "--log-dir"},
                                              {{"-n", "2", "--max-restarts", "-1", "true"}, "max-restarts"},
                                              {{"-n", "2", "--grace", "-1", "true"}, "grace"}}) {
    std::vector<std::string> command{test::built("rzrun")};
    command.insert(command.end(), bad.flags.begin(), bad.flags.end());
    Program p(command);
    EXPECT_EQ(p.wait(), 2) << p.err();
    EXPECT_EQ(lines(p.err()).size(), 1u) << p.err();
    EXPECT_NE(p.err().find(bad.expected), std::string::npos) << p.err();
    EXPECT_EQ(p.out(), "");
  }
}

TEST(Rzrun, ArgumentsAfterTheProgramArePassedOn) {
  Program p({test::built("rzrun"), "-n", "1", "echo", "-n", "--prefix", "--help"});
  EXPECT_EQ(p.wait(), 0);
  EXPECT_EQ(p.out(), "--prefix --help");
}

TEST(RzrunExitStatus, IsDescribed) {
  EXPECT_EQ(rzrun::describe({3, 0, false}), "exited with 3");
  EXPECT_EQ(rzrun::describe({0, SIGSEGV, true}), "killed by SIGSEGV (Segmentation fault), core dumped");
  EXPECT_EQ((rzrun::ExitStatus{0, SIGKILL, false}.shell_status()), 137);
}

}  // namespace
}  // namespace rz
