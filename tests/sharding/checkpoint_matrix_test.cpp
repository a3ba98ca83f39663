// Runs: ci
// Not under sanitizers: EveryStrategyOnOneToFourRanks

/// Checkpoints saved in the middle of a run and loaded by any strategy on any number of ranks.
#include <gtest/gtest.h>

#include <cmath>
#include <map>
#include <string>
#include <vector>

#include "sharding/engine/engine.h"
#include "sharding/strategy/optimizer_state.h"
#include "sharding/strategy/strategy.h"
#include "tests/lab/training.h"
#include "tests/support/folder.h"

namespace rz {
namespace {

constexpr std::int64_t saved_after = 3;

struct Net final : lab::Mlp {
  explicit Net(const lab::MlpSizes& sizes) : Mlp(sizes) { register_buffer(mean, "mean", {3}); }
  ModuleBuffer mean;
};

/// 12 samples per update, in as few micro-batches of at most 3 as possible, or in micro-batches of `micro`.
lab::Run run_of(int ranks, int stage, const std::string& keys = "", double dropout = 0, int micro = 0) {
  const lab::MlpSizes sizes{.hidden = 19, .dropout = dropout, .samples = 60, .ignored = 0};
  lab::Model model = lab::mlp(sizes);
  model.make = [=] { return std::make_unique<Net>(sizes); };
  return {.model = model,
          .strategy = static_cast<StrategyKind>(stage),
          .ranks = ranks,
          .keys = concat(R"("gradient_accumulation_steps": null, "train_batch_size": 12, )",
                         R"("train_micro_batch_size_per_gpu": )",
                         micro        ? micro
                         : ranks == 3 ? 2
                                      : 3,
                         keys)};
}

/// A run that saves before micro-batch `offset` of update `saved_after`, and goes on: saving changes nothing.
lab::Trace saving(lab::Run run, const std::string& dir, const SaveCheckpointOptions& o = {}, int offset = 0) {
  run.before = [&](Engine& engine, std::int64_t micro) {
    if (micro == saved_after * engine.config().sizes.accumulation + offset) engine.save_checkpoint(dir, o);
  };
  return lab::train(run);
}

std::vector<float> resumed(lab::Run run, const std::string& dir) {
  run.start = [&](Engine& engine, Module&) {
    const auto loaded = engine.load_checkpoint(dir);
    ASSERT_TRUE(loaded);
    EXPECT_EQ(loaded->steps, saved_after);
    EXPECT_EQ(engine.global_steps(), saved_after);
  };
  return lab::train(run).values;
}

TEST(CheckpointMatrix, EveryStrategyOnOneToFourRanksIsResumedByEveryOther) {
  const test::Folder folder;
  for (int ranks = 1; ranks <= 4; ++ranks)
    for (int stage = 0; stage <= 3; ++stage) {
      const std::string dir = folder / concat(ranks, "-", stage);
      const lab::Trace whole = lab::train(run_of(ranks, stage));
      EXPECT_EQ(saving(run_of(ranks, stage), dir), whole);
      const std::vector<float>& expected = whole.values;
      for (int other_ranks = 1; other_ranks <= 4; ++other_ranks)
        for (int other_stage = 0; other_stage <= 3; ++other_stage) {
          SCOPED_TRACE(
              concat("stage ", stage, " on ", ranks, " ranks, then ", other_stage, " on ", other_ranks));
          const auto result = resumed(run_of(other_ranks, other_stage), dir);
          if (ranks == other_ranks) {
            EXPECT_EQ(result, expected);
            continue;
          }
          ASSERT_EQ(result.size(), expected.size());
          for (std::size_t i = 0; i < result.size(); ++i) ASSERT_NEAR(result[i], expected[i], 2e-5) << i;
        }
    }
}

/// All values, then all states, each element from the rank that exports it.
std::vector<float> values_and_states(Engine& engine, Module& module) {
  std::vector<float> all = lab::values_of(engine, module);
  for (const char* name : {"exp_avg", "exp_avg_sq"}) {
    std::vector<float> states(all.size());
    std::map<const Parameter*, std::size_t> begin;
    std::size_t count = 0;
    for (const Parameter* p : module.parameters()) begin[p] = count, count += p->count();
    states.resize(count);
    engine.strategy().optimizer_state().visit(
        [&](const std::string& state, const Parameter& p, Range r, const float* value) {
          if (state == name)
            for (std::size_t i = 0; i < r.count(); ++i) states[begin.at(&p) + r.begin + i] += value[i];
        });
    engine.world().communicator().all_reduce(Buffer(states.data(), states.size())).wait();
    all.insert(all.end(), states.begin(), states.end());
  }
  return all;
}

TEST(CheckpointMatrix, MeshesReadEachOtherBitForBit) {
  const test::Folder folder;
  const MeshSizes chain[] = {{2, 2}, {1, 3}, {4, 1}, {1, 1}, {2, 2}};
  for (int first = 0; first <= 3; ++first) {
    std::vector<float> expected;
    std::string before;
    int stage = first;
    for (const MeshSizes& mesh : chain) {
      SCOPED_TRACE(concat(describe(mesh), ", stage ", stage));
      const std::string dir = folder / concat(first, "-", stage, mesh.replicate, mesh.shard);
      std::vector<float> found;
      lab::Run run = run_of(mesh.ranks(), stage);
      run.mesh = mesh;
      run.updates = saved_after;
      run.start = [&](Engine& engine, Module&) {
        ASSERT_TRUE(before.empty() || engine.load_checkpoint(before));
      };
      run.end = [&](Engine& engine, Module& net) {
        const auto all = values_and_states(engine, net);
        if (engine.world().is_main()) found = all;
        engine.save_checkpoint(dir);
      };
      lab::train(run);
      if (expected.empty()) expected = found;
      EXPECT_EQ(found, expected);
      EXPECT_FALSE(found.empty());
      before = dir;
      stage = (stage + 1) % 4;
    }
  }
}

TEST(CheckpointMatrix, DropoutAndAsynchronousSavingKeepTheBits) {
  const test::Folder folder;
  for (int stage = 0; stage <= 3; ++stage) {
    const lab::Run run = run_of(2, stage, "", 0.3);
    const std::string dir = folder / concat(stage);
    const lab::Trace expected = lab::train(run);
    EXPECT_EQ(saving(run, dir, {.async = true}), expected);
    EXPECT_EQ(resumed(run, dir), expected.values) << "stage " << stage;
  }
}

TEST(CheckpointMatrix, BetweenMicroBatchesTheUpdateBeginsAnew) {
  const test::Folder folder;
  for (int stage = 0; stage <= 3; ++stage)
    for (const int offset : {1, 2}) {
      const lab::Run run = run_of(2, stage, "", 0.3, 2);
      const std::string dir = folder / concat(stage, "-", offset);
      const lab::Trace expected = lab::train(run);
      EXPECT_EQ(saving(run, dir, {}, offset), expected);
      EXPECT_EQ(resumed(run, dir), expected.values) << "stage " << stage << ", micro-batch " << offset;
    }
}

constexpr const char* bf16 = R"(, "bf16": {"enabled": true})";

TEST(CheckpointMatrix, SixteenBitsAndF32ReadEachOther) {
  const test::Folder folder;
  const std::string precisions[] = {"", bf16, R"(, "fp16": {"enabled": true})"};
  for (std::size_t from = 0; from < 3; ++from)
    for (std::size_t to = 0; to < 3; ++to)
      for (const int stage : {0, 3}) {
        SCOPED_TRACE(concat(from, " to ", to, ", stage ", stage));
        const std::string dir = folder / concat(from, to, stage);
        const auto expected = saving(run_of(2, stage, precisions[from]), dir).values;
        const auto result = resumed(
            from == to ? run_of(2, stage, precisions[to]) : run_of(3, 3 - stage, precisions[to]), dir);
        if (from == to) {
          EXPECT_EQ(result, expected);
          continue;
        }
        for (std::size_t i = 0; i < result.size(); ++i) ASSERT_NEAR(result[i], expected[i], 0.05) << i;
      }
}

/// The weights of a checkpoint are those of the run that saved it, and nothing else of it is loaded.
TEST(CheckpointMatrix, EveryStrategyLoadsTheWeightsOfEveryOther) {
  const test::Folder folder;
  const auto marked = [](Module& net) -> float& {
    return dynamic_cast<Net&>(net).mean.value.data<float>()[1];
  };
  for (lab::Run run : {run_of(1, 0), run_of(2, 2), run_of(3, 3), run_of(2, 1, bf16)}) {
    const std::string dir = folder / concat(run.ranks, "-", name(run.strategy));
    run.updates = saved_after;
    run.whole_updates = true;
    run.end = [&](Engine& engine, Module& net) {
      marked(net) = 7;
      engine.save_checkpoint(dir);
    };
    const std::vector<float> saved = lab::train(run).values;
    for (int ranks = 1; ranks <= 3; ++ranks)
      for (int stage = 0; stage <= 3; ++stage)
        for (const std::string& path : {dir, dir + "/global_step3"}) {
          SCOPED_TRACE(concat(path, ", then stage ", stage, " on ", ranks));
          lab::Run other = run_of(ranks, stage);
          other.updates = 0;
          other.options = [](EngineOptions& o) { o.seed = 6; };
          other.start = [&](Engine& engine, Module& net) {
            EXPECT_TRUE(engine.load_model(path).missing_keys().empty());
            EXPECT_EQ(marked(net), 7);
            EXPECT_EQ(engine.global_steps(), 0);
          };
          EXPECT_EQ(lab::train(other).values, saved);
        }
  }
}

}  // namespace
}  // namespace rz
