// Runs: serial
// Needs: lower_bound_bench rzrun all_reduce_perf

// The lower bound of an all_reduce of two ranks: the program that measures it, and the script that compares
// all_reduce_perf with it.

#include <gtest/gtest.h>
#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <map>
#include <nlohmann/json.hpp>
#include <set>
#include <sstream>

#include "comm/core/text.h"
#include "comm/topology.h"
#include "tests/support/program.h"

namespace rz {
namespace {

using test::Program;
using Words = std::vector<std::string>;

class LowerBound : public testing::Test {
 protected:
  void SetUp() override {
    if (usable_processors() < 2) GTEST_SKIP() << "two processes that spin need two processors";
  }
  void TearDown() override { std::filesystem::remove(json_); }

  const std::filesystem::path json_ = std::filesystem::temp_directory_path() /
                                      concat("rz_lower_bound_test_", static_cast<int>(::getpid()), ".json");
};

Words lower_bound(Words flags) {
  flags.insert(flags.begin(), test::built("lower_bound_bench"));
  return flags;
}

/// Lines of the table, split into words.
std::vector<Words> rows_of(const std::string& text) {
  std::vector<Words> rows;
  std::istringstream in(text);
  for (std::string line; std::getline(in, line);) {
    if (line.empty() || line[0] != ' ') continue;
    std::istringstream words(line);
    rows.emplace_back();
    for (std::string word; words >> word;) rows.back().push_back(word);
  }
  return rows;
}

void expect_status_two(const Words& command, const std::string& words) {
  Program p(command);
  EXPECT_EQ(p.wait(), 2);
  const std::string err = p.err();
  EXPECT_NE(err.find(words), std::string::npos) << err;
  EXPECT_EQ(std::count(err.begin(), err.end(), '\n'), 1) << err;
  EXPECT_EQ(p.out(), "");
}

TEST_F(LowerBound, HasARowForEverySizeAndMethod) {
  Program p(lower_bound({"--sizes", "8,64K", "-n", "20", "--rounds", "1", "--json", json_.string()}));
  ASSERT_EQ(p.wait(), 0) << p.err();
  const auto rows = rows_of(p.out());
  const auto json = nlohmann::json::parse(std::ifstream(json_)).at("rows");
  ASSERT_EQ(rows.size(), 8u) << p.out();
  ASSERT_EQ(json.size(), 8u);
  constexpr const char* methods[] = {"staged", "staged_in_place", "mapped", "mapped_in_place"};
  for (std::size_t i = 0; i < rows.size(); ++i) {
    ASSERT_EQ(rows[i].size(), 7u) << p.out();
    EXPECT_EQ(rows[i][0], i < 4 ? "8" : "65536");
    EXPECT_EQ(rows[i][1], methods[i % 4]);
    EXPECT_EQ(json[i].at("size"), i < 4 ? 8 : 65536);
    EXPECT_EQ(json[i].at("method"), methods[i % 4]);
    EXPECT_EQ(json[i].at("variant"), rows[i][6]);
    EXPECT_EQ(json[i].at("iterations"), 20);
    const double min = json[i].at("min"), median = json[i].at("median"), p99 = json[i].at("p99");
    EXPECT_GT(min, 0);
    EXPECT_LE(min, median);
    EXPECT_LE(median, p99);
    EXPECT_EQ(json[i].at("bus_bw").get<double>(), json[i].at("size").get<double>() / (median * 1e3));
  }
}

TEST_F(LowerBound, EveryVariantAddsUpAnySize) {
  // The program checks each sum, and fails if one is wrong. Sizes around the ends of chunks, halves and
  // lines.
  Program p(lower_bound(
      {"--sizes", "4,56,60,560,564,1020,8196,100004,1048580", "-n", "1", "--rounds", "1", "--all"}));
  ASSERT_EQ(p.wait(), 0) << p.err();
  std::set<std::string> kinds;
  for (const auto& row : rows_of(p.out())) kinds.insert(row.back().substr(0, row.back().find('/')));
  EXPECT_EQ(kinds, (std::set<std::string>{"lines", "one_shot", "two_phase", "read_both", "halves"}));
  EXPECT_NE(p.out().find("two_phase/262144/streamed"), std::string::npos) << p.out();
}

TEST_F(LowerBound, TheKernelsCopyAddsUpWhereItIsPermitted) {
  Program p(lower_bound({"--sizes", "16384,100004,1048580,4194308", "-n", "1", "--rounds", "1", "--all",
                         "--methods", "single_copy,single_copy_in_place"}));
  const int status = p.wait();
  if (status && p.err().find("Operation not permitted") != std::string::npos) GTEST_SKIP() << p.err();
  ASSERT_EQ(status, 0) << p.err();
  EXPECT_NE(p.out().find("single_copy/1048576/streamed"), std::string::npos) << p.out();
}

TEST_F(LowerBound, OnlyTheChosenMethods) {
  Program p(lower_bound({"--sizes", "1K", "-n", "5", "--methods", "mapped_in_place,staged"}));
  ASSERT_EQ(p.wait(), 0) << p.err();
  const auto rows = rows_of(p.out());
  ASSERT_EQ(rows.size(), 2u);
  EXPECT_EQ(rows[0][1], "staged");
  EXPECT_EQ(rows[1][1], "mapped_in_place");
}

TEST_F(LowerBound, ARankThatDiesIsNamed) {
  Program p(lower_bound({"--sizes", "8,4M", "-n", "100000", "--rounds", "1"}));
  p.wait_for("mapped_in_place");  // the first size's last row: there are two processes
  pid_t child = 0;
  std::ifstream(
      concat("/proc/", static_cast<int>(p.pid()), "/task/", static_cast<int>(p.pid()), "/children")) >>
      child;
  ASSERT_GT(child, 0);
  ::kill(child, SIGKILL);
  EXPECT_EQ(p.wait(), 1);
  EXPECT_NE(p.err().find("lower_bound_bench: rank 1 ended"), std::string::npos) << p.err();
  EXPECT_TRUE(test::gone(child));
}

TEST_F(LowerBound, AWrongCommandLineIsOneLine) {
  expect_status_two(lower_bound({"--sizes", "8,7"}),
                    "lower_bound_bench: --sizes: 7 is not a number of floats");
  expect_status_two(lower_bound({"--sizes", "much"}), "'much' is no size");
  expect_status_two(lower_bound({"--sizes", ""}), "--sizes");
  expect_status_two(lower_bound({"--methods", "nailed"}), "nailed");
  expect_status_two(lower_bound({"--size"}), "did you mean --sizes?");
  expect_status_two(lower_bound({"-n", "0"}), "iters");
}

Words against(Words flags) {
  const Words command{"python3", RZ_SOURCE_DIR "/bench/against_lower_bound.py", "--bin",
                      RZ_BINARY_DIR "/bin"};
  flags.insert(flags.begin(), command.begin(), command.end());
  return flags;
}

TEST_F(LowerBound, TheScriptComparesAllReduceWithIt) {
  Program p(against({"--rounds", "1", "--sizes", "64,8192", "--json", json_.string()}));
  ASSERT_EQ(p.wait(), 0) << p.err();
  const auto json = nlohmann::json::parse(std::ifstream(json_));
  EXPECT_EQ(json.at("rounds"), 1);
  ASSERT_EQ(json.at("rows").size(), 8u) << "2 sizes, 2 memories, in place and not";
  EXPECT_EQ(rows_of(p.out()).size(), 8u) << p.out();
  for (const auto& row : json.at("rows")) {
    EXPECT_GT(row.at("ours_p99_us").get<double>(), 0);
    EXPECT_EQ(row.at("ratio").get<double>(),
              row.at("lower_bound_us").get<double>() / row.at("ours_us").get<double>());
  }
}

TEST_F(LowerBound, AWrongCommandLineOfTheScriptIsOneLine) {
  expect_status_two(against({"--sizes", "8,x"}), "against_lower_bound.py: --sizes: '8,x'");
  expect_status_two(against({"--memory", "mapped"}), "'mapped' is none of ordinary, symmetric");
  expect_status_two(against({"--rounds", "0"}), "--rounds 0");
  expect_status_two(against({"--nope"}), "--nope");
  expect_status_two(against({"--bin", "/nowhere"}), "no lower_bound_bench in /nowhere");
}

}  // namespace
}  // namespace rz
