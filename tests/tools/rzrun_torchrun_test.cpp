// Needs: rzrun_lib rz_bench rzrun all_reduce_perf sendrecv_perf

// torchrun's flags, and which hosts form a job: without processes; and agents over TCP, with real sockets.

#include <gtest/gtest.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <atomic>
#include <filesystem>
#include <fstream>
#include <stop_token>
#include <thread>
#include <vector>

#include "comm/core/error.h"
#include "comm/net/listening.h"
#include "tests/support/between.h"
#include "tests/support/program.h"
#include "tests/support/rzrun.h"
#include "tests/support/strangers.h"
#include "tools/rzrun/agents/agent_sockets.h"
#include "tools/rzrun/agents/join_request.h"
#include "tools/rzrun/flags/flags.h"

namespace rz::rzrun {
namespace {

using std::chrono::seconds;

std::string error_of(const std::function<void()>& f) {
  try {
    f();
  } catch (const Error& e) {
    EXPECT_EQ(e.code(), Errc::config);
    return e.what();
  }
  return "";
}

TEST(Torchrun, HostsAreANumberOrARange) {
  EXPECT_EQ(parse_nnodes("3", "--nnodes"), std::pair(3, 3));
  EXPECT_EQ(parse_nnodes("2:4", "--nnodes"), std::pair(2, 4));
  for (const char* text : {"", "0", "x", "4:2", "1:", ":2", "1:2:3", "-1", "65537"})
    EXPECT_NE(error_of([&] { parse_nnodes(text, "PET_NNODES"); }).find("PET_NNODES '"), std::string::npos)
        << text;
}

TEST(Torchrun, RanksOfAHostAreANumberOrItsDevicesOrProcessors) {
  EXPECT_EQ(parse_nproc("3", "", 2, 8), 3);
  EXPECT_EQ(parse_nproc("cpu", "", 2, 8), 8);
  EXPECT_EQ(parse_nproc("gpu", "", 2, 8), 2);
  EXPECT_EQ(parse_nproc("auto", "", 2, 8), 2);
  EXPECT_EQ(parse_nproc("auto", "", 0, 8), 8);
  EXPECT_NE(error_of([] { parse_nproc("gpu", "--nproc-per-node", 0, 8); }).find("no CUDA device"),
            std::string::npos);
  for (const char* text : {"0", "x", "-1", "1.5", "5000"})
    EXPECT_NE(error_of([&] { parse_nproc(text, "--nproc-per-node", 1, 1); }), "") << text;
}

TEST(Torchrun, ConfIsKeysAndValues) {
  Rendezvous r;
  parse_rdzv_conf("timeout=7,last_call_timeout=3,is_host=true,read_timeout=60", "--rdzv-conf", r);
  EXPECT_EQ(r.join_timeout, seconds(7));
  EXPECT_EQ(r.last_call, seconds(3));
  EXPECT_EQ(r.is_host, true);
  EXPECT_NE(error_of([&] { parse_rdzv_conf("tiemout=7", "--rdzv-conf", r); }).find("unknown key 'tiemout'"),
            std::string::npos);
  for (const char* text : {"", "timeout", "timeout=", "=7", "timeout=x", "is_host=2", "timeout=7,,"})
    EXPECT_NE(error_of([&] { parse_rdzv_conf(text, "--rdzv-conf", r); }), "") << text;
}

TEST(Torchrun, WrongFlagsAreRefusedInOneLine) {
  const auto refused = [](std::vector<std::string> flags, const std::string& words) {
    flags.push_back("true");
    test::expect_refusal("rzrun", flags, words);
  };
  refused({"--nnodes", "2"}, "--nnodes 2: where is node 0? Give --rdzv-endpoint HOST:PORT, or --master-addr");
  refused({"--nnodes", "two"}, "--nnodes 'two': a number of hosts is needed, or MIN:MAX");
  refused({"--nnodes", "2", "--node_rank", "2", "--master_addr", "a"},
          "--node-rank '2': a whole number from 0 to 1");
  refused({"--nnodes", "", "--rdzv-endpoint", "a:1"}, "--nnodes: a value is missing");
  refused({"--nproc_per_node", "many"}, "--nproc-per-node 'many'");
  refused({"--nnodes", "2", "--rdzv_endpoint", "a:b"}, "--rdzv-endpoint: address 'a:b'");
  refused({"--nnodes", "2", "--rdzv-endpoint", "a b:1"},
          "--rdzv-endpoint: 'a b' is no host: a name has alph");
  refused({"--nnodes", "2", "--rdzv-endpoint", "tcp://a:1"}, "HOST:PORT is needed, without tcp://");
  refused({"--nnodes", "2", "--rdzv-endpoint", "fd00::1"}, "an IPv6 address needs brackets");
  refused({"--nnodes", "2", "--rdzv-endpoint", "[a]"}, "'[a]'");
  refused({"--nnodes", "1", "--monitor-interval", "abc"}, "--monitor-interval 'abc': seconds are needed");
  refused({"--nnodes", "1", "--start-method", "banana"},
          "--start-method 'banana': spawn, fork or forkserver is needed");
  refused({"--nnodes", "2", "--master-addr", "a;b"}, "--master-addr: 'a;b' is no host");
  refused({"--nproc-per-node", "1", "--grace", "nan"}, "Value nan is no number");
  refused({"--nproc-per-node", "1", "--log-dir", ""}, "--log-dir: a value is missing");
  refused({"--hostfile", ""}, "--hostfile: a value is missing");
  refused({"--nnodes", "2", "--rdzv-endpoint", "a:0"}, "--rdzv-endpoint: port 0 is no port");
  refused({"--nnodes", "2", "--rdzv-endpoint", "a:1", "--master-addr", "b"},
          "name two hosts, a and b; give one");
  refused({"--nnodes", "2", "--rdzv-endpoint", "a:1", "--rdzv-backend", "etcd-v2"},
          "etcd-v2 is not supported");
  refused({"--nnodes", "2", "--rdzv-endpoint", "a:1", "--rdzv-backend", "zeus"},
          "'zeus': c10d or static is needed");
  refused({"--nnodes", "2", "--rdzv-endpoint", "a:1", "--rdzv-conf", "x=1"}, "--rdzv-conf: unknown key 'x'");
  for (const char* any : {"0.0.0.0:1", "[::]:1", "0:1"}) {
    refused({"--nnodes", "2", "--rdzv-endpoint", any},
            "is each host itself: give the name or address of node 0 on");
    refused({"--nnodes", "2", "--rdzv-endpoint", any, "--node-rank", "1"},
            "is this host itself, and node 0 is another one");
    refused({"--nnodes", "2", "--rdzv-endpoint", any, "--rdzv-conf", "is_host=0"}, "node 0 is another one");
  }
  refused({"--nnodes", "2", "--master-addr", "::", "--node-rank", "1"},
          "--master-addr :: is this host itself");
  refused({"--standalone", "--nnodes", "2"}, "--standalone is for one host, and --nnodes is 2");
  refused({"-n", "2", "--nproc-per-node", "2"}, "-n and --nproc-per-node exclude each other");
  refused({"--hostfile", "f", "--nnodes", "2"}, "--hostfile and --nnodes exclude each other");
  refused({"--nproc-per-node", "2", "-r", "3"}, "--redirects needs --log-dir DIR");
  refused({"--nproc-per-node", "2", "-t", "4"}, "--tee '4': '4' is no choice of streams; give 0 (none), 1 (");
  refused({"--nproc-per-node", "2", "--tee=all"}, "--tee 'all': 'all' is no choice of streams");
  refused({"--nproc-per-node", "2", "--tee=0:1,2"}, "--tee '0:1,2': '2' has no local rank");
  refused({"--nproc-per-node", "2", "-r", "0:1,0:2"}, "--redirects '0:1,0:2': local rank 0 is there twice");
  refused({"--nproc-per-node", "2", "-r", "x:1"}, "--redirects 'x:1': 'x' is no number of a local rank");
  refused({"--nproc-per-node", "2", "-r", "2:1"}, "there is no local rank 2: a host has up to 2 ranks");
  refused({"--nproc-per-node", "2", "--local-ranks-filter", "0,"},
          "--local-ranks-filter '0,': '' is no number");
}

/// The output of a job on this host with these variables, and its standard error.
std::pair<std::string, std::string> by_variables(const test::Program::Variables& variables,
                                                 const std::string& script, int status = 0,
                                                 std::vector<std::string> flags = {}) {
  flags.insert(flags.begin(), test::built("rzrun"));
  flags.insert(flags.end(), {"sh", "-c", script});
  test::Program p(flags, variables);
  EXPECT_EQ(p.wait(), status) << p.err();
  return {p.out(), p.err()};
}

TEST(Torchrun, EveryFlagMayBeAVariable) {
  const std::pair<std::string, std::string> one{"PET_NNODES", "1"};
  const test::Directory logs;
  EXPECT_EQ(by_variables({one, {"PET_MAX_RESTARTS", "1"}},
                         "echo $TORCHELASTIC_RESTART_COUNT of $TORCHELASTIC_MAX_RESTARTS; exit 3", 3)
                .first,
            "0 of 1\n1 of 1\n");
  EXPECT_EQ(
      by_variables(
          {one, {"PET_ROLE", "trainer"}, {"PET_MASTER_ADDR", "127.0.0.2"}, {"PET_MASTER_PORT", "29777"}},
          "echo $ROLE_NAME $MASTER_ADDR $MASTER_PORT")
          .first,
      "trainer 127.0.0.2 29777\n");
  EXPECT_EQ(by_variables({one, {"PET_LOG_DIR", logs / "l"}, {"PET_REDIRECTS", "3"}}, "echo hi").first, "");
  EXPECT_EQ(test::content(logs / "l/rank0.stdout"), "hi\n");
  test::Program module({test::built("rzrun"), "json.tool", "--help"}, {one, {"PET_MODULE", "1"}});
  EXPECT_EQ(module.wait(), 0) << module.err();
  EXPECT_NE(module.out().find("usage: "), std::string::npos) << module.out();
  std::ofstream(logs / "a.py") << "echo a shell reads this\n";
  test::Program script({test::built("rzrun"), logs / "a.py"}, {one, {"PET_NO_PYTHON", "true"}});
  EXPECT_EQ(script.wait(), 126) << script.err();
  // As with every PET_ variable, what is typed wins, and -n leaves them aside.
  const std::string restarts = "echo $TORCHELASTIC_MAX_RESTARTS";
  EXPECT_EQ(by_variables({one, {"PET_MAX_RESTARTS", "1"}}, restarts, 0, {"--max-restarts", "4"}).first,
            "4\n");
  EXPECT_EQ(by_variables({one, {"PET_MAX_RESTARTS", "x"}}, restarts, 0, {"-n", "1"}).first, "0\n");
  for (const auto& [name, value] : test::Program::Variables{{"PET_MAX_RESTARTS", "many"},
                                                            {"PET_MASTER_PORT", "0"},
                                                            {"PET_MODULE", "perhaps"},
                                                            {"PET_MONITOR_INTERVAL", "abc"},
                                                            {"PET_START_METHOD", "banana"}}) {
    const std::string err = by_variables({one, {name, value}}, "true", 2).second;
    EXPECT_TRUE(err.starts_with(concat("rzrun: ", name, " '", value, "': "))) << err;
    EXPECT_EQ(test::lines(err).size(), 1u) << err;
  }
}

TEST(Torchrun, AVariableWithoutAFlagIsNamed) {
  EXPECT_EQ(by_variables({{"PET_NNODES", "1"}, {"PET_NNODE", "2"}}, "true").second,
            "rzrun: PET_NNODE has no effect: there is no such flag of torchrun that rzrun takes\n");
  EXPECT_EQ(by_variables({{"PET_NNODE", "2"}}, "true", 0, {"-n", "1"}).second, "");
}

TEST(Torchrun, LocalAddrIsMasterAddrOnOneHost) {
  EXPECT_EQ(by_variables({}, "echo $MASTER_ADDR", 0, {"--nnodes", "1", "--local-addr", "127.0.0.3"}).first,
            "127.0.0.3\n");
}

TEST(Torchrun, AMasterPortBesideTheEndpointIsThatOfTheRanks) {
  const std::string endpoint = concat("127.0.0.1:", rzrun::free_port());
  const std::vector<std::string> words{test::built("rzrun"),
                                       "--nnodes",
                                       "2",
                                       "--rdzv-endpoint",
                                       endpoint,
                                       "--master-port",
                                       "29777",
                                       "sh",
                                       "-c",
                                       "echo $MASTER_PORT"};
  test::Program first(words), second(words);
  EXPECT_EQ(first.wait(), 0) << first.err();
  EXPECT_EQ(second.wait(), 0) << second.err();
  EXPECT_EQ(first.out() + second.out(), "29777\n29777\n");
}

TEST(Torchrun, AnEndpointAtLoopbackIsForRzrunsOfThisHost) {
  for (const char* at : {"localhost:29400", "127.0.0.1:29400", "[::1]:29400", "localhost"}) {
    test::Program p({test::built("rzrun"), "--dry-run", "--nnodes", "2", "--node-rank", "1",
                     "--rdzv-endpoint", at, "true"},
                    {{"DS_ENV_FILE", ""}});
    EXPECT_EQ(p.wait(), 0) << p.err();
    EXPECT_EQ(p.err(),
              concat("rzrun: --rdzv-endpoint ", at,
                     " is loopback: all 2 rzruns must be on this host; else give the name or address "
                     "of node 0 on all\n"));
    EXPECT_NE(p.out().find("waits 60 s for node 0"), std::string::npos) << p.out();
  }
}

TEST(Torchrun, AFreePortIsFreeInBothFamilies) {
  net::SocketAddress any = net::resolve({"::", 0}).front();
  UniqueFd taken;
  try {
    taken = net::listen_tcp(any);
  } catch (const Error&) {
    GTEST_SKIP() << "this host has no IPv6";
  }
  const int on = 1, port = net::local_address(taken.get()).port();
  UniqueFd six(::socket(AF_INET6, SOCK_STREAM | SOCK_CLOEXEC, 0));
  taken.close();
  any.set_port(port);
  ASSERT_EQ(::setsockopt(six.get(), IPPROTO_IPV6, IPV6_V6ONLY, &on, sizeof on), 0);
  ASSERT_EQ(::bind(six.get(), any.get(), any.size), 0);
  test::Program p({test::built("rzrun"), "-n", "1", "true"}, {{"RZ_PORTS", concat(port, "-", port)}});
  EXPECT_EQ(p.wait(), 2);
  EXPECT_NE(p.err().find("is free; give more of them"), std::string::npos) << p.err();
}

/// What --dry-run prints of this host, without the first line.
std::string plan_of(const std::vector<std::string>& flags) {
  std::vector<std::string> words{test::built("rzrun"), "--dry-run"};
  words.insert(words.end(), flags.begin(), flags.end());
  words.push_back("true");
  test::Program p(words, {{"DS_ENV_FILE", ""}});
  EXPECT_EQ(p.wait(), 0) << p.err();
  return p.out().substr(p.out().find('\n') + 1);
}

TEST(Torchrun, OneHostNeedsNoAddress) {
  for (const char* flags :
       {"--standalone --nproc_per_node 2", "--nproc-per-node=2 --nnodes=1 --rdzv-backend=c10d"}) {
    test::Program p({"sh", "-c", test::built("rzrun") + " " + flags + " sh -c 'echo $WORLD_SIZE'"});
    EXPECT_EQ(p.wait(), 0) << p.err();
    EXPECT_EQ(p.out(), "2\n2\n") << flags;
  }
  test::Program p({test::built("rzrun"), "sh", "-c", "echo $WORLD_SIZE $ROLE_NAME $TORCHELASTIC_RUN_ID"},
                  {{"PET_NPROC_PER_NODE", "1"}, {"PET_RDZV_ID", "job7"}});
  EXPECT_EQ(p.wait(), 0) << p.err();
  EXPECT_EQ(p.out(), "1 default job7\n");
  EXPECT_EQ(plan_of({"--rdzv-id", "job7", "--"}), "this host: rank 0\nTORCHELASTIC_RUN_ID=job7\n");
  test::Program tee({test::built("rzrun"), "--nproc-per-node", "1", "-t", "3", "echo", "hi"});
  EXPECT_EQ(tee.wait(), 0) << tee.err();
  EXPECT_EQ(tee.out(), "[0] hi\n");
}

TEST(Torchrun, DryRunPrintsThePartOfThisHostAndOpensNothing) {
  const auto listeners =
      net::listen_at(net::listening_addresses({"127.0.0.1", 0}, ""), 0);  // the port is in use
  const std::string at = net::local_address(listeners.front().get()).text();
  EXPECT_EQ(plan_of({"--nnodes", "2", "--nproc-per-node", "3", "--rdzv-endpoint", at, "--rdzv-id", "job7"}),
            "2 hosts, job 'job7'; this is node 0, since 127.0.0.1 is its address\nlistens at " + at +
                "; waits 60 s for the other hosts\nthis host: ranks 0 to 2\nTORCHELASTIC_RUN_ID=job7\n");
  pollfd p{listeners.front().get(), POLLIN, 0};
  EXPECT_EQ(plan_of({"--nnodes", "3", "--nproc-per-node", "3", "--node-rank", "2", "--master-addr",
                     "127.0.0.1", "--master-port", std::to_string(net::local_address(p.fd).port())}),
            "3 hosts, job 'none'; this is node 2\nconnects to " + at +
                "; waits 60 s for node 0\nthis host: ranks 6 to 8 if each host before has 3 ranks\n");
  EXPECT_EQ(::poll(&p, 1, 0), 0) << "nothing has connected";
  EXPECT_EQ(plan_of({"--nnodes", "2:4", "--rdzv-endpoint", "192.0.2.1:7", "--rdzv-conf",
                     "join_timeout=9,last_call_timeout=5"}),
            "2:4 hosts, job 'none'; this is a node that is numbered by its arrival\nconnects to 192.0.2.1:7; "
            "waits 9 s for node 0\nthis host: 1 rank, behind those of the hosts before\n");
  EXPECT_EQ(plan_of({"--nnodes", "2:4", "--rdzv-endpoint", "192.0.2.1:7", "--local-addr", "127.0.0.1",
                     "--rdzv-conf", "is_host=1"}),
            "2:4 hosts, job 'none'; this is node 0, by is_host of --rdzv-conf\nlistens at 127.0.0.1:7; waits "
            "600 s for the other hosts, and 30 s for more than 2\nthis host: rank 0\n");
  EXPECT_EQ(
      plan_of({"--nnodes", "2", "--rdzv-endpoint", "[2001:db8::1]"}),
      "2 hosts, job 'none'; this is a node that is numbered by its arrival\nconnects to "
      "[2001:db8::1]:29400; waits 600 s for node 0\nthis host: 1 rank, behind those of the hosts before\n");
  EXPECT_EQ(plan_of({"--nnodes", "1", "--node-rank", "0", "--nproc-per-node", "2", "--master-addr",
                     "127.0.0.1", "--master-port", "29501"}),
            "this host: ranks 0 to 1\nMASTER_ADDR=127.0.0.1, MASTER_PORT=29501\n");
}

/// The names of the log files, each with its content, and then the lines of both streams of the console.
std::string output_of(std::vector<std::string> flags, const test::Program::Variables& variables = {}) {
  const test::Directory folder;
  std::vector<std::string> words{test::built("rzrun"), "--nproc-per-node", "2", "--log-dir"};
  words.push_back(folder / "");
  words.insert(words.end(), flags.begin(), flags.end());
  words.insert(words.end(), {"sh", "-c", "echo o$RANK; echo e$RANK >&2"});
  test::Program p(words, variables);
  EXPECT_EQ(p.wait(), 0) << p.err();
  std::string text;
  for (const char* name : {"rank0.stdout", "rank0.stderr", "rank1.stdout", "rank1.stderr"})
    if (std::filesystem::exists(folder / name))
      text += concat(name[4], name[9], "=", test::content(folder / name));
  for (const std::string& stream : {p.out(), p.err()}) {
    auto all = test::lines(stream);
    std::ranges::sort(all);
    for (const std::string& line : all) text += line + ";";
  }
  std::ranges::replace(text, '\n', ' ');
  return text;
}

TEST(Torchrun, StreamsOfEachRankAreChosenForFilesAndTheConsole) {
  const std::string all = "0o=o0 0e=e0 1o=o1 1e=e1 ";
  EXPECT_EQ(output_of({}), all);
  EXPECT_EQ(output_of({"-r", "3"}), all);
  EXPECT_EQ(output_of({"--tee"}), all + "o0;o1;e0;e1;");
  EXPECT_EQ(output_of({"-t", "3"}), all + "[0] o0;[1] o1;[0] e0;[1] e1;");
  EXPECT_EQ(output_of({"-t3"}), output_of({"--tee=3"}));
  EXPECT_EQ(output_of({"-r", "0"}), "o0;o1;e0;e1;");
  EXPECT_EQ(output_of({"-r", "1"}), "0o=o0 1o=o1 e0;e1;");
  EXPECT_EQ(output_of({"-r2"}), "0e=e0 1e=e1 o0;o1;");
  EXPECT_EQ(output_of({"--redirects", "0:1,1:2"}), "0o=o0 1e=e1 o1;e0;");
  EXPECT_EQ(output_of({"--tee", "1:1"}), "1o=o1 [1] o1;o0;e0;e1;");
  EXPECT_EQ(output_of({"-r", "1", "-t", "0:2"}), "0o=o0 0e=e0 1o=o1 [0] e0;e1;");
  EXPECT_EQ(output_of({"-r", "1", "--local_ranks_filter", "1"}), "0o=o0 1o=o1 e1;");
  EXPECT_EQ(output_of({}, {{"PET_TEE", "1"}, {"PET_REDIRECTS", "1:3"}}),
            "0o=o0 1o=o1 1e=e1 [0] o0;[1] o1;e0;");
}

JoinRequest host(const std::string& name, int node_rank, int min = 3, int max = 3) {
  return {name, node_rank, 2, min, max, "none", {"train"}};
}

TEST(JoinRequest, WhatMustNotDifferIsNamed) {
  JoinRequest other = host("b", 1);
  other.local_ranks = 5;
  other.command.push_back("argument");
  EXPECT_EQ(difference(host("a", 0), other), "");
  other.max_nodes = 4;
  EXPECT_EQ(difference(host("a", 0), other), "the hosts differ in --nnodes: 3 on a, 3:4 on b");
  other = host("b", 1);
  other.max_restarts = 2;
  EXPECT_EQ(difference(host("a", 0), other), "the hosts differ in --max-restarts: 0 on a, 2 on b");
  other.max_restarts = 0;
  other.role = "reader";
  EXPECT_EQ(difference(host("a", 0), other), "the hosts differ in --role: default on a, reader on b");
  other.id = "x";
  EXPECT_EQ(difference(host("a", 0), other), "the hosts differ in --rdzv-id: none on a, x on b");
  other = host("b", 1);
  other.command = {"evaluate"};
  EXPECT_EQ(difference(host("a", 0), other), "the hosts differ in the program: train on a, evaluate on b");
}

TEST(JoinRequest, PlacesAreNotGivenTwice) {
  const std::vector<JoinRequest> all{host("a", 0), host("b", 2)};
  EXPECT_EQ(refusal(all, host("c", 1)), "");
  EXPECT_EQ(refusal(all, host("c", -1)), "");
  EXPECT_EQ(refusal(all, host("c", 2)), "--node-rank 2 is that of two hosts: b and c");
  EXPECT_EQ(refusal(all, host("c", 3)), "--node-rank 3 on c: --nnodes 3 has node ranks up to 2");
  EXPECT_EQ(refusal({host("a", 0, 1, 1)}, host("c", -1)), "the job has its 1 host without c");
}

TEST(JoinRequest, NumbersFollowNodeRanksAndArrival) {
  const auto numbers = [](std::vector<int> ranks) {
    std::vector<JoinRequest> hosts;
    for (const int r : ranks) hosts.push_back(host("h", r));
    return node_numbers(hosts);
  };
  EXPECT_EQ(numbers({0, -1, -1}), (std::vector<int>{0, 1, 2}));
  EXPECT_EQ(numbers({0, 2, 1}), (std::vector<int>{0, 2, 1}));
  EXPECT_EQ(numbers({0, 3, 1}), (std::vector<int>{0, 2, 1})) << "without gaps";
  EXPECT_EQ(numbers({0, 1, -1}), (std::vector<int>{0, 1, 2}));
  EXPECT_EQ(numbers({0, -1, 1}), (std::vector<int>{0, 2, 1}));
}

TEST(JoinRequest, WhatIsMissingIsNamed) {
  EXPECT_EQ(missing({host("a", 0), host("b", 2)}), "node rank 1 is");
  EXPECT_EQ(missing({host("a", 0)}), "node ranks 1, 2 are");
  EXPECT_EQ(missing({host("a", 0), host("b", -1)}), "1 host is");
}

TEST(JoinRequest, AJobStartsWithAllHostsOrAfterTheLastCall) {
  Rendezvous r;
  r.min_nodes = 2;
  r.max_nodes = 3;
  LastCall call(r);
  LastCall::Clock::time_point now{};
  EXPECT_FALSE(call.may_start(1, now));
  EXPECT_FALSE(call.may_start(2, now));
  EXPECT_FALSE(call.may_start(2, now + seconds(29)));
  EXPECT_FALSE(call.may_start(1, now + seconds(29)));
  EXPECT_FALSE(call.may_start(2, now + seconds(31))) << "from when there are enough again";
  EXPECT_TRUE(call.may_start(2, now + seconds(61)));
  EXPECT_TRUE(call.may_start(3, now));
}

/// A listener on loopback, served by a thread.
class AgentSockets : public testing::Test {
 protected:
  void SetUp() override {
    auto at = net::listen_at(net::listening_addresses({"127.0.0.1", 0}, ""), 0);
    address_ = net::local_address(at.front().get());
    listener_.emplace(std::move(at), AgentAccess{secret_});
    thread_ = std::thread([this] {
      while (!stop_) {
        for (auto& c : listener_->advance(rate_)) streams_.push_back(std::move(c.stream));
        proven_ = static_cast<int>(streams_.size());
        refused_ = listener_->strangers().refused();
        most_ = std::max<std::size_t>(most_, listener_->unproven());
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
      }
    });
  }
  void TearDown() override {
    stop_ = true;
    if (thread_.joinable()) thread_.join();
  }
  static bool becomes(const std::function<bool()>& state) {
    const auto end = Deadline::after(seconds(20));
    while (!state() && !end.expired()) std::this_thread::sleep_for(std::chrono::milliseconds(5));
    return state();
  }
  FrameStream connect(const SharedSecret& secret) {
    return connect_to_rzrun({"127.0.0.1", address_.port()}, AgentAccess{secret}, Deadline::after(seconds(20)),
                            [](auto&) {});
  }

