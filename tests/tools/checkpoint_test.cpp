// Needs: checkpoint

// The program that inspects, verifies, compares and converts checkpoints.

#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

#include "sharding/checkpoint/checkpoint_folder.h"
#include "sharding/checkpoint/open_tensors.h"
#include "sharding/io/json.h"
#include "tests/support/deepspeed_writer.h"
#include "tests/support/program.h"
#include "tests/support/written_checkpoint.h"

namespace rz {
namespace {

namespace fs = std::filesystem;
using test::expect_refusal;
using test::Program;
using Words = std::vector<std::string>;

struct Outcome {
  int status;
  std::string out, err;
};

Outcome run_tool(Words words) {
  words.insert(words.begin(), test::built("checkpoint"));
  Program p(words);
  const int status = p.wait();
  return {status, p.out(), p.err()};
}

bool has_text(const std::string& text, const std::string& what) {
  return text.find(what) != std::string::npos;
}

class CheckpointTool : public testing::Test {
 protected:
  CheckpointTool() {
    for (int step : {10, 20}) write(step_tag(step), step, 0);
    write_tag_file(run(), latest_file, "global_step20");
    write_tag_file(run(), best_file, "global_step10");
  }
  void write(const std::string& tag, int step, float first) {
    test::write_checkpoint(run() + "/" + tag,
                           {{"model/w", {6, 5}, test::equal_ranges(30, 2), first},
                            {"buffer/n", {}, test::equal_ranges(1, 1), 3, DType::i64},
                            {"optimizer/exp_avg/w", {6, 5}, test::equal_ranges(30, 2), 1}},
                           2, concat(R"({"steps":)", step, R"(,"ranks":2,"strategy":"zero2"})"));
  }
  std::string run() const { return folder_ / "run"; }

