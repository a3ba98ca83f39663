// Runs: ci
// Not under sanitizers: EveryStrategyOnOneToFourRanks

/// Checkpoints saved in the middle of a run and loaded by any strategy on any number of ranks.
#include <gtest/gtest.h>
#include <unistd.h>

#include <cmath>
#include <filesystem>
#include <functional>
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

namespace fs = std::filesystem;

constexpr std::size_t in = 6, classes = 5, samples = 60;
constexpr int updates = 8, saved_after = 3;

struct Net : Module {
  explicit Net(double dropout) : drop(*this, "drop", dropout) { register_buffer(count, "count", {3}); }
  nn::Linear fc1{*this, "fc1", in, 19}, fc2{*this, "fc2", 19, classes};
  nn::Dropout drop;
  ModuleBuffer count;
  Var operator()(Tape& t, const Tensor& x) { return fc2(t, drop(t, nn::gelu(t, fc1(t, x)))); }
};

std::shared_ptr<const Dataset> dataset() {
  Tensor x = Tensor::empty({samples, in}), y = Tensor::empty({samples}, DType::i32);
  for (std::size_t i = 0; i < samples; ++i) {
    double total = 0;
    for (std::size_t c = 0; c < in; ++c) {
      const double v = random_uniform(3, "x", i * in + c) - 0.5;
      x.data<float>()[i * in + c] = static_cast<float>(v);
      total += v * static_cast<double>(c + 1);
    }
    y.data<std::int32_t>()[i] = static_cast<std::int32_t>(std::abs(std::lround(total * 3)) % classes);
  }
  return tensor_dataset({{"x", x}, {"y", y}});
}

struct TrainingRun {
  int ranks = 1, stage = 0;
  std::string more = "";  ///< keys of the configuration
  double dropout = 0;
  std::int64_t micro = 0;  ///< 0: 12 samples per update in as few micro-batches of at most 3 as possible
};

std::string config(const TrainingRun& run) {
  const std::int64_t micro = run.micro ? run.micro : run.ranks == 3 ? 2 : 3;
  return concat(R"({"train_batch_size": 12, "train_micro_batch_size_per_gpu": )", micro,
                R"(, "gradient_clipping": 0.5,
                   "optimizer": {"type": "AdamW", "params": {"lr": 0.02, "weight_decay": 0.1}},
                   "scheduler": {"type": "WarmupDecayLR", "params": {"total_num_steps": 12, "warmup_num_steps": 4,
                                 "warmup_max_lr": 0.02}},
                   "zero_optimization": {"stage": )",
                run.stage, R"(, "stage3_param_persistence_threshold": 0})", run.more, "}");
}

std::vector<float> values(Engine& engine, Module& module) { return lab::values_of(engine, module); }

/// What a test does with the engine of a rank before micro-batch number `micro`, counted from 0.
using Before = std::function<void(Engine&, std::int64_t micro)>;

/// Trains until `updates` updates; `start` may load a checkpoint.
std::vector<float> train(const TrainingRun& run, const std::function<void(Engine&)>& start,
                         const Before& before = {}) {
  std::vector<float> result;
  lab::world(run.ranks, [&](World& world) {
    Net net(run.dropout);
    auto engine = initialize(world, net, {.config = config(run), .seed = 5, .log = nullptr});
    auto loader = engine.loader(dataset());
    start(engine);
    for (std::int64_t micro = engine.global_steps() * engine.config().sizes.accumulation;
         engine.global_steps() < updates; ++micro) {
      if (before) before(engine, micro);
      Batch& b = loader.next();
      Tape& t = engine.tape();
      engine.backward(nn::cross_entropy(t, net(t, b["x"]), b["y"]));
      engine.step();
    }
    const auto all = values(engine, net);
    if (world.is_main()) result = all;
  });
  return result;
}

std::vector<float> uninterrupted(const TrainingRun& run) {
  return train(run, [](Engine&) {});
}

/// A run that saves after `saved_after` updates and goes on: saving changes nothing.
std::vector<float> saving(const TrainingRun& run, const std::string& dir,
                          const SaveCheckpointOptions& o = {}) {
  return train(
      run, [](Engine&) {},
      [&](Engine& engine, std::int64_t micro) {
        if (micro == saved_after * engine.config().sizes.accumulation) engine.save_checkpoint(dir, o);
      });
}

std::vector<float> resumed(const TrainingRun& run, const std::string& dir) {
  return train(run, [&](Engine& engine) {
    const auto loaded = engine.load_checkpoint(dir);
    ASSERT_TRUE(loaded);
    EXPECT_EQ(loaded->steps, saved_after);
    EXPECT_EQ(engine.global_steps(), saved_after);
  });
}