  SharedSecret secret_ = std::make_shared<net::Secret>(net::Secret::random());
  net::SocketAddress address_;
  std::optional<AgentListener> listener_;
  std::list<FrameStream> streams_;
  std::atomic<int> proven_{0};
  std::atomic<std::uint64_t> refused_{0};
  std::atomic<std::size_t> most_{0};
  std::atomic<double> rate_{net::AcceptRate::while_running};
  std::atomic<bool> stop_{false};
  std::thread thread_;
};

TEST_F(AgentSockets, TheSecretIsProvedByBothEnds) {
  const FrameStream stream = connect(secret_);
  EXPECT_TRUE(becomes([&] { return proven_ == 1; }));
  try {
    connect(std::make_shared<net::Secret>(net::Secret::random()));
    FAIL() << "another secret";
  } catch (const Error& e) {
    EXPECT_EQ(e.code(), Errc::mismatch);
    EXPECT_NE(std::string(e.what()).find("another secret"), std::string::npos) << e.what();
  }
  EXPECT_EQ(proven_, 1);
  EXPECT_TRUE(becomes([&] { return refused_ > 0; }));
}

TEST_F(AgentSockets, StrangersAreDroppedAndAgentsGetThrough) {
  std::vector<UniqueFd> flood;
  for (int i = 0; i < 300; ++i) flood.push_back(net::connect_tcp(address_, Deadline::after(seconds(5))));
  std::string frames(frames_begin);
  append_frame(frames, Frame::Kind::join, "no secret");
  for (int i = 0; i < 20; ++i) {
    flood.push_back(net::connect_tcp(address_, Deadline::after(seconds(5))));
    ASSERT_GT(::send(flood.back().get(), frames.data(), frames.size(), MSG_NOSIGNAL), 0);
  }
  const FrameStream stream = connect(secret_);
  EXPECT_TRUE(becomes([&] { return proven_ == 1; }));
  EXPECT_TRUE(becomes([&] { return refused_ >= 300 + 20 - AgentListener::max_unproven; })) << refused_;
  EXPECT_LE(most_, AgentListener::max_unproven);
  EXPECT_EQ(proven_, 1);
}

// Hundreds of hosts, each of which has one connection and a hello, as an agent has.
TEST_F(AgentSockets, ManyHostsDoNotKeepAnAgentOut) {
  const test::ManyHosts strangers(
      240, address_.port(), test::plausible_hello(net::Purpose::agent, net::fingerprint("agents of rzrun")));
  strangers.await();
  std::list<FrameStream> agents;
  for (int i = 0; i < 5; ++i) {
    const auto start = Deadline::Clock::now();
    agents.push_back(connect(secret_));
    EXPECT_LT(Deadline::Clock::now() - start, seconds(4)) << i;
  }
  EXPECT_TRUE(becomes([&] { return proven_ == 5; }));
  EXPECT_LE(most_, AgentListener::max_unproven);
}

TEST_F(AgentSockets, AHelloForAnotherGroupIsThatOfAStranger) {
  const auto call = [&](int number, std::uint64_t group) {
    const std::string hello = test::plausible_hello(net::Purpose::agent, group);
    std::vector<UniqueFd> all;
    for (int i = 0; i < number; ++i) {
      all.push_back(net::connect_tcp(address_, Deadline::after(seconds(5))));
      EXPECT_EQ(::send(all.back().get(), hello.data(), hello.size(), MSG_NOSIGNAL), std::ssize(hello));
    }
    return all;
  };
  const auto agents = call(10, net::fingerprint("agents of rzrun"));
  EXPECT_TRUE(becomes([&] { return most_ == 10; }));
  const auto strangers = call(100, 7);
  EXPECT_TRUE(becomes([&] { return refused_ >= 100 + 10 - AgentListener::max_unproven; })) << refused_;
  for (const UniqueFd& agent : agents) EXPECT_FALSE(test::ManyHosts::has_ended(agent.get()));
}

TEST_F(AgentSockets, AStrangerThatResetsItsConnectionIsNamed) {
  {
    const UniqueFd scan = net::connect_tcp(address_, Deadline::after(seconds(5)));
    const linger reset{1, 0};
    ASSERT_EQ(::setsockopt(scan.get(), SOL_SOCKET, SO_LINGER, &reset, sizeof reset), 0);
  }
  EXPECT_TRUE(becomes([&] { return refused_ == 1; }));
  stop_ = true;
  thread_.join();
  EXPECT_EQ(listener_->strangers().sentence(),
            "1 connection that did not prove the secret of this job was refused, the last from 127.0.0.1");
}

TEST_F(AgentSockets, TheRateOfStrangersIsLimited) {
  std::vector<std::jthread> scans;
  std::atomic<std::uint64_t> opened = 0;
  rate_ = net::AcceptRate::while_starting;
  for (int i = 0; i < 2; ++i)
    scans.emplace_back([&](const std::stop_token& stop) {
      for (; !stop.stop_requested(); ++opened) const UniqueFd s = net::start_connect(address_);
    });
  EXPECT_TRUE(becomes([&] { return refused_ >= 1000; })) << opened;
  const FrameStream stream = connect(secret_);
  EXPECT_TRUE(becomes([&] { return proven_ == 1; }));
  rate_ = net::AcceptRate::while_running;
  const auto start = Deadline::Clock::now();
  const std::uint64_t before = refused_;
  std::this_thread::sleep_for(seconds(2));
  const std::uint64_t refused = refused_ - before;
  const double elapsed = std::chrono::duration<double>(Deadline::Clock::now() - start).count();
  EXPECT_LE(static_cast<double>(refused), 2 * 128 + 32 + net::AcceptRate::while_running * elapsed)
      << "of " << opened;
  EXPECT_GT(refused, 0u);
}

/// Connections that a listener of this network namespace had no place for.
std::int64_t overflows() {
  std::vector<std::string> names, values;
  for (const std::string& line : test::lines(test::content("/proc/net/netstat"))) {
    if (!line.starts_with("TcpExt:")) continue;
    auto& words = names.empty() ? names : values;
    for (const auto word : words_of(line)) words.emplace_back(word);
  }
  const auto at = std::ranges::find(names, "ListenOverflows") - names.begin();
  return at < std::ssize(values)
             ? parse_number<std::int64_t>(values[static_cast<std::size_t>(at)]).value_or(-1)
             : -1;
}

TEST(ConnectToRzrun, TriesOftenWhereStrangersFillTheQueue) {
  if (overflows() < 0) GTEST_SKIP() << "this kernel does not count overflows of listeners";
  const auto listeners = net::listen_at(net::listening_addresses({"127.0.0.1", 0}, ""), 0);
  ASSERT_EQ(::listen(listeners.front().get(), 0), 0);  // a place for one
  const net::SocketAddress address = net::local_address(listeners.front().get());
  const UniqueFd stranger = net::connect_tcp(address, Deadline::after(seconds(10)));
  ASSERT_TRUE(stranger);
  const std::int64_t before = overflows();
  EXPECT_THROW(
      connect_to_rzrun({"127.0.0.1", address.port()}, {std::make_shared<net::Secret>(net::Secret::random())},
                       Deadline::after(seconds(2)), [](auto&) {}),
      Error);
  EXPECT_GE(overflows() - before, 8) << "a kernel repeats the first packet once in 2 s";
}

TEST(ConnectToRzrun, TheLastReasonDoesNotHideThatOfAListenerBefore) {
  auto listeners = net::listen_at(net::listening_addresses({"127.0.0.1", 0}, ""), 0);
  const net::SocketAddress address = net::local_address(listeners.front().get());
  const auto close_one = [&](const std::string&) { listeners.clear(); };
  std::jthread stranger([&] {
    pollfd p{listeners.front().get(), POLLIN, 0};
    ::poll(&p, 1, 20000);
    net::SocketAddress from;
    net::accept_connection(p.fd, from);  // and ends it
  });
  try {
    connect_to_rzrun({"127.0.0.1", address.port()}, {std::make_shared<net::Secret>(net::Secret::random())},
                     Deadline::after(seconds(1)), close_one);
    FAIL();
  } catch (const Error& e) {
    const std::string text = e.what();
    EXPECT_TRUE(text.starts_with("connect to 127.0.0.1:")) << text;
    EXPECT_NE(text.find("Connection refused; before that 127.0.0.1:"), std::string::npos) << text;
    EXPECT_NE(text.find(" took the connection, but "), std::string::npos) << text;
  }
}

// ---- encryption

/// The two ends of a proved connection; all that passes is recorded.
struct AgentPair {
  SharedSecret secret = std::make_shared<net::Secret>(net::Secret::random());
  std::vector<UniqueFd> at = net::listen_at(net::listening_addresses({"127.0.0.1", 0}, ""), 0);
  test::Between between{net::local_address(at.front().get()).port()};
  std::optional<FrameStream> rzrun, agent;
  std::string error;

