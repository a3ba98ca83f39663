// train_lm on a mesh: a whole run under rzrun, one that goes on with another mesh, and wrong sizes.

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <string>

#include "tests/support/small_gpt.h"

namespace rz {
namespace {

using test::Program;
using test::SmallGpt;
using test::trained_gpt;
using test::TrainedGpt;
using Flags = std::vector<std::string>;

class TrainLmMesh : public testing::Test {
 protected:
  void SetUp() override {
    gpt_.put_config("ds.json", R"(, "ringzero": {"deterministic": "world_size_invariant"})");
  }
  std::string run(int ranks, Flags flags) {
    Program p(gpt_.on_ranks(ranks, flags));
    EXPECT_EQ(p.wait(), 0) << p.err();
    return p.out();
  }
  TrainedGpt trained(int ranks, Flags flags) {
    const std::string out = gpt_ / concat("out", runs_++);
    flags.insert(flags.end(), {"--metrics", out + ".jsonl", "--save", out});
    run(ranks, flags);
    return trained_gpt(out, out + ".jsonl");
  }

  SmallGpt gpt_;
  int runs_ = 0;
};

TEST_F(TrainLmMesh, TrainsCopiesThatAreEachDivided) {
  const TrainedGpt plain = trained(2, {"--strategy", "ddp", "--steps", "5"});
  ASSERT_EQ(plain.metrics.size(), 5u);
  for (const char* strategy : {"ddp", "zero1", "zero2", "zero3"})
    EXPECT_EQ(trained(4, {"--strategy", strategy, "--mesh", "replicate=2", "--steps", "5"}), plain)
        << strategy;
  const std::string out = run(4, {"--mesh", "replicate=2,shard=auto", "--steps", "1"});
  EXPECT_NE(out.find("mesh: replicate 2 x shard 2\n"), std::string::npos) << out;
  EXPECT_NE(out.find("of batch 8 = 2 × accumulation 1 × 4 ranks"), std::string::npos) << out;
}

TEST_F(TrainLmMesh, GoesOnWithAnotherMesh) {
  const Flags zero3{"--strategy", "zero3", "--steps", "8"};
  const TrainedGpt whole = trained(4, zero3);
  const auto resumed = [&](int ranks, const std::string& mesh, const char* strategy) {
    const std::string checkpoints = gpt_ / concat("checkpoints", runs_);
    run(4, {"--strategy", "zero3", "--mesh", "replicate=2", "--steps", "3", "--checkpoint-dir", checkpoints});
    const std::string out = gpt_ / concat("out", runs_++);
    run(ranks, {"--strategy", strategy, "--mesh", mesh, "--steps", "8", "--resume", checkpoints, "--metrics",
                out + ".jsonl", "--save", out});
    return trained_gpt(out, out + ".jsonl").weights;
  };
  EXPECT_EQ(resumed(4, "shard=4", "zero3"), whole.weights);
  EXPECT_EQ(resumed(4, "replicate=4", "zero1"), whole.weights);
  EXPECT_EQ(resumed(2, "replicate=2", "zero2"), whole.weights);
  EXPECT_EQ(resumed(1, "shard=auto", "ddp"), whole.weights);
}

/// Largest difference of a number of two runs' metrics.
double largest_difference(const TrainedGpt& a, const TrainedGpt& b, const char* key) {
  double largest = 0;
  for (std::size_t i = 0; i < a.metrics.size(); ++i)
    largest =
        std::max(largest, std::abs(a.metrics[i].at(key).get<double>() - b.metrics[i].at(key).get<double>()));
  return largest;
}

TEST_F(TrainLmMesh, SharesLayers) {
  const TrainedGpt plain = trained(2, {"--strategy", "ddp", "--steps", "5"});
  const TrainedGpt shared = trained(4, {"--strategy", "ddp", "--mesh", "tp=2", "--steps", "5"});
  ASSERT_EQ(shared.metrics.size(), 5u);
  EXPECT_EQ(shared.weights.size(), plain.weights.size());
  EXPECT_LT(largest_difference(shared, plain, "loss"), 1e-5);
  EXPECT_LT(largest_difference(shared, plain, "grad_norm"), 1e-5);
  for (const char* strategy : {"zero1", "zero2", "zero3"})
    EXPECT_EQ(trained(4, {"--strategy", strategy, "--mesh", "tp=2", "--steps", "5"}), shared) << strategy;
  gpt_.put_config("ds.json",
                  R"(, "ringzero": {"sequence_parallel": true, "deterministic": "world_size_invariant"})");
  const TrainedGpt sequence = trained(4, {"--strategy", "zero2", "--mesh", "tp=2", "--steps", "5"});
  EXPECT_NE(sequence, shared);  // other sums
  EXPECT_LT(largest_difference(sequence, plain, "loss"), 1e-5);
  EXPECT_LT(largest_difference(sequence, plain, "grad_norm"), 1e-5);
  const std::string out = run(2, {"--mesh", "tp=2", "--steps", "1"});
  EXPECT_NE(out.find("mesh: shard 1 x tp 2\n"), std::string::npos) << out;
}

TEST_F(TrainLmMesh, GoesOnWhereOtherRanksShareLayers) {
  const std::string checkpoints = gpt_ / "checkpoints";
  run(4, {"--strategy", "zero3", "--mesh", "tp=2", "--steps", "3", "--checkpoint-dir", checkpoints});
  const auto resumed = [&](int ranks, const std::string& mesh, const char* strategy) {
    const std::string out = gpt_ / concat("out", runs_++);
    run(ranks, {"--strategy", strategy, "--mesh", mesh, "--steps", "3", "--resume", checkpoints, "--metrics",
                out + ".jsonl", "--save", out});
    return trained_gpt(out, out + ".jsonl").weights;
  };
  const std::string weights = resumed(4, "tp=2", "zero3");  // which are those of the checkpoint
  EXPECT_EQ(resumed(2, "shard=2", "zero2"), weights);
  EXPECT_EQ(resumed(4, "tp=2", "zero1"), weights);
  EXPECT_EQ(resumed(1, "shard=1", "ddp"), weights);
}

TEST_F(TrainLmMesh, WrongSizesAreOneLine) {
  const auto refused = [&](const Flags& flags) {
    Program p(gpt_.on_ranks(3, flags));
    EXPECT_EQ(p.wait(), 2) << p.err();
    return p.err();
  };
  const std::string ds = gpt_ / "ds.json";
  EXPECT_NE(
      refused({"--mesh", "replicate=2"})
          .find(concat("train_lm: ", ds,
                       ": --mesh (command line): mesh replicate 2 x shard auto on 3 ranks: the product of "
                       "the sizes is 2, which does not divide the ranks; what would fit: replicate 1 or "
                       "3\n")),
      std::string::npos);
  EXPECT_NE(refused({"--mesh", "pp=3"}).find("train_lm: --mesh pp=3: 'pp=3' is no dimension with a size"),
            std::string::npos);
}

}  // namespace
}  // namespace rz
