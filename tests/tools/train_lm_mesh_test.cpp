// train_lm on a mesh: a whole run under rzrun, one that goes on with another mesh, and wrong sizes.

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <filesystem>
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

/// Each with status 2, on the first line of errors, before a model is written.
TEST_F(TrainLmMesh, WrongSizesAreOneLine) {
  const auto expect_refused = [&](int ranks, Flags flags, const std::string& line) {
    const std::string out = gpt_ / "refused";
    flags.insert(flags.end(), {"--save", out});
    Program p(gpt_.on_ranks(ranks, flags));
    EXPECT_EQ(p.wait(), 2) << p.err();
    EXPECT_NE(concat("\n", p.err()).find(concat("train_lm: ", line, "\n")), std::string::npos)
        << "expected " << line << "\nfound " << p.err();
    EXPECT_FALSE(std::filesystem::exists(out));
  };
  const std::string ds = gpt_ / "ds.json", folder = gpt_ / "";
  expect_refused(
      3, {"--mesh", "replicate=2"},
      concat(ds,
             ": --mesh (command line): mesh replicate 2 x shard auto on 3 ranks: the product of the "
             "sizes is 2, which does not divide the ranks; what would fit: replicate 1 or 3"));
  expect_refused(1, {"--mesh", "pp=3"},
                 "--mesh pp=3: 'pp=3' is no dimension with a size; write replicate=2,shard=auto,tp=2");
  expect_refused(2, {"--mesh", "tp=4"},
                 concat(ds,
                        ": --mesh (command line): mesh shard auto x tp 4 on 2 ranks: tp 4 is more than the "
                        "ranks"));
  gpt_.put_config("tp2.json", R"(, "tensor_parallel": {"autotp_size": 2})");
  expect_refused(4, {"--config", gpt_ / "tp2.json", "--mesh", "tp=4"},
                 concat(folder,
                        "tp2.json: tensor_parallel.autotp_size: is 2, but --mesh (command line) is 4; "
                        "remove one of them"));
  gpt_.put_config("patterns.json",
                  R"(, "tensor_parallel": {"autotp_size": 2, "partition_config": {"layer_specs": []}})");
  expect_refused(2, {"--config", gpt_ / "patterns.json"},
                 concat(folder,
                        "patterns.json: tensor_parallel.partition_config: not supported in this build yet: "
                        "{\"layer_specs\":[]}; EngineOptions::parallelize divides a module of one's own; "
                        "remove the key"));
  gpt_.put_config("sequence.json", R"(, "ringzero": {"sequence_parallel": true})");
  gpt_.put("three_heads.json",
           R"({"n_layer": 1, "n_head": 3, "n_embd": 24, "n_positions": 16, "vocab_size": 256})");
  gpt_.put("one_key_head.json",
           R"({"model_type": "llama", "num_hidden_layers": 1, "hidden_size": 24, "intermediate_size": 36,
               "num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 6, "vocab_size": 256,
               "max_position_embeddings": 16, "tie_word_embeddings": false})");
  expect_refused(
      2, {"--model", gpt_ / "three_heads.json", "--mesh", "tp=2"},
      "parallelize: transformer.h.0.attn.c_attn (column by \"transformer.h.*.attn.c_attn\"): tp 2 does "
      "not divide 3 heads of 8 of transformer.h.0.attn.c_attn.weight; use a divisor of 3");
  expect_refused(2, {"--model", gpt_ / "one_key_head.json", "--mesh", "tp=2"},
                 "parallelize: model.layers.0.self_attn.k_proj (column by "
                 "\"model.layers.*.self_attn.{q,k,v}_proj\"): tp 2 does not divide 1 head of 6 of "
                 "model.layers.0.self_attn.k_proj.weight; use a divisor of 1");
  expect_refused(3,
                 {"--model", gpt_ / "three_heads.json", "--config", gpt_ / "sequence.json", "--mesh", "tp=3"},
                 concat("--seq-len: 16 tokens cannot be divided between the 3 ranks of a tp group, as "
                        "ringzero.sequence_parallel of ",
                        folder, "sequence.json requires; use 15 tokens, or set it to false"));
}

}  // namespace
}  // namespace rz
