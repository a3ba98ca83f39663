/// What save_checkpoint() and load_checkpoint() promise besides the bits of a resumed run.
#include <gtest/gtest.h>
#include <unistd.h>

#include <cmath>
#include <filesystem>
#include <fstream>
#include <limits>
#include <string>
#include <vector>

#include "sharding/checkpoint/checkpoint_folder.h"
#include "sharding/engine/engine.h"
#include "sharding/io/json.h"
#include "sharding/strategy/optimizer_state.h"
#include "sharding/strategy/strategy.h"
#include "tests/lab/training.h"
#include "tests/support/error_of.h"
#include "tests/support/folder.h"

namespace rz {
namespace {

namespace fs = std::filesystem;

struct Net : lab::Mlp {
  explicit Net(std::size_t width = 5) : Mlp({.in = 3, .hidden = width, .classes = 2, .dropout = 0}) {}
};

/// `params`: JSON.
EngineOptions options(const char* optimizer, const char* params, int stage, std::uint64_t seed = 1) {
  return {.config = concat(R"({"train_micro_batch_size_per_gpu": 4, "zero_optimization": {"stage": )", stage,
                           R"(}, "optimizer": {"type": ")", optimizer, R"(", "params": )", params, "}}"),
          .seed = seed,
          .log = nullptr};
}
EngineOptions options(const char* optimizer = "AdamW", std::uint64_t seed = 1) {
  return options(optimizer, "{}", 2, seed);
}

/// Of all parameters, on one rank.
std::vector<float> state_named(Engine& engine, const std::string& name) {
  std::vector<float> all;
  engine.strategy().optimizer_state().visit(
      [&](const std::string& state, const Parameter&, Range r, const float* value) {
        if (state == name) all.insert(all.end(), value, value + r.count());
      });
  return all;
}

using lab::values_of;

void update(Engine& engine, Net& net) {
  engine.backward(net(engine.tape(), lab::batch(0, 4, {.in = 3, .classes = 2})));
  engine.step();
}

/// A folder that a test owns.
class EngineCheckpoint : public testing::Test {
 protected:
  /// A checkpoint after one update on two ranks.
  void save_one(const SaveCheckpointOptions& o = {}) {
    lab::world(2, [&](World& world) {
      Net net;
      auto engine = initialize(world, net, options());
      update(engine, net);
      engine.save_checkpoint(dir_, o);
    });
  }
  /// Every rank fails to load, with one text that contains `part`, and keeps its values.
  void expect_refused(
      const std::string& part, EngineOptions (*make)() = [] { return options(); }, std::size_t width = 5) {
    lab::world(2, [&](World& world) {
      Net net(width);
      auto engine = initialize(world, net, make());
      const auto before = values_of(engine, net);
      const Error e = test::error_of([&] { engine.load_checkpoint(dir_); });
      EXPECT_NE(std::string(e.what()).find(part), std::string::npos) << e.what();
      EXPECT_EQ(std::string(e.what()).find('\n'), std::string::npos) << e.what();
      EXPECT_EQ(values_of(engine, net), before);
      EXPECT_EQ(engine.global_steps(), 0);
      update(engine, net);  // the engine is as before
    });
  }
  std::vector<std::string> files() const {
    std::vector<std::string> names;
    for (const auto& entry : fs::directory_iterator(dir_)) names.push_back(entry.path().filename());
    std::ranges::sort(names);
    return names;
  }

