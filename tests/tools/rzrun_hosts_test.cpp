// Needs: rzrun_lib rz_bench rzrun all_reduce_perf sendrecv_perf

// The launcher over several hosts, with real processes. A stand-in for ssh starts each agent under a host
// name of its own; in network namespaces, if they are permitted.

#include <gtest/gtest.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <filesystem>
#include <fstream>
#include <thread>

#include "comm/net/socket.h"
#include "tests/support/fuzz.h"
#include "tests/support/program.h"
#include "tests/support/rzrun.h"
#include "tools/rzrun/agents/agent_starter.h"
#include "tools/rzrun/agents/frames.h"
#include "tools/rzrun/agents/join_request.h"
#include "tools/rzrun/flags/flags.h"
#include "tools/rzrun/ranks/launch.h"
#include "tools/rzrun/ranks/processes.h"

namespace rz {
namespace {

using test::child_of;
using test::content;
using test::Directory;
using test::lines;
using test::Program;

constexpr std::chrono::seconds soon{45};

/// A stand-in for ssh, and hostfiles.
class RzrunHosts : public testing::Test {
 protected:
  void SetUp() override {
    if (std::system("unshare -u true 2>/dev/null") != 0)
      GTEST_SKIP() << "no namespace of host names is permitted here (needs root or user namespaces)";
    write("rsh",
          "#!/bin/sh\nhost=$1; shift\necho $$ $host >> \"${0%/*}/connectors\"\n"
          "exec unshare -u sh -c \"hostname $host; $*\"\n");
    write("hosts", "n0 slots=2\nn1 slots=2\n");
  }

  void write(const std::string& name, const std::string& text) {
    std::ofstream(folder_ / name) << text;
    std::filesystem::permissions(folder_ / name, std::filesystem::perms::owner_all);
  }

  std::vector<std::string> command(std::vector<std::string> flags, const std::string& script) {
    std::vector<std::string> all{"--hostfile", folder_ / "hosts", "--rsh", folder_ / "rsh"};
    all.insert(all.end(), flags.begin(), flags.end());
    return test::rzrun(all, script);
  }

  /// The processes that run the agents of this rzrun.
  std::vector<pid_t> connectors() const {
    std::vector<pid_t> found;
    for (const auto& line : lines(content(folder_ / "connectors"))) found.push_back(std::stoi(line));
    return found;
  }

  /// The process that runs the agent of a host: the agents start at once, in no order.
  pid_t connector_of(const std::string& host) const {
    for (const auto& line : lines(content(folder_ / "connectors")))
      if (line.ends_with(" " + host)) return std::stoi(line);
    throw std::runtime_error("no agent of " + host);
  }

  /// Waits for the ranks to print "up PID", and returns the ids.
  static std::vector<pid_t> wait_for_ranks(const Program& p, std::size_t count) {
    std::vector<pid_t> found;
    const auto end = Deadline::after(soon);
    while (found.size() < count && !end.expired()) {
      found.clear();
      for (const auto& line : lines(p.out()))
        if (const auto at = line.find("up "); at != std::string::npos)
          found.push_back(std::stoi(line.substr(at + 3)));
      std::this_thread::sleep_for(std::chrono::milliseconds(10));
    }
    EXPECT_EQ(found.size(), count) << p.out() << p.err();
    return found;
  }

  void expect_gone(const std::vector<pid_t>& processes) {
    for (const pid_t p : processes) EXPECT_TRUE(test::gone(p)) << p;
    for (const pid_t p : connectors()) EXPECT_TRUE(test::gone(p)) << "connector " << p;
  }

