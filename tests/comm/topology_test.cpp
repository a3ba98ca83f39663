#include "comm/topology.h"

#include <gtest/gtest.h>
#include <sched.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <numeric>
#include <set>

#include "comm/core/error.h"

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

TEST(Topology, RanksShareOutTheCores) {
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
  std::size_t cores = 1;  // for as many ranks there is one each
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

TEST(Topology, RanksCrowdWhereTheyAreMoreThanTheirProcessors) {
  const Allowance first{{0}}, second{{1}}, both{{0, 1}}, half{{0, 1}, 1};
  const auto is_crowded = [](std::vector<Allowance> ranks) { return crowded(ranks); };
  EXPECT_FALSE(is_crowded({first, second})) << "each is bound to a processor of its own";
  EXPECT_TRUE(is_crowded({first, first})) << "both are bound to the same";
  EXPECT_FALSE(is_crowded({both, both}));
  EXPECT_TRUE(is_crowded({both, both, both}));
  EXPECT_TRUE(is_crowded({half, half})) << "the cgroup allows them one of two processors";
}

TEST(Topology, AllowancesAreToldInWords) {
  const Allowance a{{0, 3, 12}, 2}, read = allowance_from(in_words(a));
  EXPECT_EQ(read.processors, a.processors);
  EXPECT_EQ(read.quota, a.quota);
  EXPECT_EQ(in_words(a).find('\n'), std::string::npos) << "a line of the ranks' roster";
  EXPECT_TRUE(allowance_from("nonsense").processors.empty());
  EXPECT_FALSE(allowance().processors.empty());
}

}  // namespace
}  // namespace rz
