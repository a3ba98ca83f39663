// Runs: serial
// Needs: concurrent_bench rzrun all_reduce_perf

// Concurrent use of communicators: the program that times it.

#include <gtest/gtest.h>

#include <algorithm>
#include <nlohmann/json.hpp>

#include "tests/support/program.h"

namespace rz {
namespace {

using Words = std::vector<std::string>;

/// A short run and its JSON output.
nlohmann::json run(int ranks, Words flags, std::string* text = nullptr) {
  flags.insert(flags.end(), {"--seconds", "0.01"});
  return nlohmann::json::parse(test::json_of("concurrent_bench", ranks, flags, text));
}

TEST(Concurrent, SharesAreOfWhatAStreamDoesAlone) {
  std::string text;
  const auto j = run(2, {"--bytes", "8,64K,8", "--rounds", "3"}, &text);
  EXPECT_EQ(j.at("ranks"), 2);
  const auto& alone = j.at("ways").at("alone").at("streams");
  for (const char* way : {"alone", "threads", "in_turn"}) {
    const auto& streams = j.at("ways").at(way).at("streams");
    ASSERT_EQ(streams.size(), 3u) << way;
    double sum = 0, min = 1e9, max = 0;
    for (std::size_t i = 0; i < 3; ++i) {
      const auto& s = streams[i];
      EXPECT_EQ(s.at("bytes"), i == 1 ? 64 << 10 : 8);
      const double calls = s.at("calls_per_s"), share = s.at("share");
      EXPECT_GT(calls, 0);
      EXPECT_EQ(s.at("bus_bytes_per_s").get<double>(), calls * s.at("bytes").get<double>());
      EXPECT_LE(s.at("p50_us").get<double>(), s.at("p99_us").get<double>());
      EXPECT_EQ(share, calls / s.at("alone_calls_per_s").get<double>());
      sum += share, min = std::min(min, share), max = std::max(max, share);
    }
    EXPECT_EQ(j.at("ways").at(way).at("shares").get<double>(), sum);
    EXPECT_EQ(j.at("ways").at(way).at("fairness").get<double>(), min / max);
  }
  EXPECT_EQ(alone[1].at("share"), 1) << "the only stream of its size";
  EXPECT_EQ(alone[0].at("alone_calls_per_s"), alone[2].at("alone_calls_per_s"));
  EXPECT_EQ(std::count(text.begin(), text.end(), '\n'), 2 + 3 + 4 + 4) << text;
}

TEST(Concurrent, CallsInTurnAreAsManyOfEachStream) {
  const auto streams = run(3, {"--bytes", "8,1M", "--rounds", "1"}).at("ways").at("in_turn").at("streams");
  EXPECT_EQ(streams[0].at("calls_per_s"), streams[1].at("calls_per_s"));
  EXPECT_EQ(run(2, {"--bytes", "1K,1K"}).at("ways").at("in_turn").at("fairness"), 1);
}

TEST(Concurrent, AnyMemoryAndARankAlone) {
  for (const char* memory : {"0", "1", "2", "3"}) {
    const auto j = run(2, {"--bytes", "256,300K", "--rounds", "1", "-R", memory});
    EXPECT_EQ(j.at("local_register"), memory[0] - '0');
  }
  EXPECT_EQ(run(1, {"--bytes", "1K", "--rounds", "1"}).at("ways").at("threads").at("fairness"), 1);
}

TEST(Concurrent, AWrongCommandLineIsOneLine) {
  const std::vector<std::pair<Words, std::string>> bad = {
      {{"--bytes", "1K,4"}, "--bytes: 4 is not a number of floats of 4 bytes, two at least"},
      {{"--bytes", "1K,10"}, "--bytes: 10 is not"},
      {{"--bytes", "1K,,8"}, "'' is no size"},
      {{"--bytes", "big"}, "'big' is no size"},
      {{"--rounds", "0"}, "rounds"},
      {{"-R", "4"}, "local_register"},
      {{"--byts", "1K"}, "did you mean --bytes?"}};
  for (const auto& [flags, words] : bad) test::expect_refusal("concurrent_bench", flags, words);
}

}  // namespace
}  // namespace rz