  Directory folder_;
};

TEST_F(RzrunHosts, EveryRankGetsTorchrunsEnvironment) {
  Program p(command({},
                    "echo $(hostname) $RANK $LOCAL_RANK $WORLD_SIZE $LOCAL_WORLD_SIZE $GROUP_RANK "
                    "$GROUP_WORLD_SIZE $ROLE_RANK \"$FROM_HERE\" ${CUDA_VISIBLE_DEVICES-none}; "
                    "echo to stderr >&2"),
            {{"FROM_HERE", "it's \"$HOME\"\nhere"}});
  EXPECT_EQ(p.wait(), 0) << p.err();
  auto all = lines(p.out());
  std::ranges::sort(all);
  std::vector<std::string> expected;
  for (int r = 0; r < 4; ++r) {
    const std::string before = concat("[n", r / 2, ":", r, "] ");
    expected.push_back(
        concat(before, "n", r / 2, " ", r, " ", r % 2, " 4 2 ", r / 2, " 2 ", r, " it's \"$HOME\""));
    expected.push_back(concat(before, "here none"));
  }
  std::ranges::sort(expected);
  EXPECT_EQ(all, expected);
  EXPECT_NE(p.err().find("[n1:3] to stderr\n"), std::string::npos) << p.err();
}

/// ssh hands no variable on.
TEST_F(RzrunHosts, TheMasterPortIsOneOfRzPorts) {
  write("rsh", "#!/bin/sh\nhost=$1; shift\nunset RZ_PORTS\nexec unshare -u sh -c \"hostname $host; $*\"\n");
  const int first = 20000 + static_cast<int>(::getpid() % 10000);
  Program p(
      command({"--max-restarts", "1"}, "echo $MASTER_PORT; exit $((4 - $TORCHELASTIC_RESTART_COUNT * 4))"),
      {{"RZ_PORTS", concat(first, "-", first + 20)}});
  EXPECT_EQ(p.wait(), 0) << p.err();
  EXPECT_EQ(lines(p.out()).size(), 8u);
  for (const auto& line : lines(p.out())) {
    const int port = std::stoi(line.substr(line.find(' ') + 1));
    EXPECT_TRUE(first <= port && port <= first + 20) << line;
  }
}

TEST_F(RzrunHosts, AHostWithoutAFreePortIsNotLost) {
  UniqueFd busy = net::listen_tcp(net::resolve({"0.0.0.0", 0}).front());
  const int port = net::local_address(busy.get()).port();
  Program p(command({}, "true"), {{"RZ_PORTS", concat(port, "-", port)}});
  EXPECT_EQ(p.wait(), 2);
  EXPECT_EQ(p.err(), concat("rzrun: host n0: none of the ports RZ_PORTS=", port, "-", port,
                            " is free; give more of them\n"));
}

TEST_F(RzrunHosts, AWrongVariableIsRefusedBeforeAnAgentStarts) {
  for (const auto& [name, value] : Program::Variables{{"RZ_PORTS", "banana"},
                                                      {"RZ_TIMEOUT_S", "abc"},
                                                      {"RZ_TIMEOUT", "3"},
                                                      {"RZ_ENCRYPTION", "maybe"}}) {
    Program p(command({}, "true"), {{name, value}});
    EXPECT_EQ(p.wait(), 2) << name;
    ASSERT_EQ(lines(p.err()).size(), 1u) << p.err();
    EXPECT_NE(p.err().find(name), std::string::npos) << p.err();
    EXPECT_FALSE(std::filesystem::exists(folder_ / "connectors")) << name;
  }
}

TEST_F(RzrunHosts, FiltersChooseHostsAndDevices) {
  write("hosts", "n0 slots=4\nn1 slots=4\nn2 slots=1\n");
  const std::string script = "echo $(hostname) $RANK $LOCAL_RANK $WORLD_SIZE ${CUDA_VISIBLE_DEVICES-none}";
  const auto out = [&](std::vector<std::string> flags) {
    Program p(command(std::move(flags), script));
    EXPECT_EQ(p.wait(), 0) << p.err();
    auto all = lines(p.out());
    std::ranges::sort(all);
    std::string text;
    for (const auto& line : all) text += line + "\n";
    return text;
  };
  EXPECT_EQ(out({"--include", "n1:3,1@n2"}),
            "[n1:0] n1 0 0 3 1,3\n[n1:1] n1 1 1 3 1,3\n[n2:2] n2 2 0 3 none\n");
  EXPECT_EQ(out({"--exclude", "n0:0,1,2@n1"}), "[n0:0] n0 0 0 2 3\n[n2:1] n2 1 0 2 none\n");
  EXPECT_EQ(out({"--num_nodes", "2", "--num_gpus", "1"}), "[n0:0] n0 0 0 2 0\n[n1:1] n1 1 0 2 0\n");
  EXPECT_EQ(out({"-n", "5"}),
            "[n0:0] n0 0 0 5 none\n[n0:1] n0 1 1 5 none\n[n0:2] n0 2 2 5 none\n[n0:3] n0 3 3 5 none\n"
            "[n1:4] n1 4 0 5 none\n");
}

TEST_F(RzrunHosts, TheFirstFailureIsNamedWithItsHostAndEndsAll) {
  const std::string ready = folder_ / "ready";
  Program p(command(
      {}, concat("echo up $$; [ $RANK = 3 ] && { ", test::until({ready + "0", ready + "1", ready + "2"}),
                 "exit 5; }; : > ", ready, "$RANK; sleep 60 & wait")));
  EXPECT_EQ(p.wait(soon), 5);
  EXPECT_EQ(p.err(), "rzrun: first failure: rank 3 of 4 on host n1 exited with 5\n");
  expect_gone(wait_for_ranks(p, 4));
}

TEST_F(RzrunHosts, AKilledRankIsTheFirstFailureThoughOthersExitBeforeIt) {
  // Rank 0 exits when all the others run.
  const std::string ready = folder_ / "ready", exits = folder_ / "exits";
  Program p(command({}, concat("[ $RANK = 0 ] && { ", test::until({ready + "1", ready + "2", ready + "3"}),
                               ": > ", exits, "; exit 1; }; : > ", ready, "$RANK; [ $RANK = 3 ] && { ",
                               test::until({exits}), "sleep 0.1; kill -SEGV $$; }; sleep 60 & wait")));
  EXPECT_EQ(p.wait(soon), 128 + SIGSEGV);
  EXPECT_EQ(p.err(),
            "rzrun: after the first failure rank 0 on host n0 exited with 1\n"
            "rzrun: first failure: rank 3 of 4 on host n1 killed by SIGSEGV (Segmentation fault)\n");
}

TEST_F(RzrunHosts, CtrlCEndsEverything) {
  Program p(command({}, "echo up $$; sleep 60 & wait"));
  const auto ranks = wait_for_ranks(p, 4);
  p.signal(SIGINT);
  EXPECT_EQ(p.wait(soon), 128 + SIGINT);
  EXPECT_NE(p.err().find("SIGINT: ending 4 ranks"), std::string::npos) << p.err();
  expect_gone(ranks);
}

TEST_F(RzrunHosts, CtrlCTwiceKillsAtOnce) {
  Program p(command({"--grace", "3600"}, "trap '' TERM INT; echo up $$; while :; do sleep 60; done"));
  const auto ranks = wait_for_ranks(p, 4);
  p.signal(SIGINT);
  p.wait_for("rzrun: SIGINT");
  std::this_thread::sleep_for(std::chrono::milliseconds(1050));  // signals within a second are one
  p.signal(SIGINT);
  EXPECT_EQ(p.wait(soon), 128 + SIGINT);
  EXPECT_NE(p.err().find("ranks 0 to 3 have not ended since SIGTERM: SIGKILL"), std::string::npos) << p.err();
  expect_gone(ranks);
}

TEST_F(RzrunHosts, AKilledRzrunLeavesNothing) {
  Program p(command({"--grace", "0.5"}, "trap '' TERM; echo up $$; while :; do sleep 60; done"));
  const auto ranks = wait_for_ranks(p, 4);
  p.signal(SIGKILL);
  EXPECT_EQ(p.wait(soon), 128 + SIGKILL);
  expect_gone(ranks);
}

TEST_F(RzrunHosts, AKilledAgentIsALostHostAndEndsAll) {
  Program p(command({"--max-restarts", "3"}, "echo up $$; exec sleep 60"));
  const auto ranks = wait_for_ranks(p, 4);
  ::kill(connector_of("n1"), SIGKILL);
  EXPECT_EQ(p.wait(soon), 255);
  EXPECT_NE(p.err().find("host n1 is lost: "), std::string::npos) << p.err();
  EXPECT_NE(p.err().find("killed by SIGKILL (Killed); no restart: a host is gone"), std::string::npos)
      << p.err();
  expect_gone(ranks);
}

TEST_F(RzrunHosts, NoProcessOutlivesAKillOfEitherProcessOfAnAgent) {
  for (const bool kills_keeper : {true, false}) {
    SCOPED_TRACE(kills_keeper);
    std::filesystem::remove(folder_ / "connectors");
    Program p(command({"--grace", "1"},
                      "trap '' TERM; sleep 1001 & echo up $!; setsid sh -c 'sleep 1002 & echo up $!; "
                      "wait' & echo up $$; wait"));
    const auto processes = wait_for_ranks(p, 12);
    const pid_t keeper = connector_of("n1");
    ::kill(kills_keeper ? keeper : child_of(keeper), SIGKILL);
    EXPECT_EQ(p.wait(std::chrono::seconds(60)), 255);
    expect_gone(processes);
  }
}

TEST_F(RzrunHosts, AConnectionThatEndsIsALostHostAndItsAgentEndsItsRanks) {
  // The stand-in passes frames through processes of its own, as ssh does.
  write("rsh",
        "#!/bin/sh\nhost=$1; shift\n[ $host = n1 ] || exec unshare -u sh -c \"hostname $host; $*\"\n"
        "mkfifo ${0%/*}/in ${0%/*}/out\n"
        "setsid unshare -u sh -c \"hostname $host; $*\" < ${0%/*}/in > ${0%/*}/out &\n"
        "cat ${0%/*}/out & echo $! >> ${0%/*}/connectors\n"
        "exec cat > ${0%/*}/in\n");
  Program p(command({}, "echo up $$; exec sleep 60"));
  const auto ranks = wait_for_ranks(p, 4);
  for (const auto& process : rzrun::processes())
    if (process.parent == child_of(p.pid()))
      ::kill(process.pid, content(concat("/proc/", process.pid, "/comm")) == "cat\n" ? SIGKILL : 0);
  EXPECT_EQ(p.wait(soon), 255);
  EXPECT_NE(p.err().find("host n1 is lost"), std::string::npos) << p.err();
  expect_gone(ranks);
}

TEST_F(RzrunHosts, ASilentHostIsLostAndEndsItsRanks) {
  Program p(command({}, "echo up $$; exec sleep 100"));
  const auto ranks = wait_for_ranks(p, 4);
  const pid_t agent = connector_of("n1");
  ::kill(-agent, SIGSTOP);
  EXPECT_EQ(p.wait(soon), 255);
  EXPECT_NE(p.err().find("host n1 is lost: no sign of its agent for 10 s"), std::string::npos) << p.err();
  ::kill(-agent, SIGCONT);
  expect_gone(ranks);
}

/// A rank may notice that a peer is gone long before its host is known to be lost.
TEST_F(RzrunHosts, ASilentHostIsLostAlsoIfARankHasFailedBefore) {
  const std::string now = folder_ / "now";
  Program p(command({"--max-restarts", "3", "--grace", "60"},
                    "echo up $$; [ $RANK = 0 ] || exec sleep 100; until [ -e " + now +
                        " ]; do sleep 0.1; done; printf '{\"message\": {\"message\": \"rank 3 is lost\", "
                        "\"extraInfo\": {\"culprit\": 3}}}' > $TORCHELASTIC_ERROR_FILE; exit 1"));
  const auto ranks = wait_for_ranks(p, 4);
  const pid_t agent = connector_of("n1");
  ::kill(-agent, SIGSTOP);
  std::ofstream(now) << "";
  EXPECT_EQ(p.wait(soon), 255) << p.err();
  const std::string last = lines(p.err()).back();
  EXPECT_TRUE(
      last.starts_with("rzrun: first failure: host n1 is lost: no sign of its agent for 10 s; no restart: "))
      << last;
  ::kill(-agent, SIGCONT);
  expect_gone(ranks);
}

TEST_F(RzrunHosts, AStoppedRzrunIsMissedByItsAgents) {
  Program p(command({}, "echo up $$; exec sleep 100"));
  const auto ranks = wait_for_ranks(p, 4);
  const pid_t stopped = child_of(p.pid());
  for (const pid_t pid : {p.pid(), stopped}) ::kill(pid, SIGSTOP);
  for (const pid_t r : ranks) EXPECT_TRUE(test::gone(r, soon)) << r;
  for (const pid_t pid : {p.pid(), stopped}) ::kill(pid, SIGCONT);
  EXPECT_EQ(p.wait(soon), 255);
  EXPECT_NE(p.err().find("rzrun: this rzrun was stopped for "), std::string::npos) << p.err();
  EXPECT_EQ(p.err().find("is lost"), std::string::npos) << p.err();
  expect_gone(ranks);
}

TEST_F(RzrunHosts, CtrlZStopsItAloneAndItsAgentsGoOn) {
  if (!test::can_be_stopped_by_a_terminal())
    GTEST_SKIP() << "the kernel stops no orphaned group of processes";
  const std::string go = folder_ / "go";
  Program p(command({}, concat("echo up $$; until [ -e ", go, " ]; do sleep 0.1; done; exit 5")));
  const auto ranks = wait_for_ranks(p, 4);
  p.signal(SIGTSTP);
  EXPECT_TRUE(test::stopped(p.pid()));
  std::this_thread::sleep_for(std::chrono::seconds(12));  // longer than an agent waits for a sign of rzrun
  for (const pid_t rank : ranks) EXPECT_FALSE(test::gone(rank, std::chrono::seconds(0))) << rank;
  std::ofstream{go};
  for (const pid_t rank : ranks) EXPECT_TRUE(test::gone(rank)) << rank;
  p.signal(SIGCONT);
  EXPECT_EQ(p.wait(soon), 5);
  EXPECT_EQ(p.err().find("is lost"), std::string::npos) << p.err();
}

TEST_F(RzrunHosts, AnAgentThatGetsASignalRequestsTheEndAndItsRanksHaveNotFailed) {
  Program p(command({"--max-restarts", "3"}, "echo up $$; exec sleep 60"));
  const auto ranks = wait_for_ranks(p, 4);
  ::kill(connector_of("n1"), SIGTERM);
  EXPECT_EQ(p.wait(soon), 128 + SIGTERM);
  EXPECT_TRUE(p.err().starts_with("rzrun: SIGTERM on host n1")) << p.err();
  EXPECT_NE(p.err().find(": ending 4 ranks"), std::string::npos) << p.err();
  EXPECT_EQ(p.err().find("first failure"), std::string::npos) << p.err();
  expect_gone(ranks);
}

TEST_F(RzrunHosts, AStoppedRankThatOthersBlameIsTheHeadline) {
  const std::string now = folder_ / "now";
  Program p(
      command({}, "echo up $$; [ $RANK = 0 ] || exec sleep 100; until [ -e " + now +
                      " ]; do sleep 0.1; done; printf '{\"message\": {\"message\": \"rank 3 sends no "
                      "reply\", \"extraInfo\": {\"culprit\": 3}}}' > $TORCHELASTIC_ERROR_FILE; exit 1"));
  const auto ranks = wait_for_ranks(p, 4);
  pid_t rank3 = -1;
  for (const auto& line : lines(p.out()))
    if (line.starts_with("[n1:3] up ")) rank3 = std::stoi(line.substr(10));
  ASSERT_GT(rank3, 0) << p.out();
  ::kill(rank3, SIGSTOP);
  std::ofstream(now) << "";
  EXPECT_EQ(p.wait(soon), 1);
  EXPECT_EQ(
      lines(p.err()).back(),
      "rzrun: first failure: rank 3 of 4 on host n1 was stopped (state T, as by SIGSTOP); rank 0 exited "
      "with 1: rank 3 sends no reply");
  expect_gone(ranks);
}

TEST_F(RzrunHosts, ExportedFunctionsReachTheRanks) {
  write(
      "rsh",
      "#!/bin/sh\nhost=$1; shift\nexec unshare -u env -u 'BASH_FUNC_hello%%' sh -c \"hostname $host; $*\"\n");
  std::vector<std::string> words{
      test::built("rzrun"), "--hostfile", folder_ / "hosts", "--rsh", folder_ / "rsh", "bash", "-c", "hello"};
  Program p(words, {{"BASH_FUNC_hello%%", "() {  echo from $RANK\n}"}});
  EXPECT_EQ(p.wait(soon), 0) << p.err();
  auto all = lines(p.out());
  std::ranges::sort(all);
  EXPECT_EQ(all,
            (std::vector<std::string>{"[n0:0] from 0", "[n0:1] from 1", "[n1:2] from 2", "[n1:3] from 3"}));
}

TEST_F(RzrunHosts, AllRanksStartAgainOnTheSameAgents) {
  Program p(command({"--max-restarts", "2"},
                    "echo $TORCHELASTIC_RESTART_COUNT $RZ_LAUNCH $TORCHELASTIC_RUN_ID; "
                    "[ $RANK$TORCHELASTIC_RESTART_COUNT = 20 ] && kill -9 $$; [ $TORCHELASTIC_RESTART_COUNT "
                    "= 1 ] || sleep 60"));
  EXPECT_EQ(p.wait(soon), 0) << p.err();
  EXPECT_NE(p.err().find("first failure: rank 2 of 4 on host n1 killed by SIGKILL (Killed); restart 1 of 2"),
            std::string::npos)
      << p.err();
  EXPECT_EQ(connectors().size(), 2u);
  std::vector<std::string> launches, ids;
  for (const auto& line : lines(p.out())) {
    launches.push_back(line.substr(7, 18));
    ids.push_back(line.substr(26));
  }
  for (auto* all : {&launches, &ids}) {
    std::ranges::sort(*all);
    all->erase(std::unique(all->begin(), all->end()), all->end());
  }
  EXPECT_EQ(launches.size(), 2u) << p.out();
  EXPECT_EQ(ids.size(), 1u) << p.out();
}

TEST_F(RzrunHosts, TextBeforeTheAgentIsPrintedAndAHostThatDoesNotComeUpIsNamed) {
  write("rsh",
        "#!/bin/sh\nhost=$1; shift\necho Welcome to $host; printf 'no line end'\n"
        "[ $host = n1 ] && { sleep 0.5; echo 'Permission denied (publickey).' >&2; exit 255; }\n"
        "exec unshare -u sh -c \"hostname $host; $*\"\n");
  Program p(command({}, "echo never"));
  EXPECT_EQ(p.wait(soon), 255);
  EXPECT_EQ(p.out(), "");
  for (const char* line :
       {"rzrun: host n0: Welcome to n0\n", "rzrun: host n1: Permission denied (publickey).\n",
        "rsh exited with 255 before an agent of rzrun began"})
    EXPECT_NE(p.err().find(line), std::string::npos) << p.err();
  write("hosts", "n0 slots=2\nn2 slots=1\n");
  Program other(command({}, "echo one"));
  EXPECT_EQ(other.wait(soon), 0);
  EXPECT_EQ(lines(other.out()).size(), 3u);
  EXPECT_NE(other.err().find("rzrun: host n2: no line end\n"), std::string::npos) << other.err();
}

TEST_F(RzrunHosts, AProgramThatCannotBeStartedIsNamedWithItsHost) {
  std::vector<std::string> words{test::built("rzrun"), "--hostfile", folder_ / "hosts", "--rsh",
                                 folder_ / "rsh",      "missing"};
  Program p(words);
  EXPECT_EQ(p.wait(soon), 127);
  EXPECT_NE(p.err().find("cannot start 'missing': No such file or directory"), std::string::npos) << p.err();
}

TEST_F(RzrunHosts, HostsWithoutAnAddressEndWithALine) {
  if (std::system("unshare -un true 2>/dev/null") != 0) GTEST_SKIP() << "no network namespace is permitted";
  write("rsh",
        "#!/bin/sh\nhost=$1; shift\necho $$ $host >> \"${0%/*}/connectors\"\n"
        "exec unshare -un sh -c \"hostname $host; $*\"\n");
  Program p(command({"--max-restarts", "3"}, "echo never"));
  EXPECT_EQ(p.wait(soon), 2);
  EXPECT_EQ(p.out(), "");
  EXPECT_EQ(p.err(),
            "rzrun: host n0 has no address but loopback that other hosts could use; set --master-addr\n");
  expect_gone({});
  Program given(command({"--master-addr", "10.0.0.1"}, "echo $MASTER_ADDR"));
  EXPECT_EQ(given.wait(soon), 0) << given.err();
}

TEST_F(RzrunHosts, HostsMayHaveIPv6Alone) {
  const std::string network =
      "ip link add e0 type veth peer name e1 && ip link set e0 up && ip -6 addr add fd00::1/64 dev e0 nodad";
  if (std::system(concat("unshare -un sh -c '", network, "' 2>/dev/null").c_str()) != 0)
    GTEST_SKIP() << "no network namespace with an address is permitted";
  write("rsh", concat("#!/bin/sh\nhost=$1; shift\nexec unshare -un sh -c \"hostname $host; ", network,
                      " && $*\"\n"));
  Program p(command({"--num_gpus", "1"}, "echo $MASTER_ADDR"));
  EXPECT_EQ(p.wait(soon), 0) << p.err();
  EXPECT_NE(p.out().find("[n0:0] fd00::1\n"), std::string::npos) << p.out();
}

TEST_F(RzrunHosts, MuchOutputIsWholeAndASlowReaderMakesTheRanksWait) {
  const std::string line(200, 'x');
  Program p(command({}, "i=0; while [ $i -lt 5000 ]; do echo " + line + "$i; i=$((i+1)); done"));
  // Nothing is lost, though the test reads only at the end.
  EXPECT_EQ(p.wait(std::chrono::seconds(60)), 0) << p.err();
  const auto all = lines(p.out());
  EXPECT_EQ(all.size(), 20000u);
  for (const auto& l : all) ASSERT_TRUE(l[0] == '[' && l.find("] " + line) == 5) << l;
}

TEST_F(RzrunHosts, LogFilesAndTheirErrorsAreThoseOfTheHost) {
  Program p(command({"--log-dir", folder_ / "logs", "--tee"}, "echo line of $RANK"));
  EXPECT_EQ(p.wait(soon), 0) << p.err();
  for (int r = 0; r < 4; ++r)
    EXPECT_EQ(content(folder_ / concat("logs/rank", r, ".stdout")), concat("line of ", r, "\n"));
  Program chosen(
      command({"--log-dir", folder_ / "chosen", "-r", "1:1", "-t", "0:2"}, "echo o$RANK; echo e$RANK >&2"));
  EXPECT_EQ(chosen.wait(soon), 0) << chosen.err();
  EXPECT_EQ(content(folder_ / "chosen/rank3.stdout"), "o3\n");
  EXPECT_EQ(content(folder_ / "chosen/rank2.stderr"), "e2\n");
  EXPECT_FALSE(std::filesystem::exists(folder_ / "chosen/rank2.stdout"));
  EXPECT_FALSE(std::filesystem::exists(folder_ / "chosen/rank3.stderr"));
  EXPECT_EQ(lines(chosen.out()).size(), 2u) << chosen.out();
  EXPECT_EQ(lines(chosen.err()).size(), 4u) << chosen.err();
  Program full(command({"--log-dir", "/proc/no/logs"}, "true"));
  EXPECT_EQ(full.wait(soon), 2);
  EXPECT_NE(full.err().find(": --log-dir /proc/no/logs: "), std::string::npos) << full.err();
}

TEST_F(RzrunHosts, NothingOfTheJobIsOnACommandLine) {
  Program p(command({}, "echo up $$; sleep 60 & wait"), {{"PASSPHRASE", "open-sesame"}});
  const auto ranks = wait_for_ranks(p, 4);
  for (const pid_t agent : connectors()) {
    const std::string words = content(concat("/proc/", agent, "/cmdline"));
    EXPECT_NE(words.find("--agent"), std::string::npos) << words;
    EXPECT_EQ(words.find("sesame"), std::string::npos);
    EXPECT_EQ(words.find("sleep"), std::string::npos);
  }
  p.signal(SIGTERM);
  EXPECT_EQ(p.wait(soon), 128 + SIGTERM);
}

TEST_F(RzrunHosts, WrongFlagsAreRefusedInOneLine) {
  const std::string hosts = folder_ / "hosts";
  const auto refused = [](std::vector<std::string> flags, const std::string& words) {
    flags.push_back("true");
    test::expect_refusal("rzrun", flags, words);
  };
  refused({"--hostfile", hosts, "--include", "n0", "--exclude", "n1"},
          "--include and --exclude exclude each other");
  refused({"--hostfile", hosts, "--include", "n0", "--num_nodes", "1"},
          "--include and --num_nodes exclude each other");
  refused({"--hostfile", hosts, "--exclude", "n0", "--num_gpus", "1"},
          "--exclude and --num_gpus exclude each other");
  refused({"--hostfile", hosts, "--include", "n7"}, "host 'n7' is not known; there are: n0, n1");
  refused({"--hostfile", hosts, "-n", "5"}, "-n 5: the hosts have 4 slots");
  refused({"--hostfile", hosts, "-n", "1", "--num_gpus", "1"}, "-n and --num_gpus exclude each other");
  refused({"--hostfile", "/nowhere/hosts"}, "hostfile /nowhere/hosts: No such file or directory");
  refused({"--include", "n7:0"}, "'n7' is another host; name it and its slots in a --hostfile");
  refused({"--include", "localhost"}, "without --hostfile write localhost:SLOT,SLOT");
  refused({"--exclude", "n0"}, "--exclude needs --hostfile FILE");
  refused({"--num_nodes", "2", "--num_gpus", "1"}, "--num_nodes 2 needs --hostfile FILE");
  refused({"-n", "1", "--rsh", "ssh"}, "--rsh needs --hostfile FILE");
}

TEST(RzrunNodes, AHostThatGetsASignalLeavesAnElasticJob) {
  const std::string endpoint = concat("127.0.0.1:", rzrun::free_port());
  const auto command = [&](const std::string& nodes, const std::string& node) {
    return test::rzrun({"--nnodes", nodes, "--node-rank", node, "--nproc-per-node", "1", "--max-restarts",
                        "2", "--grace", "5", "--rdzv-endpoint", endpoint, "--rdzv-id", "elastic"},
                       "echo up $WORLD_SIZE; [ $WORLD_SIZE = 1 ] && exit 0; sleep 60 & wait");
  };
  const std::vector<std::pair<std::string, std::string>> secret{{"RZ_SECRET", std::string(64, '7')}};
  for (const auto& [nodes, signal, status] :
       {std::tuple("1:2", SIGTERM, 0), {"1:2", SIGINT, 0}, {"2", SIGTERM, 128 + SIGTERM}}) {
    Program first(command(nodes, "0"), secret), second(command(nodes, "1"), secret);
    second.wait_for("up 2");
    second.signal(signal);
    EXPECT_EQ(second.wait(soon), 128 + signal) << second.err();
    EXPECT_EQ(first.wait(soon), status) << first.err();
    EXPECT_EQ(first.out().find("up 1") != std::string::npos, status == 0) << first.out() << first.err();
    const std::string left = concat(" has left (SIG", sigabbrev_np(signal), ")");
    EXPECT_EQ(first.err().find(left) != std::string::npos, status == 0) << first.err();
    EXPECT_EQ(first.err().find("is lost"), std::string::npos) << first.err();
    EXPECT_EQ(second.err().find("this host leaves the job") != std::string::npos, status == 0)
        << second.err();
  }
}

/// Once in each of two groups.
TEST(RzrunNodes, RanksOfOtherHostsThatIgnoreSigtermAreKilledAfterARestartToo) {
  const std::string endpoint = concat("127.0.0.1:", rzrun::free_port());
  const auto command = [&](const std::string& node) {
    return test::rzrun({"--nnodes", "2", "--node-rank", node, "--max-restarts", "1", "--grace", "0.5",
                        "--rdzv-endpoint", endpoint},
                       "trap '' TERM; [ $RANK = 0 ] && sleep 0.2 && exit 1; sleep 600");
  };
  const std::vector<std::pair<std::string, std::string>> secret{{"RZ_SECRET", std::string(64, '7')}};
  Program first(command("0"), secret), second(command("1"), secret);
  EXPECT_EQ(first.wait(soon), 1) << first.err();
  EXPECT_EQ(second.wait(soon), 1) << second.err();
  EXPECT_NE(first.err().find("no restart is left after 1 of 1"), std::string::npos) << first.err();
}

TEST(RzrunOneHost, SlotsThatReplaceTheDevicesOfTheEnvironmentAreNamed) {
  for (const auto& [own, notes] : {std::pair("4,5,6,7", 1), {"0,1", 0}, {"", 0}}) {
    Program p({test::built("rzrun"), "--dry-run", "--include", "localhost:0,1", "true"},
              {{"CUDA_VISIBLE_DEVICES", own}});
    EXPECT_EQ(p.wait(), 0);
    EXPECT_EQ(p.err(),
              notes ? "rzrun: the slots of localhost replace CUDA_VISIBLE_DEVICES=4,5,6,7 by 0,1: they "
                      "are numbers of the host's devices, not places in that list\n"
                    : "");
  }
}

TEST(RzrunOneHost, DeepSpeedsHostfileIsReadWhereItIs) {
  Directory folder;
  std::ofstream(folder / "hostfile") << "n0 slots=2\nn1 slots=2\n";
  const auto hosts_of = [&](std::vector<const char*> words) {
    words.insert(words.begin(), "rzrun");
    rzrun::Flags flags;
    flags.hosts.default_file = folder / "hostfile";
    flags.parse(static_cast<int>(words.size()), words.data());
    rzrun::Remarks remarks;
    const rzrun::Hosts hosts = rzrun::choose_hosts({flags, {}}, remarks);
    std::string names;
    for (const auto& h : hosts.nodes) names += h.name;
    EXPECT_EQ(remarks.notes.size(), names.empty() ? 0u : 1u);
    return names;
  };
  EXPECT_EQ(hosts_of({}), "n0n1");
  EXPECT_EQ(hosts_of({"--num_nodes", "1"}), "n0");
  EXPECT_EQ(hosts_of({"--include", "n1"}), "n1");
  EXPECT_EQ(hosts_of({"--exclude", "n0"}), "n1");
  EXPECT_EQ(hosts_of({"--include", "localhost:0"}), "");
  EXPECT_EQ(hosts_of({"-n", "2"}), "");
}

TEST(RzrunOneHost, DeepSpeedsFlagsOnThisHost) {
  const std::string script = "echo $RANK $WORLD_SIZE ${CUDA_VISIBLE_DEVICES-none}";
  const auto sorted = [&](std::vector<std::string> flags) {
    Program p(test::rzrun(std::move(flags), script));
    EXPECT_EQ(p.wait(), 0) << p.err();
    auto all = lines(p.out());
    std::ranges::sort(all);
    return all;
  };
  EXPECT_EQ(sorted({"--include", "localhost:4,2"}), (std::vector<std::string>{"0 2 2,4", "1 2 2,4"}));
  EXPECT_EQ(sorted({"--num_gpus", "2"}), (std::vector<std::string>{"0 2 none", "1 2 none"}));
}

TEST(RzrunOneHost, DryRunPrintsWhatWouldRunWhere) {
  Directory folder;
  std::ofstream(folder / "hosts") << "n0 slots=4\nn1 slots=4\n";
  Program p({test::built("rzrun"), "--hostfile", folder / "hosts", "--include", "n0@n1:1,3", "--ssh_port",
             "2222", "--dry-run", "train", "--lr", "1"});
  EXPECT_EQ(p.wait(), 0);
  const auto all = lines(p.out());
  ASSERT_EQ(all.size(), 3u) << p.out();
  EXPECT_EQ(all[0], "6 ranks of: train --lr 1");
  EXPECT_TRUE(all[1].starts_with("n0: ranks 0 to 3; agent: ssh -T -o BatchMode=yes ")) << all[1];
  EXPECT_TRUE(all[2].starts_with("n1: ranks 4 to 5; CUDA_VISIBLE_DEVICES=1,3; agent: ssh ")) << all[2];
  EXPECT_NE(all[2].find(" -p 2222 n1 cd '"), std::string::npos) << all[2];
}

TEST(Launched, LinesOfMpirunBlameTheHostThatFails) {
  for (const char* line :
       {"ssh: connect to host n1 port 22: Connection refused", "root@n1: Permission denied (publickey).",
        "ssh: Could not resolve hostname n1: Temporary failure in name resolution", "Node:       n1",
        "n1: Connection reset by peer",
        "srun: error: Task launch for StepId=7.0 failed on node n1: Host is down"}) {
    EXPECT_TRUE(rzrun::blames(line, "n1")) << line;
    for (const char* other : {"n", "n11", "1", "n2"})
      EXPECT_FALSE(rzrun::blames(line, other)) << line << other;
  }
  for (const char* line :
       {"  target node:  n1", "  my node:   n1", "[n1:00131] 1 more process has sent help message", "n1",
        "ssh: connect to host n1.site port 22: Connection refused", "root@n1-ib: Permission denied",
        "n1x: y"})
    EXPECT_FALSE(rzrun::blames(line, "n1")) << line;
  EXPECT_TRUE(rzrun::blames("ssh: connect to host n1.site port 22: Connection refused", "n1.site"));
}

/// Frames with payloads of all kinds, after the banner of a shell.
std::string good_frames() {
  rzrun::Job job;
  job.ranks = job.local_ranks = 2;
  job.program.command = {"program", "word"};
  rzrun::RankEnd end;
  end.rank = 3;
  end.status.signal = 9;
  rzrun::JoinRequest request;
  request.host = "node", request.command = {"program"};
  rzrun::WireWriter join, hello;
  rzrun::JoinRequest::fields(join, request);
  hello(std::vector<std::string>{"10.0.0.1/8"}, std::string("place"), 29500, std::string());
  std::string bytes = "banner\n" + std::string(rzrun::frames_begin);
  using Kind = rzrun::Frame::Kind;
  rzrun::append_frame(bytes, Kind::hello, hello.bytes);
  rzrun::append_frame(bytes, Kind::join, join.bytes);
  rzrun::append_frame(bytes, Kind::job, rzrun::pack_job(job, {{"NAME", "value"}, {"OTHER", ""}}));
  rzrun::append_frame(bytes, Kind::exit, rzrun::pack_end(end));
  return bytes;
}

void unpack(const rzrun::Frame& frame) {
  rzrun::WireReader reader(frame.payload);
  rzrun::Variables variables;
  rzrun::JoinRequest request;
  std::vector<std::string> addresses;
  std::string place, why;
  int port = 0;
  switch (frame.kind) {
    case rzrun::Frame::Kind::job:
      rzrun::unpack_job(frame.payload, variables);
      break;
    case rzrun::Frame::Kind::exit:
      rzrun::unpack_end(frame.payload);
      break;
    case rzrun::Frame::Kind::join:
      rzrun::JoinRequest::fields(reader, request);
      break;
    case rzrun::Frame::Kind::hello:
      reader(addresses, place, port, why);
      break;
    default:
      break;
  }
}

/// A length beyond the limit is refused at once, not waited for in memory.
TEST(RzrunFrames, ALengthBeyondTheLimitIsRefused) {
  const auto first = [](std::uint32_t length) {
    rzrun::FrameParser parser;
    std::string bytes(rzrun::frames_begin);
    bytes.append(reinterpret_cast<const char*>(&length), sizeof length);
    bytes.push_back(static_cast<char>(rzrun::Frame::Kind::output));
    parser.feed(bytes);
    parser.text_before();
    return parser.next();
  };
  EXPECT_FALSE(first(rzrun::max_frame_bytes)) << "it is not complete";
  EXPECT_THROW(first(rzrun::max_frame_bytes + 1), Error);
  EXPECT_THROW(first(0xffffffff), Error);
}

/// Frames of which bytes are changed: each is a frame, or refused.
TEST(RzrunFrames, AnyBytesAreFramesOrRefused) {
  const std::string good = good_frames();
  test::Fuzz fuzz(3000);
  auto& random = fuzz.random;
  long whole = 0;
  while (fuzz.next()) {
    std::string bytes = fuzz.tried() == 1 ? good : fuzz.changed(good);
    if (fuzz.tried() > 1 && random() % 8 == 0) bytes.resize(random() % bytes.size());
    try {
      rzrun::FrameParser parser;
      int frames = 0;
      for (std::size_t at = 0; at < bytes.size();) {
        const auto n = std::min<std::size_t>(bytes.size() - at, 1 + random() % 400);
        parser.feed(std::string_view(bytes).substr(at, n));
        at += n;
        parser.text_before();
        for (; const auto frame = parser.next(); ++frames) unpack(*frame);
      }
      whole += frames == 4;
      ASSERT_TRUE(frames == 4 || fuzz.tried() > 1);
    } catch (const Error& e) {
      ASSERT_EQ(e.code(), Errc::io) << e.what();
    }
  }
  EXPECT_GT(whole, fuzz.tried() / 20);
  EXPECT_LT(whole, fuzz.tried());
}

}  // namespace
}  // namespace rz