  AgentPair(net::Encryption of_rzrun, net::Encryption of_agent) {
    AgentListener listener(std::move(at), {secret, of_rzrun});
    std::atomic<bool> ended{false};
    std::thread other([&] {
      try {
        agent.emplace(connect_to_rzrun({"127.0.0.1", between.address().port()}, {secret, of_agent},
                                       Deadline::after(seconds(20)), [](auto&) {}));
      } catch (const Error& e) {
        error = e.what();
      }
      ended = true;
    });
    for (const auto end = Deadline::after(seconds(30)); !end.expired() && !(ended && (rzrun || !agent));) {
      std::vector<pollfd> wait;
      listener.append_descriptors(wait);
      ::poll(wait.data(), wait.size(), 10);
      for (auto& c : listener.advance()) rzrun.emplace(std::move(c.stream));
    }
    other.join();
  }
};

/// The next frame, once poll() has reported each of its parts; nullopt if poll() reports nothing.
std::optional<Frame> next_frame(FrameStream& from, FrameStream& to) {
  for (;;) {
    if (auto frame = to.parser.next()) return frame;
    from.flush();
    std::vector<pollfd> wait;
    from.append_descriptors(wait);
    to.append_descriptors(wait);
    if (::poll(wait.data(), wait.size(), 20'000) <= 0 || to.ended()) return {};
    to.receive();
  }
}

TEST(EncryptedAgents, FramesOfEverySizePassBothWaysAndNobodyReadsThem) {
  for (const auto encryption : {net::Encryption::always, net::Encryption::off}) {
    AgentPair pair(encryption, encryption);
    ASSERT_TRUE(pair.rzrun && pair.agent) << pair.error;
    for (FrameStream* const end : {&*pair.rzrun, &*pair.agent}) end->parser.begin();
    const std::string pattern = "a line of a rank that is easily found";
    for (const std::size_t size : {0, 1, 16'379, 16'384, 600'000, 10 << 20}) {
      const std::string payload = pattern + std::string(size, 'x');
      for (const bool by_agent : {false, true}) {
        FrameStream &from = by_agent ? *pair.agent : *pair.rzrun, &to = by_agent ? *pair.rzrun : *pair.agent;
        from.send(Frame::Kind::message, payload);
        const auto frame = next_frame(from, to);
        ASSERT_TRUE(frame) << size << ' ' << to.why_ended();
        EXPECT_TRUE(frame->payload == payload) << size;
        EXPECT_TRUE(from.all_sent());
      }
    }
    EXPECT_EQ(pair.between.recorded().find(pattern) != std::string::npos, encryption == net::Encryption::off);
  }
}

TEST(EncryptedAgents, AnotherChoiceIsAnErrorAtOnce) {
  const auto begin = std::chrono::steady_clock::now();
  const AgentPair pair(net::Encryption::always, net::Encryption::off);
  EXPECT_FALSE(pair.agent);
  EXPECT_NE(pair.error.find("is of this job, but it encrypts (RZ_ENCRYPTION=on), and this process has "
                            "RZ_ENCRYPTION=off"),
            std::string::npos)
      << pair.error;
  EXPECT_LT(std::chrono::steady_clock::now() - begin, seconds(15));
}

TEST(EncryptedAgents, AChangedBitEndsTheConnectionWithTheReason) {
  AgentPair pair(net::Encryption::always, net::Encryption::always);
  ASSERT_TRUE(pair.rzrun && pair.agent) << pair.error;
  pair.rzrun->parser.begin();
  pair.between.change_next(100);
  pair.agent->send(Frame::Kind::message, std::string(1000, 'x'));
  EXPECT_FALSE(next_frame(*pair.agent, *pair.rzrun));
  EXPECT_NE(pair.rzrun->why_ended().find("something between the hosts changes"), std::string::npos)
      << pair.rzrun->why_ended();
}

// More than one call of receive() reads, and all of it is in memory once the socket is drained.
TEST(EncryptedAgents, BytesReadAheadAreNotForgotten) {
  const net::Secret secret = net::Secret::random();
  const net::AuthenticationKey key(&secret, net::Purpose::agent, "");
  const auto listeners = net::listen_at(net::listening_addresses({"127.0.0.1", 0}, ""), 0);
  UniqueFd near = net::connect_tcp(net::local_address(listeners.front().get()), Deadline::after(seconds(5)));
  pollfd p{listeners.front().get(), POLLIN, 0};
  ASSERT_EQ(::poll(&p, 1, 10'000), 1);
  net::SocketAddress from_near;
  UniqueFd far = net::accept_connection(listeners.front().get(), from_near);
  const int space = 4 << 20;
  for (const int option : {SO_SNDBUF, SO_SNDBUFFORCE})
    ::setsockopt(near.get(), SOL_SOCKET, option, &space, sizeof space);
  auto client = net::Authentication::client(key, {}, net::Encryption::always);
  auto server = net::Authentication::server(key, 0, 0, net::Encryption::always);
  const auto proven = net::Authentication::Status::proven;
  for (const auto end = Deadline::after(seconds(20));
       (client.status() != proven || server.status() != proven) && !end.expired();)
    client.advance(near.get()), server.advance(far.get());
  FrameStream from(net::Stream(std::move(near), client.take_tls()));
  FrameStream to(net::Stream(std::move(far), server.take_tls()));
  to.parser.begin();
  for (std::size_t size = 8 * 65'536 + 1'000; size < 8 * 65'536 + 80'000; size += 13'000) {
    from.send(Frame::Kind::message, std::string(size, 'x'));
    from.flush();
    const auto frame = next_frame(from, to);
    ASSERT_TRUE(frame) << size;
    EXPECT_EQ(frame->payload.size(), size);
  }
}

}  // namespace
}  // namespace rz::rzrun