  const test::Folder folder_;
  const std::string dir_ = folder_ / "run";  // the first checkpoint makes it
};

TEST_F(EngineCheckpoint, ClientValuesComeBackWithTheirTypesAndBits) {
  const ClientState saved{{"flag", true},
                          {"epoch", 3},
                          {"large", std::numeric_limits<std::int64_t>::min()},
                          {"third", 1.0 / 3},
                          {"whole", 2.0},
                          {"tiny", 5e-324},
                          {"infinite", std::numeric_limits<double>::infinity()},
                          {"text", "a \"b\" \n ü"}};
  save_one({.client_state = saved});
  lab::world(3, [&](World& world) {
    Net net;
    auto engine = initialize(world, net, options());
    const auto loaded = engine.load_checkpoint(dir_);
    ASSERT_TRUE(loaded);
    EXPECT_EQ(loaded->client_state, saved);
    EXPECT_EQ(loaded->tag, "global_step1");
    EXPECT_EQ(loaded->steps, 1);
    EXPECT_EQ(engine.optimizer().updates(), 1);
  });
}

TEST_F(EngineCheckpoint, HasTheFilesOfTheProgram) {
  for (const bool async : {false, true}) {
    save_one({.async = async, .files = {{"config.json", "{}"}, {"notes.txt", "a\nb"}}});
    EXPECT_EQ(read_text_file(dir_ + "/global_step1/config.json"), "{}");
    EXPECT_EQ(read_text_file(dir_ + "/global_step1/notes.txt"), "a\nb");
    fs::remove_all(dir_);
  }
  lab::world(2, [&](World& world) {
    Net net;
    auto engine = initialize(world, net, options());
    for (const char* name : {"", ".hidden", "a/b", "checkpoint.json", "rank_00000_of_00002.safetensors"}) {
      const Error e = test::error_of([&] { engine.save_checkpoint(dir_, {.files = {{name, ""}}}); });
      EXPECT_EQ(e.code(), Errc::invalid_argument) << name;
      EXPECT_NE(std::string(e.what()).find(concat("the file '", name, "'")), std::string::npos) << e.what();
    }
  });
  EXPECT_FALSE(fs::exists(dir_));
}

/// A program's own source of batches.
struct Counter final : StatefulLoader {
  LoaderPosition at{};
  LoaderPosition position() const override { return at; }
  void set_position(const LoaderPosition& p) override { at = p; }
};

TEST_F(EngineCheckpoint, HasThePositionsOfTheProgramsOwnSources) {
  lab::world(2, [&](World& world) {
    Net net;
    auto engine = initialize(world, net, options());
    Counter early, late;
    engine.loader_positions()->attach("early", early);
    update(engine, net);
    early.at = {2, 40};
    engine.loader_positions()->attach("late", late);
    late.at = {0, 8};
    engine.save_checkpoint(dir_);
    engine.loader_positions()->detach(early);
    engine.loader_positions()->detach(late);
  });
  lab::world(3, [&](World& world) {
    Net net;
    auto engine = initialize(world, net, options());
    Counter early, late;
    engine.loader_positions()->attach("early", early);
    ASSERT_TRUE(engine.load_checkpoint(dir_));
    EXPECT_EQ(early.at, (LoaderPosition{2, 40}));
    engine.loader_positions()->attach("late", late);  // restored when it is attached
    EXPECT_EQ(late.at, (LoaderPosition{0, 8}));
    engine.loader_positions()->detach(early);
    engine.loader_positions()->detach(late);
  });
}

TEST_F(EngineCheckpoint, AFolderWithoutCheckpointsIsNoError) {
  lab::world(2, [&](World& world) {
    Net net;
    auto engine = initialize(world, net, options());
    EXPECT_FALSE(engine.load_checkpoint(dir_));
    const Error e = test::error_of([&] { engine.load_checkpoint(dir_, {.tag = "mine"}); });
    EXPECT_NE(std::string(e.what()).find("mine"), std::string::npos) << e.what();
  });
}

TEST_F(EngineCheckpoint, DifferentTagsAreShownAndNothingIsWritten) {
  lab::world(3, [&](World& world) {
    Net net;
    auto engine = initialize(world, net, options());
    const Error e =
        test::error_of([&] { engine.save_checkpoint(dir_, {.tag = world.rank() == 1 ? "other" : "mine"}); });
    EXPECT_EQ(e.code(), Errc::mismatch);
    EXPECT_NE(std::string(e.what()).find("rank 0 'mine', rank 1 'other', rank 2 'mine'"), std::string::npos)
        << e.what();
    EXPECT_EQ(test::error_of([&] { engine.save_checkpoint(dir_, {.tag = "a/b"}); }).code(),
              Errc::invalid_argument);
  });
  EXPECT_FALSE(fs::exists(dir_));
}

TEST_F(EngineCheckpoint, TheLastOnesAreKept) {
  lab::world(2, [&](World& world) {
    Net net;
    auto engine = initialize(world, net, options());
    for (int i = 0; i < 4; ++i) {
      update(engine, net);
      engine.save_checkpoint(dir_, {.async = i % 2 == 0, .save_total_limit = 2});
    }
    engine.save_checkpoint(dir_, {.tag = "mine"});
  });
  EXPECT_EQ(files(), (std::vector<std::string>{"global_step3", "global_step4", "latest", "mine"}));
  EXPECT_EQ(read_tag_file(dir_, latest_file), "mine");
}

TEST_F(EngineCheckpoint, DamageIsFoundBeforeAnythingIsLoaded) {
  save_one();
  const std::string file = dir_ + "/global_step1/rank_00001_of_00002.safetensors";
  std::fstream stream(file, std::ios::in | std::ios::out | std::ios::binary);
  stream.seekg(-1, std::ios::end);
  const char last = static_cast<char>(stream.get());
  stream.seekp(-1, std::ios::end);
  stream.put(static_cast<char>(last ^ 1));
  stream.close();
  expect_refused("rank_00001_of_00002.safetensors: tensor '");
  fs::resize_file(file, fs::file_size(file) - 4);
  expect_refused("the file is damaged or was replaced");
  fs::remove(file);
  expect_refused("the index of the checkpoint lists it");
}

TEST_F(EngineCheckpoint, WhatDoesNotFitIsNamed) {
  save_one();
  expect_refused(
      "fc1.weight is [5, 3] where the model has [6, 3]", [] { return options(); }, 6);
  const char* const others[] = {"Muon", "SGD", "Lamb"};  // also with states of the same names, or none
  for (const char* other : others)
    lab::world(2, [&](World& world) {
      Net net;
      auto engine = initialize(world, net, options(other));
      const auto before = values_of(engine, net);
      for (const bool strict : {true, false}) {
        const Error e = test::error_of([&] { engine.load_checkpoint(dir_, {.load_module_strict = strict}); });
        EXPECT_EQ(e.code(), Errc::config);
        EXPECT_NE(std::string(e.what()).find(
                      concat("of the optimizer adamw and the engine has ", engine.optimizer().name(), ",")),
                  std::string::npos)
            << e.what();
      }
      EXPECT_EQ(values_of(engine, net), before);
      EXPECT_TRUE(engine.load_checkpoint(dir_, {.load_optimizer_states = false}));
      EXPECT_EQ(engine.optimizer().updates(), 0);
    });
  expect_refused("seed 1 and the engine 2", [] { return options("AdamW", 2); });
  lab::world(2, [&](World& world) {
    Net net;
    auto engine = initialize(world, net, options("SGD"));
    update(engine, net);
    engine.save_checkpoint(dir_);
  });
  expect_refused("of the optimizer sgd and the engine has adamw,");
}

TEST_F(EngineCheckpoint, AParameterWithoutStatesIsNewToTheOptimizer) {
  // Adam's first update of an element is its rate; after 30 updates without moments it would be three times.
  lab::world(2, [&](World& world) {
    Net net;
    net.fc1.requires_grad_(false);
    auto engine = initialize(world, net, options());
    for (int u = 0; u < 30; ++u) update(engine, net);
    engine.save_checkpoint(dir_);
  });
  for (const int ranks : {1, 2})
    lab::world(ranks, [&](World& world) {
      Net net;
      auto engine = initialize(world, net, options());
      EXPECT_EQ(test::error_of([&] { engine.load_checkpoint(dir_, {.tag = "global_step30"}); }).code(),
                Errc::config);
      ASSERT_TRUE(engine.load_checkpoint(dir_, {.tag = "global_step30", .load_module_strict = false}));
      EXPECT_EQ(engine.optimizer().updates(), 30);
      const Parameter& bias = *net.fc1.parameters().back();
      EXPECT_EQ(engine.strategy().optimizer_state().missed_updates(bias), 30);
      EXPECT_EQ(engine.strategy().optimizer_state().missed_updates(*net.fc2.parameters().back()), 0);
      const auto before = values_of(engine, net.fc1);
      update(engine, net);
      const auto after = values_of(engine, net.fc1);
      for (std::size_t i = before.size() - 5; i < before.size(); ++i)  // the bias
        EXPECT_NEAR(std::abs(after[i] - before[i]), 1e-3, 1e-6);
      engine.save_checkpoint(dir_);
      Net again;
      auto resumed = initialize(world, again, options());
      ASSERT_TRUE(resumed.load_checkpoint(dir_));
      EXPECT_EQ(resumed.strategy().optimizer_state().missed_updates(*again.fc1.parameters().back()), 30);
    });
}

/// Two layers of other names, or one.
struct Renamed : Module {
  explicit Renamed(const char* first) : a(*this, first, 3, 5), b(*this, "head", 5, 2) {}
  nn::Linear a, b;
};

TEST_F(EngineCheckpoint, ThatIsNotStrictNamesWhatItLacks) {
  save_one();
  for (const bool only : {false, true})
    lab::world(2, [&](World& world) {
      std::FILE* log = std::tmpfile();
      const auto make = [&] {
        EngineOptions o = options();
        o.log = log;
        return o;
      };
      const LoadCheckpointOptions loading{.load_module_strict = false, .load_module_only = only};
      Renamed part("fc1"), none("encoder");
      auto engine = initialize(world, part, make());
      const auto loaded = engine.load_checkpoint(dir_, loading);
      ASSERT_TRUE(loaded);
      EXPECT_EQ(loaded->missing_keys, (std::vector<std::string>{"head.weight", "head.bias"}));
      EXPECT_EQ(loaded->unexpected_keys, (std::vector<std::string>{"fc2.bias", "fc2.weight"}));
      std::string text(100000, '\0');
      std::rewind(log);
      text.resize(std::fread(text.data(), 1, text.size(), log));
      std::fclose(log);
      const std::string path = dir_ + "/global_step1";
      for (const char* names : {": not in the checkpoint: head.weight, head.bias\n",
                                ": not in the model: fc2.bias, fc2.weight\n"})
        EXPECT_EQ(text.find("loaded: " + path + names) != text.npos, world.is_main()) << text;
      auto other = initialize(world, none, options());
      const Error e = test::error_of([&] { other.load_checkpoint(dir_, loading); });
      EXPECT_EQ(e.code(), Errc::config);
      EXPECT_EQ(e.what(), path +
                              ": nothing of it is in the model, which begins with 'encoder.weight', and the "
                              "checkpoint with 'fc1.bias'; give a checkpoint of this model");
    });
}

/// Saved by 2 ranks, resumed by others in other stages, with the bits of a run that was not interrupted:
/// ranks have the same batch, and means over powers of two are exact.
TEST_F(EngineCheckpoint, StatesOfEveryRuleAreResharded) {
  struct Rule {
    const char *type, *params;
  };
  for (const Rule& rule :
       {Rule{"AdamW", R"({"amsgrad": true, "betas": [0.9, 0.5]})"},
        Rule{"RMSprop", R"({"centered": true, "momentum": 0.9, "lr": 1e-3})"},
        Rule{"SGD", R"({"momentum": 0.9, "dampening": 0.5, "maximize": true, "lr": 1e-3})"}}) {
    fs::remove_all(dir_);
    std::vector<float> whole;
    lab::world(2, [&](World& world) {
      Net net;
      auto engine = initialize(world, net, options(rule.type, rule.params, 3));
      for (int u = 0; u < 3; ++u) update(engine, net);
      engine.save_checkpoint(dir_);
      for (int u = 0; u < 3; ++u) update(engine, net);
      const auto all = values_of(engine, net);
      if (world.is_main()) whole = all;
    });
    for (const auto& [ranks, stage] : {std::pair(1, 0), std::pair(2, 2), std::pair(4, 1), std::pair(1, 3)})
      lab::world(ranks, [&, stage = stage](World& world) {
        Net net;
        auto engine = initialize(world, net, options(rule.type, rule.params, stage));
        const auto loaded = engine.load_checkpoint(dir_);
        ASSERT_TRUE(loaded);
        EXPECT_EQ(loaded->differences.find("optimizer/"), std::string::npos) << loaded->differences;
        for (int u = 0; u < 3; ++u) update(engine, net);
        EXPECT_EQ(values_of(engine, net), whole) << rule.type << " in stage " << stage;
      });
  }
}

TEST_F(EngineCheckpoint, TheMaximumOfAmsgradStartsFromTheSecondMoment) {
  const auto plain = [] { return options("AdamW", R"({"betas": [0.9, 0.5]})", 2); };
  const auto amsgrad = [] { return options("AdamW", R"({"betas": [0.9, 0.5], "amsgrad": true})", 2); };
  std::vector<float> first, second;
  lab::world(1, [&](World& world) {
    Net net;
    auto engine = initialize(world, net, plain());
    for (int u = 0; u < 4; ++u) update(engine, net);
    engine.save_checkpoint(dir_);
    first = state_named(engine, "exp_avg"), second = state_named(engine, "exp_avg_sq");
  });
  ASSERT_FALSE(second.empty());
  for (const bool strict : {true, false})
    lab::world(1, [&](World& world) {
      Net net;
      auto engine = initialize(world, net, amsgrad());
      const auto loaded = engine.load_checkpoint(dir_, {.tag = "global_step4", .load_module_strict = strict});
      ASSERT_TRUE(loaded);
      EXPECT_EQ(state_named(engine, "exp_avg"), first);
      EXPECT_EQ(state_named(engine, "max_exp_avg_sq"), second);
      EXPECT_NE(loaded->differences.find("optimizer/max_exp_avg_sq: absent, now starts from exp_avg_sq"),
                std::string::npos)
          << loaded->differences;
      EXPECT_EQ(engine.optimizer().updates(), 4);
      for (const Parameter* p : net.parameters())
        EXPECT_EQ(engine.strategy().optimizer_state().missed_updates(*p), 0);
      update(engine, net);
      engine.save_checkpoint(dir_);
      Net again;
      auto back = initialize(world, again, plain());
      const auto reverse = back.load_checkpoint(dir_, {.tag = "global_step5", .load_module_strict = strict});
      ASSERT_TRUE(reverse);
      EXPECT_EQ(state_named(back, "exp_avg"), state_named(engine, "exp_avg"));
      EXPECT_EQ(state_named(back, "exp_avg_sq"), state_named(engine, "exp_avg_sq"));
      EXPECT_NE(reverse->differences.find("optimizer/max_exp_avg_sq: saved, now absent"), std::string::npos)
          << reverse->differences;
    });
}

/// SGD without a momentum leaves none: its first gradient enters whole, as at the first update.
TEST_F(EngineCheckpoint, AMomentumThatBeginsLaterIsNew) {
  lab::world(1, [&](World& world) {
    Net net;
    auto engine = initialize(world, net, options("SGD", "{}", 0));
    update(engine, net);
    engine.save_checkpoint(dir_);
    update(engine, net);
    Net other;
    auto with = initialize(world, other, options("SGD", R"({"momentum": 0.9, "dampening": 0.5})", 0));
    const auto loaded = with.load_checkpoint(dir_);
    ASSERT_TRUE(loaded);
    EXPECT_NE(loaded->differences.find("without states, now 0"), std::string::npos) << loaded->differences;
    update(with, other);
    EXPECT_EQ(values_of(with, other), values_of(engine, net));
  });
}

TEST_F(EngineCheckpoint, AModelIsLoadedWithoutItsTraining) {
  save_one();
  lab::world(1, [&](World& world) {
    Net net, other;
    auto engine = initialize(world, net, options("SGD", 7));
    const auto loaded = engine.load_checkpoint(dir_, {.load_module_only = true});
    ASSERT_TRUE(loaded);
    EXPECT_EQ(engine.global_steps(), 0);
    auto resumed = initialize(world, other, options());
    resumed.load_checkpoint(dir_);
    EXPECT_EQ(values_of(engine, net), values_of(resumed, other));
  });
}

TEST_F(EngineCheckpoint, AFolderThatIsNoCheckpointIsNeverReplaced) {
  fs::create_directories(dir_ + "/global_step1");
  std::ofstream(dir_ + "/global_step1/mine.txt") << "kept";
  lab::world(2, [&](World& world) {
    Net net;
    auto engine = initialize(world, net, options());
    update(engine, net);
    const Error e = test::error_of([&] { engine.save_checkpoint(dir_); });
    EXPECT_EQ(e.code(), Errc::io);
    EXPECT_NE(std::string(e.what()).find("is not a checkpoint"), std::string::npos) << e.what();
  });
  EXPECT_TRUE(fs::exists(dir_ + "/global_step1/mine.txt"));
  EXPECT_EQ(files(), (std::vector<std::string>{"global_step1"}));
}

// ---- what is not finite

/// The values of the last parameter on rank 0, where it is held.
void spoil(Engine& engine, float value) {
  engine.strategy().values().fill([&](const Parameter& p, Range elements, float* out) {
    std::fill_n(out, elements.count(), p.name == "fc2.bias" ? value : 0.5f);
  });
}

TEST_F(EngineCheckpoint, WhatIsNotFiniteReplacesNothing) {
  lab::world(2, [&](World& world) {
    for (const bool async : {false, true}) {
      const std::string dir = dir_ + (async ? "/async" : "/now");
      Net net;
      auto engine = initialize(world, net, options());
      update(engine, net);
      engine.save_checkpoint(dir, {.tag = "good"});
      engine.save_checkpoint(dir, {.tag = "same"});
      const auto good = values_of(engine, net);
      for (const float bad : {NAN, -INFINITY}) {
        spoil(engine, bad);
        const Error e = test::error_of([&] {
          engine.save_checkpoint(dir, {.tag = "same", .async = async});
          engine.wait_for_checkpoint();
        });
        EXPECT_EQ(e.code(), Errc::diverged);
        EXPECT_NE(std::string(e.what()).find("model/fc2.bias has an element that is not finite"),
                  std::string::npos)
            << e.what();
        for (const char* tag : {"good", "same", ""}) {
          engine.load_checkpoint(dir, {.tag = tag});
          EXPECT_EQ(values_of(engine, net), good) << tag;
        }
        EXPECT_EQ(read_tag_file(dir, latest_file), "same");
      }
      spoil(engine, NAN);
      engine.save_checkpoint(dir, {.tag = "bad", .async = async, .nonfinite = true});
      engine.wait_for_checkpoint();
      EXPECT_EQ(checkpoint_tags(dir), (std::vector<std::string>{"bad", "good", "same"}));
    }
  });
}

TEST_F(EngineCheckpoint, StatesThatAreNotFiniteAreNotSaved) {
  lab::world(2, [&](World& world) {
    Net net;
    auto engine = initialize(world, net, options());
    update(engine, net);
    engine.strategy().optimizer_state().fill(
        engine.optimizer(), [](const std::string& state, const Parameter&, Range elements, float* out) {
          std::fill_n(out, elements.count(), state == "exp_avg_sq" ? INFINITY : 0.0f);
        });
    const Error e = test::error_of([&] { engine.save_checkpoint(dir_, {}); });
    EXPECT_EQ(e.code(), Errc::diverged);
    EXPECT_NE(std::string(e.what()).find("optimizer/exp_avg_sq/"), std::string::npos) << e.what();
    EXPECT_TRUE(checkpoint_tags(dir_).empty());
  });
}

TEST_F(EngineCheckpoint, SkippedUpdatesInARowAreCountedOn) {
  lab::world(2, [&](World& world) {
    const auto make = [] {
      return EngineOptions{.config = R"({"train_micro_batch_size_per_gpu": 4, "bf16": {"enabled": true},
          "optimizer": {"type": "SGD"}, "ringzero": {"max_skipped_updates": 3}})",
                           .seed = 1,
                           .log = nullptr};
    };
    const auto overflow = [](Engine& engine, Net& net) {
      engine.backward(1e200 * net(engine.tape(), lab::batch(0, 4, {.in = 3, .classes = 2})));
      engine.step();
    };
    Net net, again;
    auto engine = initialize(world, net, make());
    update(engine, net);
    for (int i = 0; i < 2; ++i) overflow(engine, net);
    engine.save_checkpoint(dir_, {});
    auto resumed = initialize(world, again, make());
    resumed.load_checkpoint(dir_);
    EXPECT_EQ(test::error_of([&] { overflow(resumed, again); }).code(), Errc::diverged);
  });
}

}  // namespace
}  // namespace rz
