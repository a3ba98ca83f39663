// Runs: alone

// A host program may set a locale of its own: numbers that the library reads and writes are not changed by
// it.
#include <gtest/gtest.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <locale>
#include <numeric>
#include <vector>

#include "comm/bootstrap.h"
#include "comm/bootstrap/local_rendezvous.h"
#include "comm/communicator.h"
#include "comm/core/text.h"
#include "comm/os/cgroup.h"
#include "comm/shared_memory/shared_memory.h"
#include "comm/topology.h"
#include "tests/support/ranks.h"

namespace rz {
namespace {

using std::chrono::seconds;

/// Groups of one digit, so that no number of two digits is read or written whole.
struct Groups final : std::numpunct<char> {
  explicit Groups(char separator) : separator_(separator) {}
  char do_thousands_sep() const override { return separator_; }
  char do_decimal_point() const override { return separator_ == ',' ? '.' : ','; }
  std::string do_grouping() const override { return "\1"; }
  char separator_;
};

class HostLocale : public testing::TestWithParam<char> {
 protected:
  void SetUp() override { before_ = std::locale::global(std::locale(std::locale(), new Groups(GetParam()))); }
  void TearDown() override { std::locale::global(before_); }
  std::locale before_;
};

TEST_P(HostLocale, NumbersOfTheSystemAreRead) {
  std::ostringstream shown;
  shown << 1234;
  ASSERT_EQ(shown.str().size(), 7u) << "the locale has no effect";
  const CpuLimits limits{{0, 7, 12, 345}, 16};
  EXPECT_EQ(parse_cpu_limits(to_string(limits)).processors, limits.processors);
  EXPECT_EQ(parse_cpu_limits(to_string(limits)).quota, 16);

  std::string root = (std::filesystem::temp_directory_path() / "rz-locale-XXXXXX").string();
  ASSERT_TRUE(mkdtemp(root.data()));
  const auto write = [&](const std::string& name, const std::string& text) {
    std::filesystem::create_directories(std::filesystem::path(root + name).parent_path());
    std::ofstream(root + name) << text;
  };
  write("/proc/self/cgroup", "0::/\n");
  write("/proc/meminfo", "MemTotal:  16384000 kB\nMemAvailable:   2048000 kB\nHugePages_Total: 12\n");
  write("/sys/fs/cgroup/cpu.max", "150000 100000\n");
  write("/sys/fs/cgroup/memory.max", "1073741824\n");
  write("/sys/fs/cgroup/memory.current", "12345678\n");
  write("/sys/fs/cgroup/memory.stat", "anon 345678\nfile 1234567\nshmem 234567\nslab_reclaimable 100000\n");
  EXPECT_EQ(cgroup_processors(root), 1.5);
  EXPECT_EQ(cgroup_memory(root), 1073741824ull - 12345678 + 1000000 + 100000);
  EXPECT_EQ(available_memory(root), 1073741824ull - 12345678 + 1000000 + 100000);
  write("/sys/fs/cgroup/memory.max", "max\n");
  EXPECT_EQ(available_memory(root), 2048000ull * 1024);
  std::filesystem::remove_all(root);
  EXPECT_GT(available_memory(), 1ull << 20);
}

TEST_P(HostLocale, RanksMeetAndRegisterMemory) {
  std::string runtime = (std::filesystem::temp_directory_path() / "rz-locale-XXXXXX").string();
  ASSERT_TRUE(mkdtemp(runtime.data()));
  setenv("XDG_RUNTIME_DIR", runtime.c_str(), 1);
  test::expect_processes(2, [&](int rank, std::shared_ptr<Store>) {
    const LaunchInfo launch{rank, 2, rank, 2, "job:locale", "openmpi", ""};
    CommOptions options;
    options.rendezvous_timeout = options.timeout = seconds(20);
    auto comm = Communicator::connect(rank, 2, store_for_launch(launch, seconds(20)), options);
    std::vector<float> x(1 << 16, static_cast<float>(rank + 1));
    comm.all_reduce({x.data(), x.size()}).wait();
    require(std::accumulate(x.begin(), x.end(), 0.0) == 3.0 * (1 << 16), Errc::system, "a wrong sum");
  });
  EXPECT_TRUE(std::filesystem::is_empty(runtime));
  std::filesystem::remove_all(runtime);
}

TEST_P(HostLocale, TextHasNumbersOfTheCLocale) {
  EXPECT_EQ(concat(12345, ' ', 1234.5), "12345 1234.5");
  EXPECT_EQ(human_bytes(1234567), "1.2 MiB");
  EXPECT_EQ(rounded(12345.678, 7), "12345.68");
  EXPECT_EQ(rounded(0.1, 17), "0.10000000000000001");
  EXPECT_EQ(parse_number<double>("1234.5"), 1234.5);
  EXPECT_EQ(parse_number<int>("1,234"), std::nullopt);
}

INSTANTIATE_TEST_SUITE_P(Separators, HostLocale, testing::Values(' ', ',', '.'));

}  // namespace
}  // namespace rz
