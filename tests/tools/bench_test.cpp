// Needs: rzrun_lib rz_bench rzrun all_reduce_perf sendrecv_perf

// The nccl-tests-style tools: their output, their figures, and that they detect wrong results.

#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <numeric>
#include <sstream>

#include "bench/harness/harness.h"
#include "bench/harness/report.h"
#include "bench/harness/values.h"
#include "bench/support/numbers.h"
#include "bench/support/statistics.h"
#include "comm/core/error.h"
#include "comm/device/cuda_runtime.h"
#include "comm/net/socket.h"
#include "tests/support/error_of.h"
#include "tests/support/program.h"
#include "tools/command_line/output_file.h"

namespace rz {
namespace {

using namespace bench;
using test::Program;

constexpr std::string_view names[] = {"all_reduce", "reduce_scatter", "all_gather", "broadcast", "reduce",
                                      "alltoall",   "alltoallv",      "scatter",    "gather",    "sendrecv"};

std::vector<std::string> words(const std::string& line) {
  std::istringstream in(line);
  std::vector<std::string> all;
  for (std::string word; in >> word;) all.push_back(word);
  return all;
}

/// A run of threads of this process.
struct Outcome {
  int status = 0;
  std::string text;
  /// The table's rows, as a parser of nccl-tests' output finds them.
  std::vector<std::vector<std::string>> rows() const {
    std::vector<std::vector<std::string>> found;
    std::istringstream in(text);
    for (std::string line; std::getline(in, line);)
      if (!line.empty() && line[0] == ' ') found.push_back(words(line));
    return found;
  }
  bool has_text(const std::string& line) const { return text.find(line) != std::string::npos; }
};

Options options_of(std::string_view collective, std::vector<std::string> flags) {
  std::vector<const char*> argv{"perf"};
  for (const auto& f : flags) argv.push_back(f.c_str());
  return parse_options(collective_from_name(collective), static_cast<int>(argv.size()), argv.data()).options;
}

Outcome run_threads(std::string_view collective, const std::vector<std::string>& flags,
                    const Hooks& hooks = {}) {
  Outcome outcome;
  const Options options = options_of(collective, flags);
  outcome.status = run(
      collective_from_name(collective), options, [&](const std::string& t) { outcome.text += t; }, hooks);
  return outcome;
}

TEST(BenchNumbers, FitTheirColumns) {
  EXPECT_EQ(fit_time(1.5), "   1.50");
  EXPECT_EQ(fit_time(9999.99), "9999.99");
  EXPECT_EQ(fit_time(12345.67), "12345.7");
  EXPECT_EQ(fit_time(123456.7), " 123457");
  EXPECT_EQ(fit_time(9876543), "9876543");
  EXPECT_EQ(fit_time(98765432), "9.9e+07");
  EXPECT_EQ(fit_bandwidth(0), "  0.00");
  EXPECT_EQ(fit_bandwidth(123.456), "123.46");
  EXPECT_EQ(fit_bandwidth(1234.56), "1234.6");
  EXPECT_EQ(fit_bandwidth(1234567), " 1e+06");
}

TEST(BenchOptions, DefaultsAreThoseOfNcclTests) {
  const Options o = options_of("all_reduce", {});
  EXPECT_EQ(o.min_bytes, 32u << 20);
  EXPECT_EQ(o.max_bytes, 32u << 20);
  EXPECT_EQ(o.step_bytes, 1u << 20);
  EXPECT_EQ(o.iterations, 20);
  EXPECT_EQ(o.warmup, 1);
  EXPECT_EQ(o.checks, 1);
  EXPECT_EQ(o.average, Average::mean);
  EXPECT_EQ(o.dtypes, std::vector<DType>{DType::f32});
}

TEST(BenchOptions, LongAndShortFlagsMeanTheSame) {
  const Options a =
      options_of("reduce", {"-b8", "-e", "1K", "-f", "2", "-r", "-1", "-d", "all", "-o", "all"});
  const Options b = options_of("reduce", {"--minbytes", "8", "--maxbytes=1K", "--stepfactor", "2", "--root",
                                          "-1", "--datatype", "all", "--op", "all"});
  for (const Options& o : {a, b}) {
    EXPECT_EQ(o.min_bytes, 8u);
    EXPECT_EQ(o.max_bytes, 1024u);
    EXPECT_EQ(o.next_size(8), 16u);
    EXPECT_EQ(o.root, -1);
    EXPECT_EQ(o.dtypes.size(), 12u);
    EXPECT_EQ(o.ops.size(), 6u);
  }
}

TEST(BenchOptions, AWrongFlagIsOneLine) {
  const std::map<std::string, std::vector<std::string>> bad = {
      {"mulsum or all", {"-o", "median"}},
      {"bfloat16", {"-d", "float23"}},
      {"one device", {"-g", "2"}},
      {"graphs", {"-G", "1"}},
      {"only 0 is supported", {"-x", "1"}},
      {"peer_cuda runs kernels", {"-D", "1", "-R", "2"}},
      {"null stream", {"-y", "1"}},
      {"captures no null stream", {"--device", "cuda", "-y", "1", "-G", "1"}},
      {"leave out --device host", {"--backend", "peer_cuda", "--device", "host"}},
      {"--device", {"--device", "cuda:9"}},
      {"more than", {"-b", "2", "-e", "1"}},
      {"no size", {"-b", "lots"}},
      {"--nope", {"--nope"}},
      {"iters", {"-n", "0"}},
      {"--percentiles with -G", {"--device", "cuda", "--percentiles", "-G", "2"}},
      {"leaves no iteration", {"--percentiles", "-n", "5", "-K", "5"}},
      {"one operation per iteration", {"--touch", "-m", "2"}},
      {"never reaches -e", {"-b", "1", "-e", "9", "-i", "0"}}};
  for (const auto& [words, flags] : bad) {
    try {
      options_of("all_reduce", flags);
      ADD_FAILURE() << flags[0] << " was accepted";
    } catch (const Error& e) {
      const std::string what = e.what();
      EXPECT_EQ(e.code(), Errc::config);
      EXPECT_NE(what.find(words), std::string::npos) << what;
      EXPECT_EQ(what.find('\n'), std::string::npos) << what;
    }
  }
}

TEST(BenchOptions, DeviceBackendsMeanDeviceMemory) {
  for (const std::string backend : {"nccl", "peer_cuda"})
    EXPECT_TRUE(options_of("reduce", {"--backend", backend}).cuda);
  for (const std::string backend : {"auto", "native", "mpi"}) {
    EXPECT_FALSE(options_of("reduce", {"--backend", backend}).cuda);
    EXPECT_TRUE(options_of("reduce", {"--backend", backend, "--device", "cuda"}).cuda);
  }
  const Options o =
      options_of("reduce", {"--backend", "nccl", "-t", "2", "-g", "4", "-R", "1", "-G", "3", "-z", "2"});
  EXPECT_EQ(o.backend, "nccl");
  EXPECT_EQ(o.threads, 2);
  EXPECT_EQ(o.gpus, 4);
  EXPECT_EQ(o.registered, 1);
  EXPECT_EQ(o.graph, 3);
  EXPECT_EQ(o.blocking, 2);
  EXPECT_FALSE(o.null_stream);
  EXPECT_TRUE(options_of("reduce", {"--device", "cuda", "-y", "1"}).null_stream);
}

void expect_status_two(const std::vector<std::string>& flags, const std::string& words) {
  test::expect_refusal("all_reduce_perf", flags, words);
}

TEST(BenchOptions, AWrongFlagExitsWithStatusTwo) {
  expect_status_two({"-d", "float23"}, "bfloat16");
  expect_status_two({"--device", "cuda:9"}, "cuda:9");
  expect_status_two({"--backend", "pigeon"},
                    "the backend 'pigeon' is unknown; choose one of auto, native, mpi");
}

TEST(BenchOptions, ThreeMeansPlainMemoryThatIsRegistered) {
  EXPECT_EQ(options_of("reduce", {"-R", "3"}).registered, 3);
  expect_status_two({"-R", "4"}, "--local_register: Value 4");
  expect_status_two({"-R", "3", "--device", "cuda"}, "register_buffer is for host memory");
  Program p(
      {test::built("all_reduce_perf"), "-t", "2", "-b", "1K", "-e", "1M", "-f", "32", "-n", "2", "-R", "3"});
  EXPECT_EQ(p.wait(), 0) << p.err();
  EXPECT_NE(p.out().find("# Out of bounds values : 0 OK"), std::string::npos) << p.out();
}

TEST(BenchOptions, AMachineWithoutADeviceIsReported) {
  if (cuda::device_count() > 0) GTEST_SKIP() << "this machine has devices";
  for (const std::string backend : {"auto", "native", "nccl", "peer_cuda"})
    expect_status_two({"--backend", backend, "--device", "cuda"}, "cuda:0 is not there: ");
}

TEST(BenchValues, AreExactInEveryDtypeAndOp) {
  // Combined here in double from the ranks' actual contributions; all but means must agree bit for bit.
  for (int ranks : {1, 2, 3, 65})
    for (auto op : {ReduceOp::sum, ReduceOp::prod, ReduceOp::min, ReduceOp::max}) {
      std::vector<std::vector<std::int8_t>> inputs(ranks, std::vector<std::int8_t>(Pattern::period));
      for (int r = 0; r < ranks; ++r)
        Pattern::input(DType::i8, op, r, ranks, 7).fill(inputs[r].data(), Pattern::period);
      std::vector<std::int8_t> want(Pattern::period), got(Pattern::period);
      Pattern::combined(DType::i8, op, ranks, 7).fill(got.data(), got.size());
      for (std::size_t i = 0; i < want.size(); ++i) {
        int total = inputs[0][i];
        for (int r = 1; r < ranks; ++r) {
          const int v = inputs[r][i];
          total = op == ReduceOp::sum    ? total + v
                  : op == ReduceOp::prod ? total * v
                  : op == ReduceOp::min  ? std::min(total, v)
                                         : std::max(total, v);
          ASSERT_LE(std::abs(total), 127) << "a partial result does not fit";
        }
        want[i] = static_cast<std::int8_t>(total);
      }
      EXPECT_EQ(want, got) << ranks << " ranks, " << name(ReduceOp(op));
    }
}

TEST(BenchValues, EveryWrongElementIsCounted) {
  const Pattern pattern = Pattern::input(DType::f32, ReduceOp::sum, 1, 2, 3);
  std::vector<float> data(3 * Pattern::period);
  pattern.fill(data.data(), data.size(), 17);
  EXPECT_EQ(pattern.wrong(data.data(), data.size(), 17), 0u);
  data[0] += 1;
  data[Pattern::period] += 1;
  data.back() += 1;
  EXPECT_EQ(pattern.wrong(data.data(), data.size(), 17), 3u);
  EXPECT_GT(pattern.wrong(data.data(), data.size(), 18), data.size() / 2) << "a shift by one goes unnoticed";
  EXPECT_GT((Pattern::input(DType::f32, ReduceOp::sum, 0, 2, 3).wrong(data.data(), data.size(), 17)),
            data.size() / 2)
      << "another rank's data goes unnoticed";
}

TEST(BenchStatistics, PercentilesAreSamplesByNearestRank) {
  std::vector<double> backwards;
  for (int i = 200; i > 0; --i) backwards.push_back(i);
  const Summary all = summarize(backwards);
  EXPECT_EQ(all.count, 200u);
  EXPECT_EQ(all.min, 1);
  EXPECT_EQ(all.p50, 100);
  EXPECT_EQ(all.p99, 198);
  EXPECT_EQ(all.max, 200);
  EXPECT_EQ(all.mean, 100.5);
  const Summary rest = summarize(backwards, 197);  // 3, 2 and 1 remain
  EXPECT_EQ(rest.count, 3u);
  EXPECT_EQ(rest.p50, 2);
  EXPECT_EQ(rest.p99, 3);
  EXPECT_EQ(rest.max, 3);
  EXPECT_EQ(summarize({7.5}).p99, 7.5);
  EXPECT_EQ(summarize({1, 2}, 9).count, 0u);
}

TEST(BenchReport, ARowIsThatOfNcclTests) {
  Row row{1024, 256, "float", "sum", -1, {12.345, 1.5, 2.25, 0}, {1e8, 0.001, 0, {}}, ""};
  EXPECT_EQ(row_line(row),
            "        1024           256     float     sum      -1"
            "    12.35    1.50    2.25       0  1.0e+08    0.00    0.00    N/A\n");
  row.out_of_place.slowest = Summary{3, 1, 2, 2.5, 3, 12345.67};
  row.in_place.slowest = Summary{3, 1, 2, 0.25, 3.25, 4};
  row.when = "2026-11-21 05:20:00";
  EXPECT_EQ(row_line(row),
            "        1024           256     float     sum      -1"
            "    12.35    1.50    2.25       0  1.0e+08    0.00    0.00    N/A"
            "     2.50     3.00  12345.7     0.25     3.25     4.00  2026-11-21 05:20:00\n");
}

std::vector<std::string> header_of(const std::string& text, const std::string& word) {
  std::istringstream in(text);
  for (std::string line; std::getline(in, line);)
    if (line[0] == '#' && line.find(word) != std::string::npos) return words(line);
  return {};
}

/// Sets a variable while it exists.
class Variable {
 public:
  Variable(std::string name, const std::string& value) : name_(std::move(name)) {
    setenv(name_.c_str(), value.c_str(), 1);
  }
  Variable(const Variable&) = delete;
  ~Variable() { unsetenv(name_.c_str()); }

