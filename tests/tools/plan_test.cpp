// Needs: plan_lib plan

// The program that plans a run: its command line, its tables, and its plan against a run of train_lm's
// engine.

#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>

#include "comm/core/error.h"
#include "tests/support/error_of.h"
#include "tests/support/folder.h"
#include "tests/support/program.h"
#include "tools/plan/options.h"

namespace rz {
namespace {

namespace fs = std::filesystem;
using test::expect_refusal;
using test::Program;

class PlanProgram : public testing::Test, protected test::Folder {
 protected:
  void SetUp() override {
    std::ofstream(path("model.json"))
        << R"({"n_layer": 2, "n_head": 2, "n_embd": 32, "n_positions": 16, "vocab_size": 256})";
    std::ofstream(path("ds.json"))
        << R"({"train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage": 1},)"
        << R"( "optimizer": {"type": "AdamW", "params": {"lr": 0.01}}})";
  }
  std::vector<std::string> flags(const std::vector<std::string>& more) const {
    std::vector<std::string> all{"--model", path("model.json"), "--config", path("ds.json")};
    all.insert(all.end(), more.begin(), more.end());
    return all;
  }
  std::string run(const std::vector<std::string>& more, int status) const {
    std::vector<std::string> command{test::built("plan")};
    for (const std::string& flag : flags(more)) command.push_back(flag);
    Program program(command);
    EXPECT_EQ(program.wait(), status) << program.err();
    return program.out();
  }
};

TEST_F(PlanProgram, PrintsExactBytesOfEveryRank) {
  const auto found = nlohmann::json::parse(run({"--json", "--ranks", "1,4"}, 0));
  ASSERT_EQ(found["runs"].size(), 2u);
  const auto& four = found["runs"][1];
  EXPECT_EQ(four["ranks"], 4);
  EXPECT_EQ(four["train_batch_size"], 8);
  ASSERT_EQ(four["of_each_rank"].size(), 4u);
  const auto& last = four["of_each_rank"][3];
  EXPECT_EQ(last["rank"], 3);
  EXPECT_EQ(last["strategy"], "zero1");
  std::size_t sum = 0;
  for (const auto& [name, bytes] : last["bytes"].items()) sum += bytes.get<std::size_t>();
  EXPECT_EQ(last["total"], sum);
  const std::size_t parameters = last["bytes"]["parameters"], state = last["bytes"]["optimizer state"];
  EXPECT_EQ(state, parameters / 2);  // twice the values, of a quarter of them
  // Norm and weights of losses are one call, and the agreement on the pass another.
  const auto& update = last["update"];
  EXPECT_EQ(update["control"]["calls"], 2);
  EXPECT_EQ(update["broadcast"]["calls"], 0);
  const std::size_t control = update["control"]["bytes"];
  EXPECT_GT(control, 1120u);
  EXPECT_EQ(update["bytes_sent"], parameters / 4 * 3 * 2 + 2 * control * 3 / 4);
  EXPECT_EQ(four["strategies"].size(), 8u);
}

TEST_F(PlanProgram, CountsEachDimensionOfAMeshAndProposesOne) {
  const auto zero3 = [&](const std::vector<std::string>& more) {
    std::vector<std::string> flags{"--json", "--ranks", "8", "--strategy", "zero3"};
    flags.insert(flags.end(), more.begin(), more.end());
    return nlohmann::json::parse(run(flags, 0))["runs"][0];
  };
  const auto plain = zero3({}), hybrid = zero3({"--mesh", "replicate=2"});
  EXPECT_EQ(plain["mesh"], (nlohmann::json{{"replicate", 1}, {"shard", 8}, {"tp", 1}}));
  EXPECT_EQ(hybrid["mesh"], (nlohmann::json{{"replicate", 2}, {"shard", 4}, {"tp", 1}}));
  const auto& among = hybrid["of_each_rank"][0]["update"]["bytes_sent_among"];
  EXPECT_GT(among["replicate"], 0);
  EXPECT_GT(among["shard"], among["replicate"]);
  EXPECT_EQ(hybrid["of_each_rank"].size(), 8u);
  // A copy for each number that divides the ranks, the more the larger.
  ASSERT_EQ(plain["meshes"].size(), 4u);
  for (std::size_t i = 1; i < 4; ++i) EXPECT_GT(plain["meshes"][i]["total"], plain["meshes"][i - 1]["total"]);
  EXPECT_EQ(hybrid["of_each_rank"][0]["total"], plain["meshes"][1]["total"]);
  const std::size_t four = plain["meshes"][2]["total"];
  EXPECT_EQ(zero3({"--memory", concat(four)})["proposed_mesh"],
            (nlohmann::json{{"replicate", 4}, {"shard", 2}, {"tp", 1}}));
  const std::string out = run({"--ranks", "16", "--strategy", "zero3", "--ranks-per-node", "4", "--memory",
                               concat(four), "--mesh", "replicate=auto"},
                              0);
  for (const char* part : {"4 x 4 x 1", "among replicate", "total by copies", "--mesh replicate="})
    EXPECT_NE(out.find(part), std::string::npos) << part << "\n" << out;
}

TEST_F(PlanProgram, ProposesRanksThatShareLayersWhereCopiesDoNotFit) {
  const auto found = [&](const std::vector<std::string>& more, int status = 0) {
    std::vector<std::string> flags{"--json", "--ranks", "8", "--strategy", "zero3"};
    flags.insert(flags.end(), more.begin(), more.end());
    return nlohmann::json::parse(run(flags, status))["runs"][0];
  };
  const auto total_of = [](const nlohmann::json& run) {
    return run["of_each_rank"][0]["total"].get<std::size_t>();
  };
  const auto two = found({"--mesh", "tp=2"}), plain = found({});
  EXPECT_EQ(two["mesh"], (nlohmann::json{{"replicate", 1}, {"shard", 4}, {"tp", 2}}));
  EXPECT_EQ(two["of_each_rank"].size(), 8u);
  EXPECT_GT(two["of_each_rank"][0]["update"]["bytes_sent_among"]["tp"], 0);
  EXPECT_EQ(plain["of_each_rank"][0]["update"]["bytes_sent_among"]["tp"], 0);
  ASSERT_LT(total_of(two), total_of(plain));
  // Two heads: of the sizes that divide a node, tp 1 does not fit, and the model refuses 4 and 8.
  const auto limited = found({"--memory", concat(total_of(two))}, 1);
  EXPECT_EQ(limited["proposed_mesh"], two["mesh"]);
  std::size_t of_two = 0, refused = 0;
  for (const auto& mesh : limited["meshes"]) {
    of_two += mesh["mesh"]["tp"] == 2;
    if (!mesh["total"].is_null()) continue;
    ++refused;
    EXPECT_NE(mesh["reason"].get<std::string>().find("does not divide 2 heads of 16"), std::string::npos)
        << mesh;
  }
  EXPECT_EQ(of_two, 3u);  // 1, 2 and 4 copies
  EXPECT_EQ(refused, 2u);
  // Where copies fit, layers are not shared; and tp stays within a node.
  EXPECT_EQ(found({"--memory", concat(total_of(plain))})["proposed_mesh"]["tp"], 1);
  for (const auto& mesh : found({"--memory", "1", "--ranks-per-node", "1"}, 1)["meshes"])
    EXPECT_EQ(mesh["mesh"]["tp"], 1);
}

TEST_F(PlanProgram, ATpThatDoesNotDivideTheTokensIsNotProposed) {
  std::ofstream(path("ds.json"))
      << R"({"train_micro_batch_size_per_gpu": 2, "ringzero": {"sequence_parallel": true},)"
      << R"( "optimizer": {"type": "AdamW", "params": {"lr": 0.01}}})";
  const auto meshes = [&](const char* tokens) {
    const std::vector<std::string> flags{"--json", "--ranks", "2", "--memory", "1GiB", "--seq-len", tokens};
    return nlohmann::json::parse(run(flags, 0))["runs"][0]["meshes"];
  };
  const auto odd = meshes("15");
  ASSERT_EQ(odd.size(), 2u);
  EXPECT_NE(odd[1]["reason"].get<std::string>().find(
                "15 tokens cannot be divided between the 2 ranks of a tp group"),
            std::string::npos);
  EXPECT_GT(meshes("14")[1]["total"], 0);
}

TEST_F(PlanProgram, AStrategyThatTheConfigurationExcludesHasAReason) {
  std::ofstream(path("ds.json")) << R"({"train_micro_batch_size_per_gpu": 2, "ringzero": {"join": {}},)"
                                 << R"( "optimizer": {"type": "AdamW", "params": {"lr": 0.01}}})";
  const std::string reason = "ringzero.join: needs stage 0, 1 or 2, found zero3";
  const std::string out = run({"--ranks", "2"}, 0);
  EXPECT_NE(out.find("  - zero3: " + path("ds.json") + ": " + reason), std::string::npos) << out;
  for (const auto& s : nlohmann::json::parse(run({"--json", "--ranks", "2"}, 0))["runs"][0]["strategies"]) {
    const bool excluded = s["strategy"] == "zero3";
    EXPECT_EQ(s["total"].is_null(), excluded) << s;
    EXPECT_EQ(s["reason"].is_null(), !excluded) << s;
    if (excluded) {
      EXPECT_NE(s["reason"].get<std::string>().find(reason), std::string::npos) << s;
    }
  }
}

TEST_F(PlanProgram, TellsWhatFits) {
  EXPECT_NE(run({"--memory", "1GiB"}, 0).find("fits"), std::string::npos);
  const std::string out = run({"--memory", "300KiB", "--ranks", "2"}, 1);
  EXPECT_NE(out.find("needs more"), std::string::npos) << out;
  EXPECT_NE(out.find("none fits"), std::string::npos) << out;
  EXPECT_NE(out.find(" !"), std::string::npos) << out;
}

TEST_F(PlanProgram, RefusesBadInputInOneLine) {
  expect_refusal("plan", flags({"--ranks", "1,x"}), "--ranks: 'x' is no number of ranks");
  expect_refusal("plan", flags({"--ranks", "0"}), "--ranks: '0'");
  expect_refusal("plan", flags({"--memory", "lots"}), "--memory: 'lots' is no size");
  expect_refusal("plan", flags({"--device", "tpu"}), "--device: 'tpu' is no device");
  expect_refusal("plan", flags({"--strategy", "zero9"}), "unknown strategy");
  expect_refusal("plan", flags({"--train-batch-size", "7", "--ranks", "3"}),
                 "train_batch_size: 7 cannot be shared out evenly");
  expect_refusal("plan", {"--model", "/none.json", "--config", "/none.json"}, "/none.json: no such file");
  expect_refusal("plan", {}, "--model");
}

}  // namespace
}  // namespace rz
