/// A program that trains a GPT-2 with the library alone: tokens, loader, engine, files of Hugging Face.
#include <gtest/gtest.h>

#include <cmath>
#include <filesystem>
#include <fstream>

#include "sharding/data/tokens.h"
#include "sharding/engine/engine.h"
#include "sharding/huggingface/gpt2_config.h"
#include "sharding/huggingface/pretrained_weights.h"
#include "sharding/huggingface/save_pretrained.h"
#include "sharding/strategy/strategy.h"
#include "tests/lab/world.h"
#include "tests/support/error_of.h"
#include "tests/support/folder.h"

namespace rz {
namespace {

namespace fs = std::filesystem;

constexpr Gpt2Config small{.n_layer = 1, .n_head = 2, .n_embd = 32, .n_positions = 16, .vocab_size = 256};

std::string config(int stage) {
  return concat(R"({"train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 2,
    "optimizer": {"type": "AdamW", "params": {"lr": 0.01}}, "zero_optimization": {"stage": )",
                stage, R"(, "stage3_param_persistence_threshold": 0}})");
}

nn::Loss loss_of(Gpt2& model, Tape& tape, const Batch& batch) {
  return model.forward(tape, batch["inputs"], batch["targets"]).loss;
}

/// Mean loss over the data, without padding rows in it, since the batches are even.
double evaluate(Engine& engine, Gpt2& model, const TokenDataset& data) {
  Loader loader = engine.loader(data, {.shuffle = false, .drop_last = true});
  Mean mean;
  for (Batch& batch : loader)
    engine.evaluate([&](Tape& tape) {
      const ops::LossSum loss = loss_of(model, tape, batch).read(engine.stream());
      mean.add({loss.sum, static_cast<double>(loss.count)});
    });
  return engine.world().reduce(mean);
}

class Gpt2Program : public testing::Test, protected test::Folder {
 protected:
  void SetUp() override {
    std::ofstream text(path("text"));
    for (int i = 0; i < 60; ++i) text << "the ring sends " << i % 10 << " chunks. ";
  }
  TokenDataset data() const { return {Tokens::from_text(path("text")), small.n_positions}; }
};

TEST_F(Gpt2Program, TrainsSavesAndGoesOnFromWhatItSaved) {
  for (int stage = 0; stage < 4; ++stage) {
    double trained = 0;
    lab::world(2, [&](World& world) {
      Gpt2 model(small);
      Engine engine = initialize(world, model, {.config = config(stage), .log = nullptr});
      Loader loader = engine.loader(data());
      const double before = evaluate(engine, model, data());
      for (int i = 0; i < 12; ++i)
        engine.train_batch(loader, [&](Tape& t, const Batch& b) { return loss_of(model, t, b); });
      const double after = evaluate(engine, model, data());
      EXPECT_NEAR(before, std::log(256), 0.3) << "an untrained model knows nothing";
      EXPECT_LT(after, 0.6 * before) << "stage " << stage;
      save_pretrained(path("model"), model, engine.strategy(), world.rank(), engine.stream());
      if (world.is_main()) trained = after;
    });
    lab::world(1, [&](World& world) {
      Gpt2 model(read_gpt2_config(path("model")));
      const PretrainedWeights weights(path("model"), model);
      Engine engine = initialize(
          world, model,
          {.config = R"({"train_micro_batch_size_per_gpu": 8})",
           .initial_values = [&](const Parameter& p, Range r, float* out) { weights.read(p, r, out); },
           .log = nullptr});
      EXPECT_NEAR(evaluate(engine, model, data()), trained, 1e-5);
    });
  }
}

/// Losses of a few updates.
std::vector<double> losses(World& world, const TokenDataset& data, EngineOptions options) {
  Gpt2 model(small);
  options.seed = 4;
  options.log = nullptr;
  Engine engine = initialize(world, model, std::move(options));
  Loader loader = engine.loader(data);
  std::vector<double> all;
  for (int i = 0; i < 3; ++i) {
    engine.train_batch(loader, [&](Tape& t, const Batch& b) { return loss_of(model, t, b); });
    all.push_back(engine.loss());
  }
  return all;
}

TEST_F(Gpt2Program, AConfigurationMayHaveBeenReadBefore) {
  lab::world(2, [&](World& world) {
    const DsConfig read = parse_ds_config(config(2), "ds.json", {}, {.ranks = 2});
    EXPECT_EQ(losses(world, data(), {.ds_config = read}), losses(world, data(), {.config = config(2)}));
    DsConfig incomplete = read;
    incomplete.sizes = {};
    const Error e = test::error_of([&] { losses(world, data(), {.ds_config = incomplete}); });
    EXPECT_EQ(e.code(), Errc::config);
  });
}

TEST_F(Gpt2Program, AnAbortReachesRanksThatWaitInTheEngine) {
  lab::world(2, [&](World& world) {
    Gpt2 model(small);
    // With the number of terms given, an update is in the engine's communicator alone.
    Engine engine = initialize(world, model, {.config = config(1), .expected_terms = 256, .log = nullptr});
    Loader loader = engine.loader(data());
    if (world.rank() == 1) {
      engine.abort("no data");
      return;
    }
    const Error e = test::error_of(
        [&] { engine.train_batch(loader, [&](Tape& t, const Batch& b) { return loss_of(model, t, b); }); });
    EXPECT_EQ(e.code(), Errc::aborted);
    EXPECT_EQ(e.culprit(), 1);
  });
}

}  // namespace
}  // namespace rz