  test::Folder folder_;
};

TEST_F(CheckpointTool, HelpDescribesTheCommands) {
  const Outcome all = run_tool({"--help"});
  EXPECT_EQ(all.status, 0);
  for (const char* part : {"checkpoint inspect RUN", "checkpoint COMMAND --help", "Exit status"})
    EXPECT_TRUE(has_text(all.out, part)) << all.out;
  const std::pair<const char*, const char*> parts[] = {{"inspect", "--json"},
                                                       {"verify", "Exit status: 0 all is as it was written"},
                                                       {"diff", "--tolerance"},
                                                       {"merge", "--dtype"},
                                                       {"split", "--max-shard-size"}};
  for (const auto& [command, part] : parts) {
    const Outcome help = run_tool({command, "--help"});
    EXPECT_EQ(help.status, 0);
    EXPECT_TRUE(has_text(help.out, part)) << help.out;
  }
}

TEST_F(CheckpointTool, BadInputIsOneLine) {
  expect_refusal("checkpoint", {}, "no command; see checkpoint --help");
  expect_refusal("checkpoint", {"inspekt"}, "no command 'inspekt'; did you mean inspect?");
  expect_refusal("checkpoint", {"--json"}, "unknown flag --json");
  expect_refusal("checkpoint", {"inspect"}, "PATH is required");
  expect_refusal("checkpoint", {"inspect", run(), "more"}, "unexpected argument 'more'");
  expect_refusal("checkpoint", {"inspect", "/none"}, "/none: no such folder");
  expect_refusal("checkpoint", {"verify", "/none"}, "/none: no such folder");
  expect_refusal("checkpoint", {"verify", folder_.path()}, "holds no checkpoint");
  expect_refusal("checkpoint", {"diff", run(), "/none"}, "/none: no such file or folder");
  expect_refusal("checkpoint", {"diff", run(), run(), "--tolerance", "-1"}, "--tolerance");
  expect_refusal("checkpoint", {"merge", run()}, "OUT is required");
  expect_refusal("checkpoint", {"merge", run(), folder_ / "o", "--dtype", "f8"}, "--dtype");
  expect_refusal("checkpoint", {"merge", run(), folder_ / "o", "--max-shard-size", "5gigs"},
                 "--max-shard-size: '5gigs' is no size; write bytes, or as in 64K, 16GiB or 80GB");
  expect_refusal("checkpoint", {"merge", run(), run()}, "run: exists already");
  expect_refusal("checkpoint", {"merge", run(), folder_ / "o", "--config", "/etc/passwd"}, "config.json");
  expect_refusal("checkpoint", {"split", run(), folder_ / "o"}, "--max-shard-size is required");
  expect_refusal("checkpoint", {"split", run() + "/latest", folder_ / "o", "--max-shard-size", "1GB"},
                 "latest: ");
  std::ofstream(run() + "/global_step10/checkpoint.json") << "{}";
  expect_refusal("checkpoint", {"inspect", run() + "/global_step10"}, "is not an index of a checkpoint");
  EXPECT_FALSE(fs::exists(folder_ / "o"));
}

TEST_F(CheckpointTool, InspectListsTheCheckpointsOfAFolder) {
  const Outcome o = run_tool({"inspect", run()});
  EXPECT_EQ(o.status, 0) << o.err;
  EXPECT_TRUE(has_text(o.out, "run: 2 checkpoints\n")) << o.out;
  for (const char* part : {"global_step10     10      2  zero2           3", "UTC  best\n", "UTC  latest\n"})
    EXPECT_TRUE(has_text(o.out, part)) << o.out;
  const auto list = nlohmann::json::parse(run_tool({"inspect", run(), "--json"}).out);
  ASSERT_EQ(list.size(), 2u);
  EXPECT_EQ(list[1]["tag"], "global_step20");
  EXPECT_EQ(list[1]["steps"], 20);
  EXPECT_EQ(list[1]["latest"], true);
  EXPECT_EQ(list[1]["best"], false);
}

TEST_F(CheckpointTool, WeightsOfPyTorchAndDeepSpeedAreRead) {
  test::DeepSpeedWriter zero;
  zero.stage = 3, zero.ranks = 3;
  zero.write(folder_ / "zero/global_step3");
  test::write_bytes(folder_ / "zero/latest", "global_step3");
  test::TorchWriter torch;
  test::pickle::Pairs pairs;
  for (std::size_t p = 0; p < zero.parameters.size(); ++p) {
    const auto& q = zero.parameters[p];
    pairs.emplace_back(test::pickle::text(q.name),
                       q.frozen ? test::DeepSpeedWriter::half(torch, zero.values(p), q.shape)
                                : torch.tensor(zero.values(p), q.shape));
  }
  pairs.emplace_back(test::pickle::text("tied.weight"),
                     torch.tensor(zero.values(0), zero.parameters[0].shape));
  pairs.emplace_back(test::pickle::text("count"),
                     torch.tensor(std::vector<std::int64_t>{5, 6}, {2}, "LongStorage"));
  torch.write(folder_ / "x.pt", test::pickle::state_dict(pairs));

  const Outcome merged = run_tool({"merge", folder_ / "zero", folder_ / "merged"});
  EXPECT_EQ(merged.status, 0) << merged.err;
  EXPECT_TRUE(has_text(merged.out, "merged: 8 tensors in 1 file")) << merged.out;
  const Outcome cut = run_tool({"split", folder_ / "x.pt", folder_ / "cut", "--max-shard-size", "60"});
  EXPECT_EQ(cut.status, 0) << cut.err;
  for (const char* other : {"zero", "zero/global_step3", "merged", "cut"}) {
    const Outcome same = run_tool({"diff", folder_ / "x.pt", folder_ / other});
    EXPECT_EQ(same.status, 0) << other << same.out << same.err;
    EXPECT_TRUE(has_text(same.out, "8 tensors equal, 0 different")) << same.out;
  }
  const Outcome seen = run_tool({"inspect", folder_ / "zero"});
  EXPECT_EQ(seen.status, 0) << seen.err;
  EXPECT_TRUE(has_text(seen.out, "zero/global_step3: 8 tensors, ")) << seen.out;
  EXPECT_TRUE(has_text(seen.out, "\nfrozen.weight  BF16   [5]            5     10\n")) << seen.out;
  const auto list = nlohmann::json::parse(run_tool({"inspect", folder_ / "x.pt", "--json"}).out);
  EXPECT_EQ(list["tensors"]["emb.weight"]["shape"], (nlohmann::json{3, 5}));
  zero.front = "x", zero.write_optimizer(folder_ / "zero/global_step3", 0);
  expect_refusal("checkpoint", {"merge", folder_ / "zero", folder_ / "o"}, "an unknown kind of checkpoint");
  torch.write(folder_ / "x.pt",
              test::pickle::call(test::pickle::global("os", "system"), {test::pickle::text("ls")}));
  expect_refusal("checkpoint", {"split", folder_ / "x.pt", folder_ / "o", "--max-shard-size", "1GB"},
                 "needs 'os.system'");
  EXPECT_FALSE(fs::exists(folder_ / "o"));
}

TEST_F(CheckpointTool, InspectPrintsStateAndTensors) {
  const Outcome o = run_tool({"inspect", run() + "/global_step20/"});
  EXPECT_EQ(o.status, 0) << o.err;
  for (const char* part :
       {"run/global_step20 (latest)\n", "2 files, ", "state {\n  \"ranks\": 2,\n  \"steps\": 20,",
        "\ntensor               dtype  shape   elements  bytes  slices\n",
        "\nmodel/w              F32    [6, 5]        30    120       2\n",
        "\nbuffer/n             I64    []             1      8       1\n",
        "\noptimizer/exp_avg        1        30    120  120 B\n",
        "\nall                      3        61    248  248 B\n"})
    EXPECT_TRUE(has_text(o.out, part)) << part << o.out;
  const auto whole = nlohmann::json::parse(run_tool({"inspect", run() + "/global_step20", "--json"}).out);
  EXPECT_EQ(whole["state"]["strategy"], "zero2");
  EXPECT_EQ(whole["tensors"]["model/w"],
            nlohmann::json::parse(R"({"dtype":"F32","shape":[6,5],"elements":30,"bytes":120,"slices":2})"));
  EXPECT_EQ(whole["totals"]["model"]["bytes"], 120);
  EXPECT_EQ(whole["files"].size(), 2u);
}

TEST_F(CheckpointTool, VerifyFindsDamageInALineEach) {
  const Outcome good = run_tool({"verify", run()});
  EXPECT_EQ(good.status, 0) << good.out;
  EXPECT_TRUE(has_text(good.out, "run/global_step10: 2 files, ")) << good.out;
  EXPECT_EQ(good.err, "") << "no progress bar without a terminal";
  const std::string first = run() + "/global_step20/" + rank_file(0, 2),
                    second = run() + "/global_step20/" + rank_file(1, 2);
  for (const std::string& file : {first, second}) test::flip_byte(file, fs::file_size(file) - 1);
  const Outcome bad = run_tool({"verify", run()});
  EXPECT_EQ(bad.status, 1);
  EXPECT_TRUE(has_text(bad.out, first + ": tensor 'optimizer/exp_avg/w[0:15]': the checksum is ")) << bad.out;
  EXPECT_TRUE(has_text(bad.out, second + ": tensor 'optimizer/exp_avg/w[15:30]': the checksum is "))
      << bad.out;
  EXPECT_EQ(std::ranges::count(bad.out, '\n'), 3) << bad.out;
  EXPECT_EQ(run_tool({"verify", run() + "/global_step10"}).status, 0);
  test::flip_byte(first, fs::file_size(first) - 15 * 4 - 1);
  const Outcome two = run_tool({"verify", run() + "/global_step20"});
  EXPECT_EQ(std::ranges::count(two.out, '\n'), 3) << "each tensor that is damaged: " << two.out;
  fs::remove(first);
  const Outcome missing = run_tool({"verify", run() + "/global_step20"});
  EXPECT_EQ(missing.status, 1);
  EXPECT_TRUE(has_text(missing.out, first + ": No such file")) << missing.out;
}

TEST_F(CheckpointTool, DiffPrintsWhatDiffers) {
  const Outcome same = run_tool({"diff", run(), run() + "/global_step20"});
  EXPECT_EQ(same.status, 0) << same.out;
  EXPECT_EQ(same.out, "3 tensors equal, 0 different, 0 only in A, 0 only in B\n");
  write("other", 20, 0.25f);
  const Outcome other = run_tool({"diff", run(), run() + "/other"});
  EXPECT_EQ(other.status, 1);
  EXPECT_EQ(other.out,
            "tensor   A           B     max |A - B|  differing  of\n"
            "model/w  F32 [6, 5]  same  0.25                30  30\n"
            "2 tensors equal, 1 different, 0 only in A, 0 only in B\n");
  EXPECT_EQ(run_tool({"diff", run(), run() + "/other", "--tolerance", "0.25"}).status, 0);
  const Outcome steps = run_tool({"diff", run(), run() + "/global_step10"});
  EXPECT_EQ(steps.status, 1);
  EXPECT_TRUE(has_text(steps.out, "state: steps: 20 and 10\n")) << steps.out;
  EXPECT_EQ(run_tool({"diff", run(), run() + "/global_step10", "--weights-only"}).status, 0);
}

TEST_F(CheckpointTool, MergeAndSplitWriteTheFormatOfHuggingFace) {
  std::ofstream(run() + "/config.json") << R"({"model_type":"gpt2","dtype":"float32"})";
  const std::string merged = folder_ / "merged", split = folder_ / "split", one = folder_ / "one";
  const Outcome merge = run_tool({"merge", run(), merged, "--dtype", "bf16"});
  ASSERT_EQ(merge.status, 0) << merge.err;
  EXPECT_TRUE(has_text(merge.out, "merged: 2 tensors in 1 file, ")) << merge.out;
  EXPECT_EQ(nlohmann::json::parse(read_text_file(merged + "/config.json")),
            nlohmann::json({{"model_type", "gpt2"}, {"dtype", "bfloat16"}, {"torch_dtype", "bfloat16"}}));
  EXPECT_EQ(open_tensors(merged).find("w")->dtype, "BF16");
  EXPECT_EQ(run_tool({"diff", run(), merged, "--tolerance", "1e-9"}).status, 0) << "small integers are exact";
  EXPECT_EQ(run_tool({"diff", run(), merged}).status, 1) << "another dtype";
  std::ofstream(merged + "/tokenizer.json") << "{}";
  std::ofstream(merged + "/chat_template.jinja") << "{{ messages }}";
  ASSERT_EQ(run_tool({"split", merged, split, "--max-shard-size", "60"}).status, 0);
  for (const char* name : {"config.json", "tokenizer.json", "chat_template.jinja",
                           "model-00002-of-00002.safetensors", "model.safetensors.index.json"})
    EXPECT_TRUE(fs::exists(split + "/" + name)) << name;
  ASSERT_EQ(run_tool({"split", split, one, "--max-shard-size", "1TB"}).status, 0);
  EXPECT_EQ(run_tool({"diff", merged, one}).status, 0);
  EXPECT_FALSE(fs::exists(one + "/model.safetensors.index.json"));
  const std::string config = folder_ / "config.json";
  std::ofstream(config) << "{}";
  ASSERT_EQ(run_tool({"merge", run(), folder_ / "given", "--config", config}).status, 0);
  EXPECT_EQ(read_text_file(folder_ / "given/config.json"), "{}");
}

TEST_F(CheckpointTool, MergeNamesTheFrozenWeightsThatACheckpointLacks) {
  const auto merged = [&](const char* out, const std::string& state) {
    test::write_checkpoint(run() + "/global_step30", {{"model/w", {6, 5}, test::equal_ranges(30, 2), 0}}, 2,
                           state);
    return run_tool({"merge", run() + "/global_step30", folder_ / out}).out;
  };
  EXPECT_TRUE(merged("a", R"({"exclude_frozen_parameters":true,"base":["llama","head.pt"]})")
                  .ends_with("; without frozen weights, which are those of 'llama' and 'head.pt'\n"));
  EXPECT_TRUE(merged("b", R"({"exclude_frozen_parameters":true})").ends_with("; without frozen weights\n"));
  EXPECT_FALSE(has_text(merged("c", R"({"base":["llama"]})"), "frozen"));
}

}  // namespace
}  // namespace rz