 private:
  std::string name_;
};

TEST(BenchVariables, OfNcclTestsThatWouldChangeTheRunAreRefused) {
  struct {
    std::string collective, name, value, words;
  } refused[] = {
      {"all_reduce", "NCCL_TESTS_SPLIT", "AND 0x7", "NCCL_TESTS_SPLIT='AND 0x7' divides the ranks"},
      {"all_reduce", "NCCL_TESTS_SPLIT_MASK", "0x1", "NCCL_TESTS_SPLIT_MASK='0x1' divides the ranks"},
      {"gather", "NCCL_TESTS_DEVICE", "7", "CUDA_VISIBLE_DEVICES"},
      {"alltoallv", "NCCL_TESTS_ALLTOALLV_SPREAD", "0.0", "what each rank sends"},
      {"alltoallv", "NCCL_TESTS_ALLTOALLV_MATRIX_FILE", "traffic.txt", "what each rank sends"},
      {"alltoallv", "NCCL_TESTS_ALLTOALLV_MATRIX_SCALE", "2", "what each rank sends"},
      {"alltoallv", "NCCL_TESTS_ALLTOALLV_PRINT_SUMMARY", "1", "prints the bandwidth of each rank"},
      {"all_reduce", "NCCL_TESTS_MIN_BUSBW", "10", "has NCCL_TESTS_MIN_BW, NCCL_TESTS_SPLIT, "},
      {"all_reduce", "NCCL_TESTS_MIN_BW", "fast", "'fast' is no bandwidth in GB/s"},
      {"all_reduce", "NCCL_TESTS_MIN_BW", "nan", "'nan' is no bandwidth"},
      {"all_reduce", "NCCL_TESTS_MIN_BW", "-2", "'-2' is no bandwidth"}};
  for (const auto& [collective, name, value, words] : refused) {
    const Variable variable(name, value);
    const Error e = test::error_of([&] { run_threads(collective, {"-b", "8", "-e", "8"}); });
    EXPECT_EQ(e.code(), Errc::config) << name;
    EXPECT_NE(std::string(e.what()).find(words), std::string::npos) << e.what();
    EXPECT_NE(std::string(e.what()).find(name), std::string::npos) << e.what();
  }
  for (const auto& [name, value] :
       {std::pair{"NCCL_TESTS_ALLTOALLV_SPREAD", "0.0"}, {"NCCL_TESTS_SPLIT", ""}}) {
    const Variable variable(name, value);
    EXPECT_EQ(run_threads("all_reduce", {"-b", "8", "-e", "8"}).status, 0) << name << " has no effect";
  }
}

TEST(BenchVariables, LessThanNineTenthsOfMinBandwidthFail) {
  const std::vector<std::string> flags{"-t", "2", "-b", "1M", "-e", "1M", "-n", "2"};
  const auto average_line = [](const Outcome& o) { return header_of(o.text, "Avg bus bandwidth"); };
  EXPECT_EQ(average_line(run_threads("all_reduce", flags)).size(), 6u) << "without the variable: no verdict";
  const struct {
    std::string limit, verdict;
    int status;
  } cases[] = {{"100000", "FAILED", 7}, {"0.0001", "OK", 0}, {"0", "OK", 0}};
  for (const auto& [limit, verdict, status] : cases) {
    const Variable variable("NCCL_TESTS_MIN_BW", limit);
    const Outcome o = run_threads("all_reduce", flags);
    EXPECT_EQ(o.status, status) << limit;
    ASSERT_EQ(average_line(o).size(), 7u) << o.text;
    EXPECT_EQ(average_line(o).back(), verdict);
  }
  const Variable off("NCCL_TESTS_MIN_BW", "-1");  // nccl-tests' default
  EXPECT_EQ(average_line(run_threads("all_reduce", flags)).size(), 6u);
}

TEST(BenchVariables, TheThresholdOfRankZeroIsTheStatusOfAllRanks) {
  Program p({test::built("rzrun"), "-n", "2", "--prefix", "sh", "-c",
             "test $RANK = 0 && export NCCL_TESTS_MIN_BW=100000; " + test::built("all_reduce_perf") +
                 " -b 1M -e 1M -n 2 -a 0; echo status $?"});
  EXPECT_EQ(p.wait(), 0) << p.err();
  for (const char* line : {"[0] status 7", "[1] status 7", "FAILED"})
    EXPECT_NE(p.out().find(line), std::string::npos) << p.out();
}

TEST(BenchRun, HasTheLinesThatParsersExpect) {
  const Outcome o = run_threads("all_reduce", {"-t", "2", "-b", "8", "-e", "64K", "-f", "8", "-n", "2"});
  EXPECT_EQ(o.status, 0);
  EXPECT_EQ(o.rows().size(), 5u);
  EXPECT_TRUE(o.has_text("# Collective test starting: all_reduce_perf\n"));
  EXPECT_TRUE(o.has_text("minBytes 8 maxBytes 65536 step: 8(factor) warmup iters: 1 iters: 2 agg iters: 1"));
  EXPECT_TRUE(o.has_text("#  Rank  1 Group  0 Pid "));
  EXPECT_TRUE(o.has_text(" device  1 [0000:00:00]"));
  EXPECT_TRUE(o.has_text("out-of-place                       in-place          \n"));
  EXPECT_TRUE(o.has_text("# Out of bounds values : 0 OK\n# Avg bus bandwidth    : "));
  EXPECT_TRUE(o.has_text("#\n# Collective test concluded: all_reduce_perf\n"));
}

TEST(BenchRun, EveryCollectiveIsRightInEveryDtype) {
  for (auto collective : names)
    for (const char* threads : {"1", "2", "3"}) {
      const Outcome o = run_threads(collective, {"-t", threads, "-b", "8", "-e", "16K", "-f", "45", "-n", "1",
                                                 "-d", "all", "-r", "-1"});
      EXPECT_EQ(o.status, 0) << collective;
      EXPECT_TRUE(o.has_text("# Out of bounds values : 0 OK")) << collective << " on " << threads << "\n"
                                                               << o.text;
      EXPECT_GE(o.rows().size(), 12u * 3);
      for (const auto& row : o.rows()) {
        ASSERT_EQ(row.size(), 13u) << collective;
        EXPECT_EQ(row[8], "0") << collective;
        EXPECT_EQ(row[12], collective.starts_with("alltoall") || collective == "sendrecv" ? "N/A" : "0")
            << collective;
      }
    }
}

TEST(BenchRun, EveryOpIsRightInEveryDtype) {
  for (auto collective : {"all_reduce", "reduce_scatter", "reduce"}) {
    const Outcome o = run_threads(collective, {"-t", "2", "-b", "8", "-e", "64K", "-f", "90", "-n", "1", "-w",
                                               "0", "-d", "all", "-o", "all"});
    EXPECT_EQ(o.status, 0) << o.text;
    EXPECT_TRUE(o.has_text("# Out of bounds values : 0 OK")) << o.text;
    EXPECT_EQ(o.rows().size(), 12u * 6 * 3);
  }
}

TEST(BenchRun, CountsRootsAndOpsAreShownAsNcclTestsShowsThem) {
  const auto first = [](std::string_view c, std::vector<std::string> more = {}) {
    std::vector<std::string> flags{"-t", "2", "-b", "100", "-e", "100", "-n", "1"};
    flags.insert(flags.end(), more.begin(), more.end());
    const auto row = run_threads(c, flags).rows().at(0);
    return std::vector<std::string>(row.begin(), row.begin() + 5);
  };
  using Row5 = std::vector<std::string>;
  EXPECT_EQ(first("all_reduce"), (Row5{"100", "25", "float", "sum", "-1"}));
  EXPECT_EQ(first("all_gather"), (Row5{"96", "12", "float", "none", "-1"}));  // 16 B at a time for each rank
  EXPECT_EQ(first("reduce_scatter"), (Row5{"96", "12", "float", "sum", "-1"}));
  EXPECT_EQ(first("broadcast", {"-r", "1"}), (Row5{"100", "25", "float", "none", "1"}));
  EXPECT_EQ(first("reduce", {"-o", "max", "-d", "bfloat16"}), (Row5{"100", "50", "bfloat16", "max", "0"}));
  EXPECT_EQ(first("scatter"), (Row5{"96", "12", "float", "none", "0"}));
}

TEST(BenchRun, BusBandwidthFactors) {
  const std::map<std::string_view, double> at_four = {
      {"all_reduce", 1.5}, {"reduce_scatter", 0.75}, {"all_gather", 0.75}, {"alltoall", 0.75},
      {"alltoallv", 0.75}, {"gather", 0.75},         {"scatter", 0.75},    {"broadcast", 1},
      {"reduce", 1},       {"sendrecv", 1}};
  for (const auto& [collective, factor] : at_four)
    EXPECT_EQ(collective_from_name(collective).busbw_factor(4), factor) << collective;
}

TEST(BenchRun, DamageIsCountedAndFails) {
  Hooks hooks;
  hooks.before_check = [](int rank, Buffer result) {
    if (rank == 1 && result.count > 3) static_cast<float*>(result.data)[3] += 1;
  };
  const Outcome o =
      run_threads("all_reduce", {"-t", "2", "-b", "8", "-e", "512", "-f", "8", "-n", "1", "-c", "2"}, hooks);
  EXPECT_EQ(o.status, 7);
  ASSERT_EQ(o.rows().size(), 3u);
  EXPECT_EQ(o.rows()[0][8], "0") << "8 B have no fourth element";
  EXPECT_EQ(o.rows()[1][8], "2") << "one element in each of two checks";
  EXPECT_EQ(o.rows()[2][12], "2");
  EXPECT_TRUE(o.has_text("# Out of bounds values : 8 FAILED")) << o.text;
}

TEST(BenchRun, NoCheckMeansNotApplicable) {
  const Outcome o = run_threads("all_reduce", {"-t", "2", "-b", "64", "-e", "64", "-n", "1", "-c", "0"});
  EXPECT_EQ(o.rows().at(0).at(8), "N/A");
  EXPECT_EQ(o.rows().at(0).at(12), "N/A");
  EXPECT_EQ(o.rows().at(0).size(), 13u);
}

TEST(BenchRun, ResultsAreRightInEveryRunMode) {
  for (const std::vector<std::string>& more : std::vector<std::vector<std::string>>{{"-m", "3"},
                                                                                    {"-m", "300"},
                                                                                    {"-m", "3", "--separate"},
                                                                                    {"-m", "3", "-z", "3"},
                                                                                    {"-z", "1"},
                                                                                    {"-z", "1", "-m", "2"},
                                                                                    {"-z", "3"},
                                                                                    {"-R", "2"},
                                                                                    {"-u", "3"},
                                                                                    {"-C", "1"},
                                                                                    {"-a", "0"},
                                                                                    {"-a", "2"},
                                                                                    {"-a", "3"},
                                                                                    {"-T", "20"},
                                                                                    {"-I", "1", "-K", "1"},
                                                                                    {"-S", "1"},
                                                                                    {"-M", "1"},
                                                                                    {"-p", "1"}}) {
    std::vector<std::string> flags{"-t", "2", "-b", "4K", "-e", "8K", "-i", "4K", "-n", "3"};
    flags.insert(flags.end(), more.begin(), more.end());
    const Outcome o = run_threads("all_reduce", flags);
    EXPECT_EQ(o.status, 0) << more[0] << more[1];
    ASSERT_EQ(o.rows().size(), 2u) << more[0] << more[1];
    EXPECT_EQ(o.rows()[0].size(), more[0] == "-S" ? 15u : 13u);
    EXPECT_EQ(o.has_text("2 iterations of rank 0"), more[0] == "-I") << o.text;
    EXPECT_EQ(o.has_text("# Memory: "), more[0] == "-M");
  }
}

TEST(BenchOptions, AggregatedMeansAGroupUnlessEachIsACallOfItsOwn) {
  EXPECT_FALSE(options_of("reduce", {}).grouped());
  EXPECT_TRUE(options_of("reduce", {"-m", "2"}).grouped());
  EXPECT_TRUE(options_of("reduce", {"-m", "2", "-z", "3"}).grouped());
  for (const char* waits : {"1", "2"}) EXPECT_FALSE(options_of("reduce", {"-m", "2", "-z", waits}).grouped());
  EXPECT_FALSE(options_of("reduce", {"-m", "2", "--separate"}).grouped());
}

TEST(BenchRun, EveryCollectiveIsRightInAGroup) {
  for (auto collective : names)
    for (const char* threads : {"1", "3"}) {
      const Outcome o = run_threads(collective, {"-t", threads, "-b", "100", "-e", "70K", "-f", "700", "-n",
                                                 "2", "-m", "5", "-r", "-1"});
      EXPECT_EQ(o.status, 0) << collective;
      EXPECT_TRUE(o.has_text("# Out of bounds values : 0 OK")) << collective << "\n" << o.text;
      EXPECT_GE(o.rows().size(), 2u);
    }
}

/// Results that one check on 2 ranks covers, out of place and in place.
int results_of(std::vector<std::string> flags) {
  std::atomic<int> seen = 0;
  Hooks hooks;
  hooks.before_check = [&](int, Buffer) { ++seen; };
  flags.insert(flags.end(), {"-t", "2", "-n", "1"});
  EXPECT_EQ(run_threads("all_reduce", flags, hooks).status, 0);
  return seen;
}

TEST(BenchRun, OfAGroupEachResultIsChecked) {
  EXPECT_EQ(results_of({"-b", "64", "-e", "64"}), 4);
  EXPECT_EQ(results_of({"-b", "64", "-e", "64", "-m", "7"}), 7 * 4);
  EXPECT_EQ(results_of({"-b", "64", "-e", "64", "-m", "7", "--separate"}), 4);
  EXPECT_EQ(results_of({"-b", "600K", "-e", "600K", "-m", "2"}), 4) << "both use the same memory";
}

TEST(BenchRun, PercentilesAreSixMoreColumns) {
  const std::vector<std::string> flags{"-t", "2", "-b", "1K", "-e", "8K", "-f", "2", "-n", "30"};
  std::vector<std::string> more = flags;
  more.push_back("--percentiles");
  const Outcome without = run_threads("all_gather", flags), with = run_threads("all_gather", more);
  EXPECT_EQ(with.status, 0);
  EXPECT_EQ(without.rows().at(0).size(), 13u);
  ASSERT_EQ(with.rows().size(), 4u);
  for (const auto& row : with.rows()) {
    ASSERT_EQ(row.size(), 19u);
    EXPECT_EQ(row[8], "0");
    for (const std::size_t first : {13u, 16u}) {
      EXPECT_GT(std::stod(row[first]), 0);
      EXPECT_LE(std::stod(row[first]), std::stod(row[first + 1]));
      EXPECT_EQ(row[first + 1], row[first + 2]) << "of 30 iterations p99 is the worst";
    }
  }
  const auto header = header_of(with.text, "busbw"), plain = header_of(without.text, "busbw");
  ASSERT_EQ(header.size(), plain.size() + 6);
  EXPECT_EQ(std::vector<std::string>(header.end() - 6, header.end()),
            (std::vector<std::string>{"p50", "p99", "worst", "p50", "p99", "worst"}));
}

TEST(BenchRun, OneRankIsTheSlowest) {
  const Outcome o =
      run_threads("all_reduce", {"-b", "64K", "-e", "64K", "-n", "9", "-K", "2", "-I", "1", "--percentiles"});
  ASSERT_EQ(o.rows().size(), 1u);
  const auto row = o.rows()[0], line = header_of(o.text, "in-place: 7 iterations of rank 0");
  ASSERT_EQ(row.size(), 19u);
  const auto after = [&](const std::string& word) { return *(std::ranges::find(line, word) + 1); };
  for (const auto& [column, word] : std::map<std::size_t, std::string>{{16, "p50"}, {17, "p99"}, {18, "max"}})
    EXPECT_EQ(row[column], after(word)) << o.text;
}

std::string json_path() {
  return std::filesystem::temp_directory_path() /
         concat("rz_bench_test_", static_cast<int>(::getpid()), ".json");
}

nlohmann::json read_json() {
  const auto j = nlohmann::json::parse(std::ifstream(json_path()));
  std::filesystem::remove(json_path());
  return j;
}

nlohmann::json json_of(std::string_view collective, std::vector<std::string> flags, const Hooks& hooks = {},
                       int status = 0) {
  flags.insert(flags.end(), {"-J", json_path()});
  EXPECT_EQ(run_threads(collective, flags, hooks).status, status);
  return read_json();
}

TEST(BenchRun, TouchedBuffersKeepTheirValues) {
  for (const char* collective : {"all_reduce", "all_gather", "broadcast"}) {
    const auto j =
        json_of(collective, {"-t", "2", "-b", "1K", "-e", "64K", "-f", "8", "-I", "1", "-a", "0", "--touch"});
    for (const auto& row : j.at("results"))
      for (const char* place : {"out_of_place", "in_place"}) {
        const std::vector<double> samples = row.at(place).at("samples");
        const double sum = std::accumulate(samples.begin(), samples.end(), 0.0);
        EXPECT_NEAR(row.at(place).at("time").get<double>(), sum / static_cast<double>(samples.size()), 0.01)
            << collective << ": the time is that of the operations alone";
      }
  }
}

TEST(BenchRun, JsonHoldsThePercentilesOfTheSlowestRank) {
  const auto j =
      json_of("all_reduce", {"-t", "2", "-b", "4K", "-e", "4K", "-n", "200", "-I", "1", "--percentiles"});
  const auto& f = j.at("results").at(0).at("in_place");
  std::vector<double> rank_0 = f.at("samples");
  ASSERT_EQ(rank_0.size(), 200u);
  const Summary own = summarize(rank_0);
  const auto& slowest = f.at("percentiles");
  EXPECT_EQ(slowest.at("iterations"), 200);
  EXPECT_GE(slowest.at("p50").get<double>(), own.p50);
  EXPECT_GE(slowest.at("p99").get<double>(), own.p99);
  EXPECT_GE(slowest.at("worst").get<double>(), own.max);
  const auto plain = json_of("all_reduce", {"-t", "2", "-b", "8", "-e", "8", "--percentiles"});
  EXPECT_FALSE(plain.at("results")[0].at("in_place").contains("samples")) << "they were not requested";
  EXPECT_FALSE(
      json_of("all_reduce", {"-b", "8", "-e", "8"}).at("results")[0].at("in_place").contains("percentiles"));
}

TEST(BenchRun, VerboseShowsTheAlgorithmOfEachRowAndOverrides) {
  using Words = std::vector<std::string>;
  const Words sizes{"-t", "2", "-b", "8", "-e", "128K", "-f", "16384", "-n", "2", "--verbose"};
  const auto with = [&](Words more) {
    more.insert(more.begin(), sizes.begin(), sizes.end());
    return more;
  };
  const Outcome table = run_threads("all_reduce", sizes);
  EXPECT_TRUE(table.has_text("# 8 B: one_shot over shm (built-in table: all_reduce intra-node, up to 64 KiB"))
      << table.text;
  EXPECT_TRUE(table.has_text("# 131072 B: two_shot over shm, pieces of ")) << table.text;
  EXPECT_EQ(table.rows().size(), 2u);
  EXPECT_TRUE(
      run_threads("all_reduce", with({"--algorithm", "two_shot"})).has_text("(forced: all_reduce=two_shot)"));
  EXPECT_TRUE(run_threads("broadcast", with({"--algorithm", "tree"})).has_text("schedule:tree over shm"));
  EXPECT_TRUE(run_threads("alltoall", with({"-R", "1"})).has_text("zero_copy over shm"));
  EXPECT_TRUE(run_threads("sendrecv", sizes).has_text("message over shm"));
  EXPECT_FALSE(run_threads("all_reduce", {"-t", "2", "-b", "8", "-e", "8"}).has_text("built-in table"));
  EXPECT_THROW(run_threads("broadcast", with({"--algorithm", "ring"})), Error);
}

TEST(BenchRun, VerboseDependsOnTypeAndOperation) {
  const auto path =
      std::filesystem::temp_directory_path() / concat("rz_bench_table_", static_cast<int>(::getpid()));
  std::ofstream(path) << "all_reduce intra_node schedule:chain\n";
  Program p({test::built("all_reduce_perf"), "-t", "2", "-b", "8", "-e", "8", "-n", "1", "-d", "all", "-o",
             "all", "--verbose"},
            {{"RZ_TUNING", path.string()}});
  EXPECT_EQ(p.wait(), 0) << p.err();
  std::filesystem::remove(path);
  std::istringstream in(p.out());
  std::string choice;
  int seen = 0;
  for (std::string line; std::getline(in, line);) {
    if (line.starts_with("# 8 B: ")) choice = line;
    if (line.empty() || line[0] != ' ') continue;
    const auto row = words(line);
    const bool rounds = (row[2] == "half" || row[2] == "bfloat16" || row[2].starts_with("f8")) &&
                        row[3] != "min" && row[3] != "max";
    EXPECT_TRUE(choice.starts_with(rounds ? "# 8 B: one_shot" : "# 8 B: schedule:chain")) << choice << line;
    ++seen;
  }
  EXPECT_EQ(seen, 12 * 6);
}

TEST(BenchRun, CyclesRepeatTheTable) {
  EXPECT_EQ(run_threads("broadcast", {"-b", "8", "-e", "8", "-N", "3"}).rows().size(), 3u);
}

TEST(BenchRun, ARootBeyondTheGroupIsRefused) {
  EXPECT_THROW(run_threads("broadcast", {"-t", "2", "-r", "2", "-b", "8", "-e", "8"}), Error);
}

TEST(BenchJson, ConfigIsWhatTheFlagsAre) {
  const auto config = [](std::vector<std::string> flags) {
    flags.insert(flags.end(), {"--device", "cuda"});
    return nlohmann::json::parse(json_text(collective_from_name("reduce"), options_of("reduce", flags), {}))
        .at("config");
  };
  const auto a =
      config({"-t", "2", "-g", "3", "-b", "8", "-e", "1K", "-i", "64", "-f", "2", "-w", "4", "-n", "5",
              "-m", "6", "-c", "7", "-G", "8", "-z", "3",  "-R", "2",  "-u", "9", "-I", "1", "-K", "2"});
  EXPECT_EQ(a, nlohmann::json::parse(R"({"nthreads": 2, "ngpus": 3, "minimum_bytes": 8, "maximum_bytes": 1024,
      "step_bytes": 64, "step_factor": 2.0, "warmup_iters": 4, "iterations": 5, "aggregated_iterations": 6,
      "grouped": true, "validation": 7, "graph": 8, "blocking_collectives": true, "local_register": 2, "unalign": 9,
      "per_iter_timing": true, "per_iter_skip": 2,
      "devices": []})"));
  const auto b = config({});
  for (const auto& [key, value] : b.items())
    EXPECT_TRUE(key == "devices" || value != a.at(key)) << key << " does not go by its flag";
}

void write_earlier_run() {
  std::ofstream(json_path()) << R"({"from": "an earlier run"})" << std::string(9999, ' ');
}

std::string text_of_json() {
  std::stringstream text;
  text << std::ifstream(json_path()).rdbuf();
  return text.str();
}

TEST(BenchJson, IsThatOfAKilledRunUntilItsEnd) {
  write_earlier_run();
  Hooks hooks;
  std::string found = "the hook was not called";
  hooks.before_check = [&](int, Buffer) { found = text_of_json(); };
  EXPECT_EQ(json_of("all_reduce", {"-b", "8", "-e", "8"}, hooks).at("results").size(), 1u);
  const auto before = nlohmann::json::parse(found);
  ASSERT_EQ(before.at("errors").size(), 1u);
  EXPECT_EQ(before.at("errors")[0], unfinished_error);
  EXPECT_TRUE(before.at("results").empty());
}

/// Another rank that ends first makes rzrun end this one.
TEST(BenchJson, HasAnErrorIfTheRunEndsBeforeItsRanksAreConnected) {
  write_earlier_run();
  Program p({test::built("rzrun"), "-n", "2", "sh", "-c",
             concat("[ $RANK = 0 ] || exit 5; exec ", test::built("all_reduce_perf"), " -b 8 -e 8 -J ",
                    json_path())});
  EXPECT_EQ(p.wait(), 5) << p.err();
  const std::string text = text_of_json();
  if (text.find("an earlier run") == text.npos) {  // else rank 0 was killed before it came to its file
    EXPECT_EQ(read_json().at("errors").size(), 1u) << text;
  }
}

TEST(BenchJson, HasTheErrorOfARunThatFails) {
  write_earlier_run();
  Hooks hooks;
  hooks.before_check = [calls = std::make_shared<std::atomic<int>>()](int rank, Buffer) {
    if (rank == 1 && ++*calls > 2) fail(Errc::system, "a rank has failed");
  };
  EXPECT_THROW(
      run_threads("all_reduce", {"-t", "2", "-b", "8", "-e", "16", "-f", "2", "-J", json_path()}, hooks),
      Error);
  const auto lost = read_json();
  EXPECT_EQ(lost.at("errors").size(), 1u) << lost;  // of the rank, or of the other one, which has lost it
  EXPECT_EQ(lost.at("results").size(), 1u) << "the row before";
  write_earlier_run();
  EXPECT_THROW(run_threads("all_reduce", {"-b", "8", "-e", "8", "--algorithm", "pigeon", "-J", json_path()}),
               Error);
  const auto refused = read_json();
  ASSERT_EQ(refused.at("errors").size(), 1u);
  EXPECT_NE(refused.at("errors")[0].get<std::string>().find("pigeon"), std::string::npos) << refused;
  EXPECT_TRUE(refused.at("results").empty());
}

TEST(BenchJson, OfAnEndlessRunHasTheLatestCycle) {
  Program p({test::built("all_reduce_perf"), "-b", "8", "-e", "16", "-f", "2", "-n", "1", "-N", "0", "-J",
             json_path()});
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(30);
  while (text_of_json().find("out_of_place") == std::string::npos &&
         std::chrono::steady_clock::now() < deadline)
    usleep(1000);
  p.signal(SIGSTOP);
  usleep(100'000);
  EXPECT_EQ(read_json().at("results").size(), 2u);
  p.signal(SIGKILL);
  p.wait();
}

TEST(BenchJson, AFileThatCannotBeWrittenIsAnErrorAtOnce) {
  expect_status_two({"-n", "1000000000", "-J", "/nowhere/results.json"},
                    "-J /nowhere/results.json: cannot be written: No such file or directory");
  write_earlier_run();
  expect_status_two({"-J", json_path(), "-r", "9"}, "there are only 1 ranks");
  EXPECT_FALSE(text_of_json().empty()) << "emptied for a wrong command line";
  Program p({test::built("all_reduce_perf"), "-J", json_path()}, {{"RZ_TIMEOUT", "3"}});
  EXPECT_EQ(p.wait(), 2);
  EXPECT_EQ(read_json().at("from"), "an earlier run") << "emptied for a wrong variable";
}

TEST(BenchRun, ATableThatCannotBePrintedIsAnError) {
  const std::string perf = test::built("all_reduce_perf") + " -b 8 -e 8";
  Program full({"sh", "-c", perf + " > /dev/full"}), closed({"sh", "-c", perf + " >&-"});
  EXPECT_EQ(full.wait(), 1);
  EXPECT_EQ(full.err(), "all_reduce_perf: standard output cannot be written: the disk may be full\n");
  EXPECT_EQ(closed.wait(), 0) << closed.err();
}

TEST(BenchJson, HasTheVerdictOnTheBandwidth) {
  const std::vector<std::string> flags{"-t", "2", "-b", "8", "-e", "8"};
  EXPECT_EQ(json_of("all_reduce", flags).at("average_bus_bandwidth").at("okay"), "unchecked");
  const Variable variable("NCCL_TESTS_MIN_BW", "100000");
  const auto j = json_of("all_reduce", flags, {}, 7);
  EXPECT_EQ(j.at("average_bus_bandwidth").at("okay"), false);
  EXPECT_EQ(j.at("errors").size(), 1u);
}

TEST(BenchJson, EveryRowAndTheAverage) {
  const auto j = json_of("reduce_scatter", {"-t", "2", "-b", "1K", "-e", "4K", "-f", "2", "-n", "1"});
  EXPECT_EQ(j.at("version"), 3);
  EXPECT_EQ(j.at("collective"), "reduce_scatter");
  ASSERT_EQ(j.at("results").size(), 3u);
  double bus_bandwidths = 0;
  for (std::size_t i = 0; i < 3; ++i) {
    const auto& row = j.at("results")[i];
    EXPECT_EQ(row.at("size"), 1024 << i);
    EXPECT_EQ(row.at("count"), 128 << i);
    EXPECT_EQ(row.at("type"), "float");
    EXPECT_EQ(row.at("redop"), "sum");
    EXPECT_EQ(row.at("root"), -1);
    for (const char* placement : {"out_of_place", "in_place"}) {
      const auto& f = row.at(placement);
      EXPECT_GT(f.at("time").get<double>(), 0);
      EXPECT_NEAR(f.at("alg_bw").get<double>() * f.at("time").get<double>() * 1e3, 1024 << i, 1e-6);
      EXPECT_NEAR(f.at("bus_bw").get<double>(), f.at("alg_bw").get<double>() / 2, 1e-12);
      EXPECT_EQ(f.at("nwrong"), 0);
      bus_bandwidths += f.at("bus_bw").get<double>();
    }
  }
  EXPECT_NEAR(j.at("average_bus_bandwidth").at("bandwidth").get<double>(), bus_bandwidths / 6, 1e-9);
  EXPECT_EQ(j.at("out_of_bounds"), (nlohmann::json{{"count", 0}, {"okay", true}}));
  EXPECT_EQ(j.at("errors"), nlohmann::json::array());
  const auto rooted =
      json_of("reduce", {"-t", "2", "-r", "1", "-d", "half", "-o", "max", "-b", "8", "-e", "8", "-c", "0"});
  const auto& row = rooted.at("results").at(0);
  EXPECT_EQ(rooted.at("collective"), "reduce");
  EXPECT_EQ(row.at("type"), "half");
  EXPECT_EQ(row.at("redop"), "max");
  EXPECT_EQ(row.at("root"), 1);
  EXPECT_TRUE(row.at("in_place").at("nwrong").is_null());
}

TEST(BenchJson, AWrongResultIsNotOkay) {
  Hooks hooks;
  hooks.before_check = [](int rank, Buffer result) {
    if (rank == 1) static_cast<float*>(result.data)[0] += 1;
  };
  const auto j = json_of("all_reduce", {"-t", "2", "-b", "8", "-e", "8", "-c", "3"}, hooks, 7);
  EXPECT_EQ(j.at("out_of_bounds"), (nlohmann::json{{"count", 6}, {"okay", false}}));
  ASSERT_EQ(j.at("errors").size(), 1u);
  EXPECT_EQ(j.at("errors")[0], "6 checks found wrong results");
  EXPECT_EQ(j.at("results")[0].at("out_of_place").at("nwrong"), 3);
  EXPECT_EQ(j.at("results")[0].at("in_place").at("nwrong"), 3);
}

TEST(BenchJson, HasMachineAndTime) {
  ::setenv("RZ_SOCKETS", "3", 1);
  ::setenv("RZ_BACKEND", "native", 1);
  ::setenv("RZ_LAUNCH", "secret", 1);
  const std::string before = now();
  const auto j = json_of("broadcast", {"-t", "3", "-b", "8", "-e", "8"});
  const std::string after = now();
  for (const char* name : {"RZ_SOCKETS", "RZ_BACKEND", "RZ_LAUNCH"}) ::unsetenv(name);
  for (const char* entry : {"RZ_SOCKETS=3", "RZ_BACKEND=native"})
    EXPECT_NE(std::ranges::find(j.at("env"), entry), j.at("env").end()) << j.at("env");
  EXPECT_EQ(std::ranges::find(j.at("env"), "RZ_LAUNCH=secret"), j.at("env").end()) << j.at("env");
  EXPECT_EQ(j.at("args"), (nlohmann::json{"perf", "-t", "3", "-b", "8", "-e", "8", "-J", json_path()}));
  EXPECT_LE(before, j.at("start_time").get<std::string>());
  EXPECT_LE(j.at("start_time").get<std::string>(), j.at("end_time").get<std::string>());
  EXPECT_LE(j.at("end_time").get<std::string>(), after);
  char host[64] = {};
  ::gethostname(host, sizeof host - 1);
  const auto& devices = j.at("config").at("devices");
  ASSERT_EQ(devices.size(), 3u);
  for (int r = 0; r < 3; ++r) {
    EXPECT_EQ(devices[r].at("rank"), r);
    EXPECT_EQ(devices[r].at("device"), r);
    EXPECT_EQ(devices[r].at("pid"), static_cast<int>(::getpid()));
    EXPECT_EQ(devices[r].at("hostname"), host);
    EXPECT_TRUE(run_threads("broadcast", {"-b", "8", "-e", "8"}).has_text(devices[r].at("device_info")));
  }
}

// Ranks of one node rendezvous by their launch.
TEST(BenchRun, RanksOfOneHostNeedNoMasterPort) {
  const UniqueFd other = net::listen_tcp(net::resolve({"127.0.0.1", 0}).front());
  Program p({test::built("rzrun"), "-n", "2", "--master-port", concat(net::local_address(other.get()).port()),
             test::built("sendrecv_perf"), "-b", "1K", "-e", "1K", "-n", "2"});
  EXPECT_EQ(p.wait(), 0) << p.err();
}

TEST(BenchRun, TwoProcessesUnderRzrun) {
  Program p({test::built("rzrun"), "-n", "2", test::built("sendrecv_perf"), "-t", "2", "-b", "1K", "-e", "1K",
             "-n", "2"});
  EXPECT_EQ(p.wait(), 0) << p.err();
  const Outcome o{0, p.out()};
  EXPECT_TRUE(o.has_text("#  Rank  3 "));
  EXPECT_EQ(o.rows().size(), 1u) << "only rank 0 prints";
}

}  // namespace
}  // namespace rz
