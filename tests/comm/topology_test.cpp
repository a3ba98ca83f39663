// Runs: alone

#include "comm/topology.h"

#include <gtest/gtest.h>
#include <sched.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <numeric>
#include <set>

#include "comm/core/error.h"
#include "comm/os/cgroup.h"
#include "comm/os/thread_team.h"
#include "comm/shared_memory/shared_memory.h"
#include "tests/support/folder.h"
#include "tests/support/ranks.h"

namespace rz {
namespace {

TEST(Topology, NumbersAreConsistent) {
  const Topology t = read_topology();
  EXPECT_GE(t.packages, 1);
  EXPECT_GE(t.cores, t.packages);
  EXPECT_GE(t.threads, t.cores);
  EXPECT_GE(t.numa_nodes, 1);
  EXPECT_GE(t.usable, 1);
  EXPECT_LE(t.usable, t.threads);
  EXPECT_EQ(t.usable, usable_processors());
  EXPECT_GT(t.memory_bytes, 1ull << 28);
  EXPECT_EQ(caches().l2, t.l2_bytes);
  EXPECT_EQ(caches().l3, t.l3_bytes);
  EXPECT_GE(caches().l3_processors, 1);
  EXPECT_LE(caches().l3_processors, t.threads);
  EXPECT_FALSE(t.processor.empty());
  const std::string text = describe(t);
  EXPECT_NE(text.find(t.processor), std::string::npos);
  EXPECT_NE(text.find("this process may use"), std::string::npos);
}

TEST(Topology, RanksDivideTheCores) {
  const auto all = processors_for(0, 1);
  EXPECT_EQ(static_cast<int>(all.size()), [] {
    cpu_set_t set;
    sched_getaffinity(0, sizeof set, &set);
    return CPU_COUNT(&set);
  }());
  const auto given_to = [](int size) {
    std::multiset<int> given;
    for (int rank = 0; rank < size; ++rank) {
      const auto mine = processors_for(rank, size);
      EXPECT_FALSE(mine.empty());
      EXPECT_TRUE(std::is_sorted(mine.begin(), mine.end()));
      given.insert(mine.begin(), mine.end());
    }
    return given;
  };
  std::size_t cores = 1;  // with as many ranks, one for each
  while (given_to(static_cast<int>(cores) + 1).size() == all.size()) ++cores;
  for (int size = 1; size <= 8; ++size) {
    const auto given = given_to(size);
    const auto ranks = static_cast<std::size_t>(size);
    const std::size_t often = ranks <= cores ? 1 : ranks % cores ? ranks : ranks / cores;
    EXPECT_EQ(given.size(), all.size() * often);
    for (const int p : all)
      EXPECT_EQ(given.count(p), often) << "processor " << p << " of " << size << " ranks";
  }
  EXPECT_THROW(processors_for(2, 2), Error);
  EXPECT_THROW(processors_for(-1, 2), Error);
}

TEST(Threads, AreRefusedWithTheLimit) {
  const auto endings = test::run_processes(1, [](int, std::shared_ptr<Store>) {
    ThreadTeam before(2);  // a team of which some threads exist ends them
    const rlimit few{3, 3};
    require(setrlimit(RLIMIT_NPROC, &few) == 0, Errc::io, "setrlimit");
    if (geteuid() == 0) require(setresuid(65534, 65534, 65534) == 0, Errc::io, "setresuid");
    ThreadTeam(8);
  });
  EXPECT_NE(endings[0].error.find("cannot start a thread"), std::string::npos) << endings[0].error;
  EXPECT_NE(endings[0].error.find("(ulimit -u): 3,"), std::string::npos) << endings[0].error;
  EXPECT_NE(endings[0].error.find("(pids.max): "), std::string::npos) << endings[0].error;
}

TEST(Topology, BindingLimitsWhatIsUsable) {
  const int first = processors_for(0, 1).front();
  const pid_t child = fork();
  if (child == 0)
    _exit(bind_process({first}) && usable_processors() == 1 && processors_for(0, 1) == std::vector{first}
              ? 0
              : 1);
  int status = 1;
  waitpid(child, &status, 0);
  EXPECT_EQ(status, 0);
  EXPECT_FALSE(bind_process({})) << "no processor at all";
}

TEST(Topology, OfAnotherMachineIsNoPlaceForRanks) {
  const auto endings = test::run_processes(1, [](int, std::shared_ptr<Store>) {
    setenv("HWLOC_SYNTHETIC", "pack:1 core:1 pu:1", 1);
    processors_for(0, 2);
  });
  EXPECT_NE(endings[0].error.find("hwloc describes another machine"), std::string::npos) << endings[0].error;
  EXPECT_NE(endings[0].error.find("--bind none"), std::string::npos) << endings[0].error;
}

using test::Folder;

constexpr unsigned long long mib = 1 << 20;

/// 1 GiB, of which `used` MiB are.
void limit_v2(const Folder& f, const std::string& group, int used, const std::string& stat) {
  f.put("/sys/fs/cgroup" + group + "/memory.max", concat(1024 * mib, '\n'));
  f.put("/sys/fs/cgroup" + group + "/memory.current",
        concat(static_cast<unsigned long long>(used) * mib, '\n'));
  f.put("/sys/fs/cgroup" + group + "/memory.stat", stat);
}

TEST(Cgroup, PagesOfFilesAreNotUsedMemory) {
  const Folder f;
  f.put("/proc/meminfo", "MemTotal: 8388608 kB\nMemAvailable: 4194304 kB\n");
  f.put("/proc/self/cgroup", "0::/\n");
  EXPECT_EQ(cgroup_memory(f.path()), std::nullopt);
  EXPECT_EQ(available_memory(f.path()), 4096 * mib);
  limit_v2(f, "", 1002, "");
  EXPECT_EQ(available_memory(f.path()), 22 * mib);
  // All but 100 MiB is page cache, of which 40 MiB are shared memory.
  limit_v2(f, "", 1002,
           concat("anon ", 62 * mib, "\nfile ", 900 * mib, "\nshmem ", 40 * mib, "\nslab ", 41 * mib,
                  "\nslab_reclaimable ", 40 * mib, "\nslab_unreclaimable ", mib, '\n'));
  EXPECT_EQ(available_memory(f.path()), (22 + 860 + 40) * mib);
  f.put("/sys/fs/cgroup/memory.max", "max\n");
  EXPECT_EQ(available_memory(f.path()), 4096 * mib);
  f.put("/sys/fs/cgroup/memory.max", concat(500 * mib, '\n'));
  f.put("/sys/fs/cgroup/memory.stat", "");
  EXPECT_EQ(available_memory(f.path()), 0u) << "more is used than the limit, which was lowered";
}

TEST(Cgroup, OfVersion1CountsSharedMemoryAlone) {
  const Folder f;
  f.put("/proc/self/cgroup", "9:cpu,cpuacct:/a\n4:memory:/docker/abc\n0::/\n");
  const std::string group = "/sys/fs/cgroup/memory";  // of a container, whose place on the machine is unknown
  f.put(group + "/memory.limit_in_bytes", concat(1024 * mib));
  f.put(group + "/memory.usage_in_bytes", concat(1000 * mib));
  f.put(group + "/memory.stat",
        concat("cache 5\ntotal_cache ", 800 * mib, "\ntotal_shmem ", 100 * mib, '\n'));
  EXPECT_EQ(cgroup_memory(f.path()), 724 * mib);
}

TEST(Cgroup, EveryGroupAboveCounts) {
  const Folder f;
  f.put("/proc/self/cgroup", "1:name=systemd:/x\n0::/user/job/step\n");
  limit_v2(f, "/user/job/step", 100, "");
  limit_v2(f, "/user/job", 700, concat("file ", 200 * mib));
  limit_v2(f, "/user", 300, "");
  limit_v2(f, "/other", 1024, "");
  EXPECT_EQ(cgroup_memory(f.path()), 524 * mib);
  f.put("/sys/fs/cgroup/user/job/cpu.max", "150000 100000\n");
  f.put("/sys/fs/cgroup/user/job/step/cpu.max", "max 100000\n");
  f.put("/sys/fs/cgroup/user/cpu.max", "400000 100000\n");
  EXPECT_EQ(cgroup_processors(f.path()), 1.5);
  f.put("/proc/self/cgroup", "3:cpu,cpuacct:/a/b\n0::/\n");
  EXPECT_EQ(cgroup_processors(f.path()), std::nullopt);
  f.put("/sys/fs/cgroup/cpu/a/cpu.cfs_quota_us", "300000\n");
  f.put("/sys/fs/cgroup/cpu/a/cpu.cfs_period_us", "100000\n");
  f.put("/sys/fs/cgroup/cpu/cpu.cfs_quota_us", "-1\n");
  f.put("/sys/fs/cgroup/cpu/cpu.cfs_period_us", "100000\n");
  EXPECT_EQ(cgroup_processors(f.path()), 3);
}

TEST(Cgroup, HasPlaceForSoManyProcesses) {
  const Folder f;
  f.put("/proc/self/cgroup", "8:pids:/a/b\n0::/\n");
  EXPECT_EQ(cgroup_processes(f.path()), std::nullopt);
  f.put("/sys/fs/cgroup/pids/a/b/pids.max", "max\n");
  f.put("/sys/fs/cgroup/pids/a/b/pids.current", "7\n");
  EXPECT_EQ(cgroup_processes(f.path()), std::nullopt);
  f.put("/sys/fs/cgroup/pids/a/pids.max", "64\n");
  f.put("/sys/fs/cgroup/pids/a/pids.current", "20\n");
  EXPECT_EQ(cgroup_processes(f.path()), 44u);
  f.put("/proc/self/cgroup", "0::/job\n");
  f.put("/sys/fs/cgroup/job/pids.max", "8\n");
  f.put("/sys/fs/cgroup/job/pids.current", "9\n");
  EXPECT_EQ(cgroup_processes(f.path()), 0u) << "the limit was lowered";
}

TEST(Topology, RanksDivideProcessorsAndQuotaAmongTheirThreads) {
  std::vector<int> many(64);
  std::iota(many.begin(), many.end(), 0);
  const std::vector<int> low(many.begin(), many.begin() + 32), high(many.begin() + 32, many.end());
  const auto threads = [](const std::vector<CpuLimits>& ranks) { return threads_for(ranks.front(), ranks); };
  EXPECT_EQ(threads({{many}}), 64);
  EXPECT_EQ(threads({{many}, {many}}), 32);
  EXPECT_EQ(threads({{low}, {high}}), 32);
  EXPECT_EQ(threads({{many, 4}}), 4);
  EXPECT_EQ(threads({{many, 4}, {many, 4}}), 2);
  EXPECT_EQ(threads({{low, 4}, {high, 4}}), 2) << "bound to cores of their own, in one container";
  EXPECT_EQ(threads({{low, 4}, {high}}), 4);
  EXPECT_EQ(threads({{low}, {high, 4}}), 32);
  EXPECT_EQ(threads({{many, 3}, {many, 3}, {many, 3}, {many, 3}}), 1);
}

TEST(Topology, MoreRanksThanProcessorsAreOversubscribed) {
  const CpuLimits first{{0}}, second{{1}}, both{{0, 1}}, half{{0, 1}, 1};
  const auto is_crowded = [](std::vector<CpuLimits> ranks) { return oversubscribed(ranks); };
  EXPECT_FALSE(is_crowded({first, second})) << "each is bound to a processor of its own";
  EXPECT_TRUE(is_crowded({first, first})) << "both are bound to the same";
  EXPECT_FALSE(is_crowded({both, both}));
  EXPECT_TRUE(is_crowded({both, both, both}));
  EXPECT_TRUE(is_crowded({half, half})) << "the cgroup allows them one of two processors";
}

TEST(Topology, CpuLimitsAreSerialized) {
  const CpuLimits a{{0, 3, 12}, 2}, read = parse_cpu_limits(to_string(a));
  EXPECT_EQ(read.processors, a.processors);
  EXPECT_EQ(read.quota, a.quota);
  EXPECT_EQ(to_string(a).find('\n'), std::string::npos) << "a line of the ranks' peer info";
  EXPECT_TRUE(parse_cpu_limits("nonsense").processors.empty());
  EXPECT_FALSE(cpu_limits().processors.empty());
}

}  // namespace
}  // namespace rz
