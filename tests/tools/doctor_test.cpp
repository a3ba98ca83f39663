// Needs: doctor_lib doctor

// What doctor makes of facts: every lack is found, with its remedy, and a host without one has none.

#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <functional>

#include "comm/core/error.h"
#include "comm/net/socket.h"
#include "tests/support/error_of.h"
#include "tests/support/fuzz.h"
#include "tests/support/program.h"
#include "tests/support/rzrun.h"
#include "tools/doctor/checks.h"
#include "tools/doctor/instructions.h"
#include "tools/doctor/report.h"
#include "tools/rzrun/hosts/hosts.h"

namespace rz::doctor {
namespace {

constexpr std::uint64_t mib = 1 << 20, gib = std::uint64_t{1} << 30;

/// A host that lacks nothing.
HostFacts sound_host(int number = 1) {
  HostFacts f;
  f.name = concat("node", number), f.version = "0.9.0", f.kernel = "6.6.10-generic", f.clock = 1000;
  f.memory_available = 32 * gib, f.memory_total = 64 * gib;
  f.huge_pages = "madvise";
  f.l2 = mib, f.l3 = 32 * mib, f.l3_processors = 8;
  f.has_dev_shm = true, f.dev_shm_bytes = 32 * gib, f.dev_shm_free = 30 * gib;
  f.open_files = 8, f.open_files_soft = 1024, f.open_files_hard = 65536;
  f.max_processes = 100000, f.user_processes = 50;
  f.processors = {0, 1, 2, 3, 4, 5, 6, 7}, f.all_processors = 8, f.cores = 8;
  f.machine = "x86_64", f.instructions = {"avx", "avx2", "fma", "aes"};
  f.ptrace_scope = 0;
  f.address = concat("10.0.0.", number);
  f.own_addresses = {f.address}, f.master_addresses = {"10.0.0.1"};
  f.interfaces = {{"lo", "127.0.0.1", 65536}, {"eth0", f.address, 1500}};
  f.secret_digest = "1.2.3";
  f.devices = f.gpus = 8, f.driver = "550.1", f.cuda = "12.4", f.nccl = "2.20.5";
  return f;
}

Job single_node() { return {.ranks = 4, .local_ranks = 4}; }
Job two_nodes() { return {.nodes = 2, .ranks = 8, .local_ranks = 4, .master = "node1"}; }
Job two_nodes_of_gpus() {
  Job job = two_nodes();
  job.cuda = true;
  return job;
}

std::vector<Finding> not_ok(const std::vector<Finding>& all) {
  std::vector<Finding> some;
  std::ranges::copy_if(all, std::back_inserter(some), [](auto& f) { return f.verdict != Verdict::ok; });
  return some;
}

/// The only finding that is not ok.
Finding only_lack(const std::vector<Finding>& all) {
  const auto lacks = not_ok(all);
  EXPECT_EQ(lacks.size(), 1u);
  for (const Finding& f : lacks) EXPECT_FALSE(f.remedy.empty()) << f.check;
  return lacks.empty() ? Finding{} : lacks.front();
}

TEST(Doctor, ASoundHostLacksNothing) {
  for (const Job& job : {single_node(), two_nodes(), two_nodes_of_gpus()})
    for (const Finding& f : check_host("node1", sound_host(), job)) {
      EXPECT_EQ(f.verdict, Verdict::ok) << f.check << ": " << f.found;
      EXPECT_EQ(f.remedy, "") << f.check;
      EXPECT_FALSE(f.found.empty() || f.needed.empty()) << f.check;
    }
}

struct Lack {
  const char* check;
  Verdict verdict;
  Job job;
  std::function<void(HostFacts&)> make;
  const char* remedy;  ///< a part of it
};

TEST(Doctor, EveryLackHasItsRemedy) {
  using F = HostFacts;
  const auto missing = Verdict::missing, warning = Verdict::warning;
  const std::vector<Lack> lacks = {
      {"kernel", warning, single_node(), [](F& f) { f.kernel = "4.15.0-20"; }, "Upgrade"},
      {"memory", missing, single_node(), [](F& f) { f.memory_available = 3 * mib; }, "--memory="},
      {"memory", warning, single_node(), [](F& f) { f.memory_available = 100 * mib; }, "--memory="},
      {"shared memory", missing, single_node(),
       [](F& f) { f.shared_memory_error = "memfd_create: Operation not permitted"; }, "seccomp"},
      {"shared memory", missing, single_node(), [](F& f) { f.max_file = mib / 2; }, "ulimit -f"},
      {"shared memory", warning, single_node(), [](F& f) { f.max_file = gib; }, "ulimit -f"},
      {"/dev/shm", missing, two_nodes_of_gpus(), [](F& f) { f.has_dev_shm = false, f.dev_shm_free = 0; },
       "mount -t tmpfs"},
      {"/dev/shm", warning, two_nodes_of_gpus(), [](F& f) { f.dev_shm_bytes = f.dev_shm_free = 64 * mib; },
       "--shm-size=1g"},
      {"/dev/shm", missing, two_nodes_of_gpus(), [](F& f) { f.dev_shm_free = 39 * mib; }, "--shm-size=1g"},
      {"locked memory", missing, two_nodes_of_gpus(),
       [](F& f) { f.infiniband = {"mlx5_0"}, f.max_locked = 64 << 10; }, "ulimit -l unlimited"},
      {"overcommit", warning, single_node(), [](F& f) { f.overcommit = 2, f.commit_left = gib; },
       "vm.overcommit_memory=0"},
      {"huge pages", warning, single_node(), [](F& f) { f.huge_pages = ""; }, "TRANSPARENT_HUGEPAGE"},
      {"open files", missing, single_node(), [](F& f) { f.open_files_hard = 40; }, "--nofile="},
      {"processes", missing, single_node(), [](F& f) { f.cgroup_processes = 10; }, "--pids-limit"},
      {"processes", missing, single_node(), [](F& f) { f.max_processes = 60; }, "ulimit -u"},
      {"processors", warning, single_node(), [](F& f) { f.quota = 2; }, "--cpus=N"},
      {"instructions", warning, single_node(),
       [](F& f) {
         f.instructions = {"avx", "aes"};
       },
       "AVX2"},
      {"OPENBLAS_CORETYPE", missing, single_node(), [](F& f) { f.openblas_core = "SkylakeX"; },
       "unset OPENBLAS_CORETYPE"},
      {"OPENBLAS_CORETYPE", warning, single_node(), [](F& f) { f.openblas_core = "nehalem"; },
       "unset OPENBLAS_CORETYPE"},
      {"OPENBLAS_CORETYPE", warning, single_node(), [](F& f) { f.openblas_core = "Hasswell"; },
       "unset OPENBLAS_CORETYPE"},
      {"AES", warning, two_nodes(),
       [](F& f) {
         f.instructions = {"avx2", "fma"};
       },
       "qemu -cpu host"},
      {"single copy", warning, single_node(),
       [](F& f) { f.cma_error = "process_vm_readv: Operation not permitted", f.ptrace_scope = 3; },
       "next boot"},
      {"single copy", warning, single_node(),
       [](F& f) { f.cma_error = "process_vm_readv: Operation not permitted"; }, "SYS_PTRACE"},
      {"own name", warning, two_nodes(), [](F& f) { f.own_addresses = {"127.0.1.1"}; }, "/etc/hosts"},
      {"own name", warning, single_node(), [](F& f) { f.own_name_error = "getaddrinfo of 'node1'"; },
       "/etc/hosts"},
      {"MASTER_ADDR", missing, two_nodes(), [](F& f) { f.master_error = "getaddrinfo of 'node1'"; },
       "MASTER_ADDR"},
      {"MASTER_ADDR", missing, two_nodes(), [](F& f) { f.master_addresses = {"10.0.0.9"}; }, "first host"},
      {"MASTER_ADDR", warning, two_nodes(), [](F& f) { f.master_addresses = {"127.0.1.1"}; }, "/etc/hosts"},
      {"interface", missing, two_nodes(),
       [](F& f) { f.address = "", f.address_error = "no network interface"; }, "RZ_INTERFACE"},
      {"RZ_PORTS", missing, two_nodes(), [](F& f) { f.ports = "41000-41003", f.ports_free = 4; },
       "RZ_PORTS=41000-41004"},
      {"RZ_PORTS", missing, single_node(), [](F& f) { f.ports = "41000-41003"; }, "RZ_PORTS="},
      {"secret", missing, two_nodes(), [](F& f) { f.secret_error = "other users may access it"; },
       "chmod 600"},
      {"GPUs", missing, two_nodes_of_gpus(), [](F& f) { f.devices = f.gpus = 0, f.driver = ""; },
       "--gpus all"},
      {"GPUs", missing, two_nodes_of_gpus(), [](F& f) { f.devices = 0; }, "RZ_CUDA=ON"},
      {"GPUs", warning, two_nodes_of_gpus(), [](F& f) { f.devices = 2; }, "Start 2 ranks"},
      {"NCCL", missing, two_nodes_of_gpus(), [](F& f) { f.nccl_error = "no libnccl.so.2"; }, "libnccl2"},
      {"temporary directory", missing, single_node(), [](F& f) { f.rendezvous_error = "mkdir"; }, "TMPDIR"},
      {"temporary directory", warning, two_nodes(), [](F& f) { f.rendezvous_error = "mkdir"; }, "TMPDIR"},
      {"trial group", missing, single_node(), [](F& f) { f.group_error = "cannot start a thread"; },
       "message"},
  };
  for (const Lack& lack : lacks) {
    HostFacts facts = sound_host();
    lack.make(facts);
    SCOPED_TRACE(concat(lack.check, ", ", lack.remedy));
    const Finding f = only_lack(check_host("node1", facts, lack.job));
    EXPECT_EQ(f.check, lack.check);
    EXPECT_EQ(f.verdict, lack.verdict) << f.found;
    EXPECT_NE(f.remedy.find(lack.remedy), std::string::npos) << f.remedy;
  }
}

TEST(Doctor, InstructionsAreThoseOfTheFirstProcessor) {
  EXPECT_EQ(read_instructions("processor : 0\nflags\t\t: fpu avx sse2 avx2 xyz fma aes\n\nflags : sve\n"),
            (std::vector<std::string>{"avx", "avx2", "fma", "aes"}));
  EXPECT_EQ(read_instructions("Features : fp asimd aes sve bf16\n"),
            (std::vector<std::string>{"asimd", "aes", "sve", "bf16"}));
  EXPECT_TRUE(read_instructions("").empty());
  HostFacts f = sound_host();
  EXPECT_EQ(describe_instructions(f), "AVX2");
  for (const char* more : {"avx512f", "avx512dq", "avx512cd", "avx512bw", "avx512vl"})
    f.instructions.emplace_back(more);
  EXPECT_EQ(describe_instructions(f), "AVX-512");
  f.instructions.insert(f.instructions.end(), {"amx_bf16", "avx512_bf16"});
  EXPECT_EQ(describe_instructions(f), "AVX-512 with BF16, AMX");
  f.openblas_core = "SKYLAKEX";
  EXPECT_TRUE(not_ok(check_host("node1", f, single_node())).empty());
  f.machine = "aarch64", f.instructions = {"asimd", "sve", "aes"}, f.openblas_core = "NEOVERSEN1";
  EXPECT_EQ(describe_instructions(f), "aarch64 with SVE");
  EXPECT_TRUE(not_ok(check_host("node1", f, single_node())).empty());
}

TEST(Doctor, AContainerWithOneProcessorIsOversubscribed) {
  HostFacts facts = sound_host();
  facts.processors = {5}, facts.cores = 1;
  const Finding f = only_lack(check_host("node1", facts, single_node()));
  EXPECT_EQ(f.check, "processors");
  EXPECT_EQ(f.found, "1 of 8");
  EXPECT_EQ(f.needed, "4, one a rank");
  EXPECT_TRUE(not_ok(check_host("node1", facts, {.ranks = 1, .local_ranks = 1})).empty());
}

TEST(Doctor, HardwareThreadsAreNoCores) {
  HostFacts facts = sound_host();
  facts.cores = 2, facts.processors = {0, 1, 2, 3};
  EXPECT_EQ(only_lack(check_host("node1", facts, single_node())).check, "placement");
  facts = sound_host();
  facts.numa_nodes = 2;
  EXPECT_EQ(only_lack(check_host("node1", facts, single_node())).remedy.find("Let the job use all of them"),
            0u);
}

TEST(Doctor, WhatAJobDoesNotUseIsNotAsked) {
  HostFacts f = sound_host();
  f.has_dev_shm = false, f.max_locked = 64 << 10, f.nccl_error = "none", f.devices = 0, f.driver = "";
  EXPECT_TRUE(not_ok(check_host("node1", f, two_nodes())).empty());
}

TEST(Doctor, OpenFilesGrowWithTheRanksOfOtherHosts) {
  HostFacts f = sound_host();
  f.open_files_hard = 1024;
  Job job = two_nodes();
  EXPECT_TRUE(not_ok(check_host("node1", f, job)).empty());
  job.ranks = 516, job.first = false, job.sockets = 2;
  const Finding lack = only_lack(check_host("node1", f, job));
  EXPECT_EQ(lack.check, "open files");
  EXPECT_EQ(lack.needed, concat(8 + 32 + (3 * 3 + 8) + 512 * 4, " in a rank"));
}

// ---- several hosts

std::vector<NamedFacts> two_sound_nodes() {
  return {{"a", sound_host(1), 999, 1001}, {"b", sound_host(2), 999, 1001}};
}

TEST(Doctor, EqualHostsDoNotDiffer) {
  const auto findings = compare_hosts(two_sound_nodes(), two_nodes_of_gpus());
  EXPECT_GE(findings.size(), 9u);
  EXPECT_TRUE(not_ok(findings).empty());
}

TEST(Doctor, WhatDiffersIsNamedWithBothHosts) {
  using F = HostFacts;
  const struct {
    const char* check;
    Verdict verdict;
    std::function<void(F&)> make;
    const char* found;
  } differences[] = {
      {"hosts", Verdict::missing,
       [](F& f) { f.name = "node1", f.address = "10.0.0.1", f.interfaces = sound_host(1).interfaces; },
       "a and b are one host"},
      {"ringzero", Verdict::missing, [](F& f) { f.version = "0.8.0"; }, "a 0.9.0, b 0.8.0"},
      {"NCCL", Verdict::missing, [](F& f) { f.nccl = "2.18.1"; }, "a 2.20.5, b 2.18.1"},
      {"driver", Verdict::warning, [](F& f) { f.driver = "535.4"; }, "b 535.4"},
      {"CUDA", Verdict::warning, [](F& f) { f.cuda = "12.2"; }, "b 12.2"},
      {"Open MPI", Verdict::warning, [](F& f) { f.open_mpi = "4.1.4"; }, "a none, b 4.1.4"},
      {"kernel", Verdict::warning, [](F& f) { f.kernel = "5.15.0"; }, "a 6.6.10-generic, b 5.15.0"},
      {"instructions", Verdict::warning, [](F& f) { f.instructions = {"avx"}; }, "a AVX2, b AVX"},
      {"instructions", Verdict::warning, [](F& f) { f.openblas_core = "Zen"; },
       "a AVX2, b AVX2 and OPENBLAS_CORETYPE=Zen"},
      {"MTU", Verdict::warning, [](F& f) { f.interfaces[1].mtu = 9000; }, "a 1500, b 9000"},
      {"clock", Verdict::warning, [](F& f) { f.clock = 1061; }, "a is 60.0 s behind b"},
      {"clock", Verdict::warning, [](F& f) { f.clock = 900; }, "b is 99.0 s behind a"},
      {"MASTER_ADDR", Verdict::missing, [](F& f) { f.master_addresses = {"10.9.9.9"}; },
       "a 10.0.0.1, b 10.9.9.9"},
      {"MASTER_ADDR", Verdict::warning,
       [](F& f) {
         f.master_addresses = {"10.0.0.1", "192.168.0.1"};
       },
       "b 10.0.0.1/192.168.0.1"},
  };
  for (const auto& d : differences) {
    auto all = two_sound_nodes();
    d.make(all[1].facts);
    SCOPED_TRACE(d.check);
    const Finding f = only_lack(compare_hosts(all, two_nodes_of_gpus()));
    EXPECT_EQ(f.check, d.check);
    EXPECT_EQ(f.verdict, d.verdict);
    EXPECT_NE(f.found.find(d.found), std::string::npos) << f.found;
  }
}

TEST(Doctor, SecretsAreComparedAndNotPrinted) {
  auto all = two_sound_nodes();
  const auto secret = [&] { return only_lack(compare_hosts(all, two_nodes())); };
  all[1].facts.secret_digest = "4.5.6";
  EXPECT_EQ(secret().found, "differs: a has one, b has one");
  all[1].facts.secret_digest = "", all[1].facts.secret_to_create = "/home/u/.config/ringzero/secret";
  EXPECT_EQ(secret().found, "a has one, b none yet");
  EXPECT_EQ(secret().verdict, Verdict::warning);
  all[0].facts.secret_digest = all[1].facts.secret_digest = "none";
  EXPECT_EQ(secret().remedy, "Let nobody in that reaches a port: unset RZ_INSECURE");
  const Report r{.ranks = 8, .nodes = 2, .facts = two_sound_nodes()};
  EXPECT_EQ(json(r).find("1.2.3"), std::string::npos);
}

TEST(Doctor, TheFirstHostMayKnowItsOwnNameAsLoopback) {
  auto all = two_sound_nodes();
  all[0].facts.master_addresses = {"127.0.1.1"};
  EXPECT_TRUE(not_ok(compare_hosts(all, two_nodes())).empty());
  Job second = two_nodes();
  second.first = false;
  HostFacts f = sound_host(2);
  f.master_addresses = {"127.0.1.1"};
  EXPECT_EQ(only_lack(check_host("b", f, second)).verdict, Verdict::missing)
      << "it would look for rank 0 on itself";
}

PairMeasurement good_pair(const char* from, const char* to) {
  return {.from = from,
          .to = to,
          .address = "10.0.0.2",
          .connected = true,
          .round_trip_us = 50,
          .send_rate = 1.2e9,
          .receive_rate = 1.1e9,
          .packet = 1500,
          .passed = 1500};
}

TEST(Doctor, PairsAreJudgedAloneAndBesideEachOther) {
  const PairMeasurement good = good_pair("a", "b");
  EXPECT_TRUE(not_ok(check_pairs(std::vector{good})).empty());
  PairMeasurement cut = good, slow = good, far = good, lossy = good, silent = good;
  cut.connected = false, cut.error = "connect to 10.0.0.2:1: Connection timed out";
  EXPECT_EQ(only_lack(check_pairs(std::vector{cut})).verdict, Verdict::missing);
  slow.send_rate = 5e8;
  EXPECT_TRUE(not_ok(check_pairs(std::vector{slow})).empty());
  EXPECT_EQ(only_lack(check_pairs(std::vector{good, slow, good, good})).check, "route")
      << "half of what others have";
  slow.send_rate = 9e7;
  EXPECT_EQ(only_lack(check_pairs(std::vector{slow})).verdict, Verdict::warning);
  far.round_trip_us = 20000;
  EXPECT_EQ(only_lack(check_pairs(std::vector{far})).verdict, Verdict::warning);
  lossy.packet = 9000;
  EXPECT_EQ(only_lack(check_pairs(std::vector{lossy})).found,
            "packets above 1500 bytes are lost without a notice");
  lossy.error = "a transfer stopped";
  EXPECT_EQ(not_ok(check_pairs(std::vector{lossy})).size(), 2u);
  for (const Finding& f : not_ok(check_pairs(std::vector{lossy}))) EXPECT_EQ(f.verdict, Verdict::missing);
  silent.passed = 0;
  EXPECT_TRUE(not_ok(check_pairs(std::vector{silent})).empty());
}

// ---- what goes over the wire

TEST(Doctor, FactsAreTheSameAfterJson) {
  HostFacts f = sound_host();
  f.cgroup_processes = 0, f.max_locked = ~std::uint64_t{0}, f.ptrace_scope = -1,
  f.own_name_error = "a \"quoted\"\nline";
  EXPECT_EQ(parse_facts(to_json(f), "b"), f);
  EXPECT_EQ(to_json(f).find('\n'), std::string::npos);
  const HostFacts real = read_facts({"localhost", 1, false, ""});
  EXPECT_EQ(parse_facts(to_json(real), "b"), real);
}

TEST(Doctor, FactsOfAnotherVersionNameTheHostAndTheKey) {
  std::string text = to_json(sound_host());
  const auto replaced = [&](const std::string& from, const std::string& to) {
    std::string changed = text;
    const auto at = changed.find(from);
    EXPECT_NE(at, std::string::npos) << from;
    return changed.replace(at, from.size(), to);
  };
  const auto error = [](const std::string& json) {
    return std::string(test::error_of([&] { parse_facts(json, "node7"); }).what());
  };
  EXPECT_NE(error(replaced("\"quota\"", "\"quote\"")).find("node7: quota: is missing"), std::string::npos);
  EXPECT_NE(error(replaced("\"processors\":[0,", "\"processors\":[-1,")).find("node7: processors"),
            std::string::npos);
  EXPECT_NE(error(replaced("\"open_files\":8", "\"open_files\":-8")).find("node7: open_files"),
            std::string::npos);
  EXPECT_NE(error(replaced("\"mtu\":1500", "\"mtu\":\"x\"")).find("mtu"), std::string::npos);
  EXPECT_NE(error("[]"), "");
  EXPECT_NE(error(text.substr(0, text.size() / 2)), "");
}

/// Calls `parse` with a text of which bytes or numbers are changed; true if it was read. What is refused is
/// refused in one line with the host.
template <class F>
bool is_read(test::Fuzz& fuzz, std::string text, const F& parse) {
  auto& random = fuzz.random;
  const char* const values[] = {"-1",
                                "0",
                                "1",
                                "2147483647",
                                "9007199254740992",
                                "18446744073709551615",
                                "1e300",
                                "null",
                                "true",
                                "[]",
                                "{}",
                                "\"\\u001b[2J\\n\"",
                                "\"\""};
  for (auto n = random() % 4; n > 0; --n) {
    const auto at = text.find(':', random() % text.size());
    const auto end = text.find_first_of(",}", at);
    if (end != std::string::npos) text.replace(at + 1, end - at - 1, values[random() % std::size(values)]);
  }
  if (random() % 2) text = fuzz.changed(text, 2);
  try {
    parse(text);
    return true;
  } catch (const Error& e) {
    EXPECT_EQ(e.code(), Errc::config) << e.what();
    EXPECT_EQ(std::string_view(e.what()).find("node7"), 0u) << e.what();
    for (const char* c = e.what(); *c; ++c) EXPECT_TRUE(static_cast<unsigned char>(*c) >= 32) << e.what();
    return false;
  }
}

/// Judges whatever another host prints as its facts, and prints the result.
TEST(DoctorFuzz, AnyFactsAreJudgedOrRefused) {
  const std::string text = to_json(sound_host());
  test::Fuzz fuzz(500);
  long read = 0;
  while (fuzz.next())
    read += is_read(fuzz, text, [](const std::string& json) {
      const std::vector<NamedFacts> all{{"a", sound_host(), 999, 1001},
                                        {"b", parse_facts(json, "node7"), 999, 1001}};
      Report r{.ranks = 8, .nodes = 2, .facts = all};
      Job second = two_nodes_of_gpus();
      second.first = false;
      r.findings = check_host("b", all[1].facts, second);
      for (const Finding& f : compare_hosts(all, second)) r.findings.push_back(f);
      for (const char c : table(r))
        ASSERT_TRUE(c == '\n' || (static_cast<unsigned char>(c) >= 32 && c != 127)) << table(r);
      doctor::json(r);
    });
  EXPECT_GT(read, fuzz.tried() / 20);
  EXPECT_LT(read, fuzz.tried());
}

TEST(DoctorFuzz, AnyRequestIsReadOrRefused) {
  const std::string text = to_json(FactsRequest{"node1", 2, true, "1234"});
  test::Fuzz fuzz(500);
  long read = 0;
  while (fuzz.next())
    read += is_read(fuzz, text, [](const std::string& json) { parse_request(json, "node7"); });
  EXPECT_GT(read, fuzz.tried() / 20);
  EXPECT_LT(read, fuzz.tried());
}

TEST(DoctorFuzz, AnyMeasurementIsJudgedOrRefused) {
  const std::string text = to_json(good_pair("a", "b"));
  test::Fuzz fuzz(500);
  long read = 0;
  while (fuzz.next())
    read += is_read(fuzz, text, [](const std::string& json) {
      Report r;
      r.pairs = {good_pair("a", "b"), parse_measurement(json, "node7")};
      r.findings = check_pairs(r.pairs);
      table(r), doctor::json(r);
    });
  EXPECT_GT(read, fuzz.tried() / 20);
  EXPECT_LT(read, fuzz.tried());
}

TEST(Doctor, PortsAreCountedForTheRanksOfAHostAndTheFirstHostsStore) {
  Job job = two_nodes();
  HostFacts f = sound_host();
  f.ports = "41000-41009", f.ports_free = 5;
  EXPECT_TRUE(not_ok(check_host("node1", f, job)).empty());
  job.first = false, f.ports_free = 4;
  EXPECT_TRUE(not_ok(check_host("node2", f, job)).empty());
  f.ports_free = 3;
  EXPECT_EQ(only_lack(check_host("node2", f, job)).found, "3 of 41000-41009 are free");
}

/// As in rzrun, which starts its agent here without a remote shell.
TEST(Doctor, ThisHostOfAHostfileNeedsNoRemoteShellAndItsPortsAreThoseOfTheVariable) {
  const test::Folder folder;
  const UniqueFd busy = net::listen_tcp(net::resolve({"0.0.0.0", 0}).front());
  const int port = net::local_address(busy.get()).port();
  std::ofstream(folder / "hosts") << hosts::own_name() << " slots=1\n";
  test::Program p({test::built("doctor"), "--hostfile", folder / "hosts", "--rsh", "/nowhere/rsh", "--json"},
                  {{"RZ_PORTS", concat(port, "-", port)}});
  p.wait();
  EXPECT_EQ(p.out().find("remote shell"), std::string::npos) << p.out();
  EXPECT_NE(p.out().find(concat("0 of ", port, "-", port, " are free")), std::string::npos) << p.out();
}

TEST(Doctor, TheResultIsTheLastLine) {
  Report r{.ranks = 8, .nodes = 2};
  r.findings = {{"a", "kernel", "6.6", "4.16"}};
  EXPECT_TRUE(runs(r));
  EXPECT_NE(table(r).find("\n\ndoctor: a job of 8 ranks on 2 hosts would run\n"), std::string::npos)
      << table(r);
  r.findings.push_back({"a", "memory", "1 MiB", "1 GiB", Verdict::warning, "Raise it: ulimit -m"});
  EXPECT_TRUE(runs(r));
  EXPECT_NE(table(r).find("  warning memory  1 MiB; needed: 1 GiB\n"), std::string::npos) << table(r);
  EXPECT_NE(table(r).find("would run; 1 warning\n"), std::string::npos) << table(r);
  r.findings.push_back({"", "clock", "\x1b[2J", "", Verdict::missing, "Set it: date"});
  EXPECT_FALSE(runs(r));
  EXPECT_NE(table(r).find("would not run: 1 check fails, 1 warning\n"), std::string::npos) << table(r);
  EXPECT_EQ(table(r).find('\x1b'), std::string::npos) << "what another host printed";
}

TEST(Doctor, WrongWordsAreRefused) {
  test::expect_refusal("doctor", {"--ranks", "0"}, "--ranks");
  test::expect_refusal("doctor", {"--device", "tpu"}, "--device");
  test::expect_refusal("doctor", {"--hostfile", "/nowhere"}, "/nowhere");
  test::expect_refusal("doctor", {"--rsh", " "}, "--rsh");
  test::expect_refusal("doctor", {"--master-addr", "-x"}, "no host");
}

}  // namespace
}  // namespace rz::doctor
