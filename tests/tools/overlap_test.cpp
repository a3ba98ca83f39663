// Runs: serial
// Needs: overlap_bench rzrun all_reduce_perf

// Gradients in buckets, all-reduced while the ranks compute: the program that times it.

#include <gtest/gtest.h>

#include <algorithm>
#include <nlohmann/json.hpp>

#include "tests/support/program.h"

namespace rz {
namespace {

using Words = std::vector<std::string>;

/// A run of a few MB on 2 ranks and its JSON output.
nlohmann::json run(const Words& flags, std::string* text = nullptr) {
  return nlohmann::json::parse(test::json_of("overlap_bench", 2, flags, text));
}

TEST(Overlap, ReportsExposedTimeAndSlowdown) {
  std::string text;
  const auto j = run({"--bytes", "3000000", "--bucket", "1M", "-n", "3"}, &text);
  EXPECT_EQ(j.at("ranks"), 2);
  EXPECT_EQ(j.at("buckets"), 3) << "1, 1 and 0.86 MiB";
  EXPECT_GT(j.at("passes").get<long>(), 0);
  ASSERT_EQ(j.at("rows").size(), 2u);
  EXPECT_EQ(j.at("rows")[0].at("through"), "communicator");
  EXPECT_EQ(j.at("rows")[1].at("through"), "scheduler");
  for (const auto& row : j.at("rows")) {
    for (const char* phase : {"compute_ms", "communication_ms", "overlapped_ms"}) {
      EXPECT_EQ(row.at("samples").at(phase).size(), 3u);
      EXPECT_GT(row.at(phase).get<double>(), 0) << phase;
    }
    // The time lost by computation is a part of the step's slowdown: on every rank, so for the maximum over
    // ranks too.
    EXPECT_LE(row.at("lost_compute_ms").get<double>(), row.at("exposed_ms").get<double>());
    EXPECT_EQ(row.at("hidden").get<double>(),
              1 - row.at("exposed_ms").get<double>() / row.at("communication_ms").get<double>());
  }
  for (const char* word : {"through", "exposed", "lost_compute", "communicator", "scheduler"})
    EXPECT_NE(text.find(word), std::string::npos) << text;
  EXPECT_EQ(std::count(text.begin(), text.end(), '\n'), 5) << text;
}

TEST(Overlap, AFixedAmountOfWorkAndAnyMemory) {
  for (const char* memory : {"0", "1", "2", "3"}) {
    const auto j = run({"--bytes", "1000004", "--bucket", "300K", "--members", "3", "--passes", "17", "-n",
                        "1", "-R", memory});
    EXPECT_EQ(j.at("passes"), 17);
    EXPECT_EQ(j.at("bytes"), 1000004);
    EXPECT_EQ(j.at("buckets"), 4);
    EXPECT_EQ(j.at("local_register"), memory[0] - '0');
  }
}

TEST(Overlap, AWrongCommandLineIsOneLine) {
  const std::vector<std::pair<Words, std::string>> bad = {
      {{"--bytes", "2"}, "--bytes 2: a gradient has 4 bytes"},
      {{"--bucket", "1"}, "--bucket 1 holds less than its 5 parameters"},
      {{"--bucket", "big"}, "'big' is no size"},
      {{"--passes", "0"}, "passes"},
      {{"-R", "4"}, "local_register"},
      {{"--bukket", "1M"}, "did you mean --bucket?"}};
  for (const auto& [flags, words] : bad) test::expect_refusal("overlap_bench", flags, words);
}

}  // namespace
}  // namespace rz
