/// Models saved and loaded by engines, and losses read from them.
#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <string>
#include <vector>

#include "sharding/engine/engine.h"
#include "sharding/strategy/strategy.h"
#include "tests/lab/training.h"
#include "tests/support/deepspeed_writer.h"
#include "tests/support/error_of.h"

namespace rz {
namespace {

namespace fs = std::filesystem;

struct Net : lab::Mlp {
  explicit Net(std::size_t width) : Mlp({.in = 3, .hidden = width, .classes = 2}) {}
};

EngineOptions options(int stage, std::uint64_t seed) {
  return {.config = concat(R"({"train_micro_batch_size_per_gpu": 4, "zero_optimization": {"stage": )", stage,
                           R"(}, "optimizer": {"type": "SGD"}})"),
          .seed = seed,
          .log = nullptr};
}

using lab::values_of;

TEST(EngineFiles, AModelIsLoadedInAnyStageOnAnyNumberOfRanks) {
  const std::string path = fs::temp_directory_path() / concat("rz-engine-", ::getpid(), ".safetensors");
  std::vector<float> saved;
  lab::world(2, [&](World& world) {
    Net net(5);
    auto engine = initialize(world, net, options(3, 1));
    engine.save_model(path);
    const std::vector<float> all = values_of(engine, net);
    if (world.is_main()) saved = all;
  });
  for (const int ranks : {1, 3})
    for (int stage = 0; stage < 4; ++stage)
      lab::world(ranks, [&](World& world) {
        Net net(5), other(6);
        auto engine = initialize(world, net, options(stage, 2));
        EXPECT_NE(values_of(engine, net), saved);
        engine.load_model(path);
        EXPECT_EQ(values_of(engine, net), saved) << "stage " << stage << ", " << ranks << " ranks";
        auto wrong = initialize(world, other, options(stage, 2));
        const Error e = test::error_of([&] { wrong.load_model(path); });
        EXPECT_EQ(e.code(), Errc::config);
        EXPECT_NE(std::string(e.what()).find("fc1.weight"), std::string::npos) << e.what();
      });
  fs::remove(path);
}

TEST(EngineFiles, APartOfAModelIsLoaded) {
  const std::string path = fs::temp_directory_path() / concat("rz-engine-part-", ::getpid(), ".safetensors");
  std::vector<float> saved;
  lab::world(1, [&](World& world) {
    Net net(5);
    auto engine = initialize(world, net, options(0, 1));
    engine.save_model(path);
    saved = values_of(engine, net);
  });
  for (const int stage : {0, 3})
    lab::world(2, [&](World& world) {
      Net net(5);
      auto engine = initialize(world, net, options(stage, 2));
      const auto before = values_of(engine, net.fc2);
      const auto loaded = engine.load_model(net.fc1, path, {.prefix = "fc1."});
      EXPECT_EQ(loaded.tensors(), 2u);
      auto expected = saved;
      std::ranges::copy(before, expected.end() - static_cast<std::ptrdiff_t>(before.size()));
      EXPECT_EQ(values_of(engine, net), expected) << stage;
    });
  fs::remove(path);
}

/// The parameters of Net(2), as files of PyTorch and DeepSpeed have them.
test::DeepSpeedWriter zero_of_net() {
  test::DeepSpeedWriter w;
  w.stage = 3, w.ranks = 2, w.groups = 1;
  w.parameters = {{"fc1.weight", {2, 3}}, {"fc1.bias", {2}}, {"fc2.weight", {2, 2}}, {"fc2.bias", {2}}};
  return w;
}

TEST(EngineFiles, AStateDictOfPyTorchIsLoaded) {
  const std::string path = fs::temp_directory_path() / concat("rz-engine-", ::getpid(), ".pt");
  const test::DeepSpeedWriter w = zero_of_net();
  test::TorchWriter torch;
  test::pickle::Pairs pairs;
  std::vector<float> expected;
  for (std::size_t p = 0; p < w.parameters.size(); ++p) {
    pairs.emplace_back(test::pickle::text(w.parameters[p].name),
                       torch.tensor(w.values(p), w.parameters[p].shape));
    const auto v = w.values(p);
    expected.insert(expected.end(), v.begin(), v.end());
  }
  torch.write(path, test::pickle::state_dict(pairs));
  for (const int stage : {0, 3})
    lab::world(2, [&](World& world) {
      Net net(2);
      auto engine = initialize(world, net, options(stage, 2));
      engine.load_model(path);
      EXPECT_EQ(values_of(engine, net), expected);
    });
  fs::remove(path);
}

TEST(EngineFiles, ACheckpointOfDeepSpeedIsNotResumed) {
  const std::string dir = fs::temp_directory_path() / concat("rz-engine-", ::getpid(), ".zero");
  zero_of_net().write(dir + "/global_step3");
  for (const bool latest : {true, false}) {
    if (latest) test::write_bytes(dir + "/latest", "global_step3");
    lab::world(2, [&](World& world) {
      Net net(2);
      auto engine = initialize(world, net, options(1, 2));
      const auto before = values_of(engine, net);
      const std::string folder = dir + "/global_step3";
      const Error e = test::error_of([&] { engine.load_checkpoint(latest ? dir : folder); });
      EXPECT_EQ(e.code(), Errc::config);
      EXPECT_NE(std::string(e.what()).find("is a checkpoint of DeepSpeed"), std::string::npos) << e.what();
      EXPECT_NE(std::string(e.what()).find("`checkpoint merge " + folder), std::string::npos) << e.what();
      EXPECT_EQ(values_of(engine, net), before);
    });
  }
  fs::remove_all(dir);
}

TEST(EngineFiles, AnItemIsTheLossOfThisRank) {
  lab::world(2, [](World& world) {
    Net net(5);
    auto engine = initialize(world, net, options(0, 1));
    Tape& t = engine.tape();
    Tensor x = Tensor::zeros({4, 3}), y = Tensor::zeros({4}, DType::i32);
    y.data<std::int32_t>()[3] = -100;
    if (world.rank() == 1) y.data<std::int32_t>()[2] = -100;
    const Var logits = net(t, x);
    const nn::Loss loss = nn::cross_entropy(t, logits, y);
    EXPECT_EQ(engine.item(loss).count, world.rank() == 1 ? 2 : 3);
    EXPECT_EQ(engine.item(loss).sum, loss.read(engine.stream()).sum);
    const Var mse = nn::mse(t, logits, Tensor::zeros({4, 2}));
    EXPECT_EQ(engine.item(mse).value(), static_cast<double>(*t.value(mse).data<float>()));
    EXPECT_EQ(engine.item(mse).count, 1);
    EXPECT_EQ(test::error_of([&] { engine.item(logits); }).code(), Errc::invalid_argument);
    t.reset();
  });
}

}  // namespace
}  // namespace rz