TEST(CheckpointMatrix, EveryStrategyOnOneToFourRanksIsResumedByEveryOther) {
  const test::Folder folder;
  for (int ranks = 1; ranks <= 4; ++ranks)
    for (int stage = 0; stage <= 3; ++stage) {
      const std::string dir = folder / concat(ranks, "-", stage);
      const TrainingRun run{.ranks = ranks, .stage = stage};
      const auto expected = uninterrupted(run);
      EXPECT_EQ(saving(run, dir), expected);
      for (int other_ranks = 1; other_ranks <= 4; ++other_ranks)
        for (int other_stage = 0; other_stage <= 3; ++other_stage) {
          SCOPED_TRACE(
              concat("stage ", stage, " on ", ranks, " ranks, then ", other_stage, " on ", other_ranks));
          const auto result = resumed({.ranks = other_ranks, .stage = other_stage}, dir);
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
  std::vector<float> all = values(engine, module);
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
      lab::world(mesh.ranks(), [&](World& world) {
        Net net(0);
        auto engine = initialize(world, net,
                                 {.config = config({.ranks = mesh.ranks(), .stage = stage}),
                                  .mesh = mesh,
                                  .seed = 5,
                                  .log = nullptr});
        auto loader = engine.loader(dataset());
        if (!before.empty()) {
          ASSERT_TRUE(engine.load_checkpoint(before));
        }
        while (before.empty() && engine.global_steps() < saved_after) {
          Batch& b = loader.next();
          engine.backward(nn::cross_entropy(engine.tape(), net(engine.tape(), b["x"]), b["y"]));
          engine.step();
        }
        const auto all = values_and_states(engine, net);
        if (world.is_main()) found = all;
        engine.save_checkpoint(dir);
      });
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
    const TrainingRun run{.ranks = 2, .stage = stage, .dropout = 0.3};
    const std::string dir = folder / concat(stage);
    const auto expected = uninterrupted(run);
    EXPECT_EQ(saving(run, dir, {.async = true}), expected);
    EXPECT_EQ(resumed(run, dir), expected) << "stage " << stage;
  }
}

TEST(CheckpointMatrix, BetweenMicroBatchesTheUpdateBeginsAnew) {
  const test::Folder folder;
  for (int stage = 0; stage <= 3; ++stage)
    for (const std::int64_t offset : {1, 2}) {
      const TrainingRun run{.ranks = 2, .stage = stage, .dropout = 0.3, .micro = 2};
      const std::string dir = folder / concat(stage, "-", offset);
      const auto expected = uninterrupted(run);
      EXPECT_EQ(train(
                    run, [](Engine&) {},
                    [&](Engine& engine, std::int64_t micro) {
                      if (micro == saved_after * 3 + offset) engine.save_checkpoint(dir);
                    }),
                expected);
      EXPECT_EQ(resumed(run, dir), expected) << "stage " << stage << ", micro-batch " << offset;
    }
}

TEST(CheckpointMatrix, SixteenBitsAndF32ReadEachOther) {
  const test::Folder folder;
  const std::string bf16 = R"(, "bf16": {"enabled": true})", f16 = R"(, "fp16": {"enabled": true})";
  const std::string precisions[] = {"", bf16, f16};
  for (std::size_t from = 0; from < 3; ++from)
    for (std::size_t to = 0; to < 3; ++to)
      for (const int stage : {0, 3}) {
        SCOPED_TRACE(concat(from, " to ", to, ", stage ", stage));
        const std::string dir = folder / concat(from, to, stage);
        const TrainingRun run{.ranks = 2, .stage = stage, .more = precisions[from]};
        std::vector<float> saved, loaded;
        const auto expected = train(
            run, [](Engine&) {},
            [&](Engine& engine, std::int64_t micro) {
              if (micro != saved_after * engine.config().sizes.accumulation) return;
              engine.save_checkpoint(dir);
            });
        const TrainingRun other{
            .ranks = from == to ? 2 : 3, .stage = from == to ? stage : 3 - stage, .more = precisions[to]};
        const auto result = resumed(other, dir);
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
  const std::string bf16 = R"(, "bf16": {"enabled": true})";
  for (const TrainingRun& run :
       {TrainingRun{1, 0}, TrainingRun{2, 2}, TrainingRun{3, 3}, TrainingRun{2, 1, bf16}}) {
    const std::string dir = folder / concat(run.ranks, "-", run.stage);
    std::vector<float> saved;
    lab::world(run.ranks, [&](World& world) {
      Net net(0);
      auto engine = initialize(world, net, {.config = config(run), .seed = 5, .log = nullptr});
      auto loader = engine.loader(dataset());
      while (engine.global_steps() < saved_after)
        engine.train_batch(
            loader, [&](Tape& t, const Batch& b) { return nn::cross_entropy(t, net(t, b["x"]), b["y"]); });
      net.count.value.data<float>()[1] = 7;
      engine.save_checkpoint(dir);
      const auto all = values(engine, net);
      if (world.is_main()) saved = all;
    });
    for (int ranks = 1; ranks <= 3; ++ranks)
      for (int stage = 0; stage <= 3; ++stage)
        for (const std::string& path : {dir, dir + "/global_step3"}) {
          SCOPED_TRACE(concat(path, ", then stage ", stage, " on ", ranks));
          lab::world(ranks, [&](World& world) {
            Net net(0);
            const TrainingRun other{.ranks = ranks, .stage = stage};
            auto engine = initialize(world, net, {.config = config(other), .seed = 6, .log = nullptr});
            EXPECT_TRUE(engine.load_model(path).missing_keys().empty());
            EXPECT_EQ(values(engine, net), saved);
            EXPECT_EQ(net.count.value.data<float>()[1], 7);
            EXPECT_EQ(engine.global_steps(), 0);
          });
        }
  }
}

}  // namespace
}  // namespace rz
