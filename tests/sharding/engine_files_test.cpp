/// Models saved and loaded by engines, and losses read from them.
#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>
#include <functional>
#include <string>
#include <vector>

#include "sharding/engine/engine.h"
#include "tests/support/error_of.h"
#include "tests/support/ranks.h"

namespace rz {
namespace {

namespace fs = std::filesystem;

struct Net : Module {
  explicit Net(std::size_t width) : fc1(*this, "fc1", 3, width), fc2(*this, "fc2", width, 2) {}
  Var operator()(Tape& t, const Tensor& x) { return fc2(t, fc1(t, x)); }
  nn::Linear fc1, fc2;
};

void in_world(int ranks, const std::function<void(World&)>& body) {
  test::run_ranks(ranks, [&](int rank, std::shared_ptr<Store> store) {
    World world(Communicator::connect(rank, ranks, std::move(store)));
    body(world);
  });
}

EngineOptions options(int stage, std::uint64_t seed) {
  return {.config = concat(R"({"train_micro_batch_size_per_gpu": 4, "zero_optimization": {"stage": )", stage,
                           R"(}, "optimizer": {"type": "SGD"}})"),
          .seed = seed,
          .log = nullptr};
}

std::vector<float> values(Engine& engine, Module& module) {
  std::vector<float> all;
  for (const Parameter* p : module.parameters()) {
    const Tensor value = engine.strategy().values().whole(*p);
    all.insert(all.end(), value.data<float>(), value.data<float>() + value.count());
  }
  return all;
}

TEST(EngineFiles, AModelIsLoadedInAnyStageOnAnyNumberOfRanks) {
  const std::string path = fs::temp_directory_path() / concat("rz-engine-", ::getpid(), ".safetensors");
  std::vector<float> saved;
  in_world(2, [&](World& world) {
    Net net(5);
    auto engine = initialize(world, net, options(3, 1));
    engine.save_model(path);
    const std::vector<float> all = values(engine, net);
    if (world.is_main()) saved = all;
  });
  for (const int ranks : {1, 3})
    for (int stage = 0; stage < 4; ++stage)
      in_world(ranks, [&](World& world) {
        Net net(5), other(6);
        auto engine = initialize(world, net, options(stage, 2));
        EXPECT_NE(values(engine, net), saved);
        engine.load_model(path);
        EXPECT_EQ(values(engine, net), saved) << "stage " << stage << ", " << ranks << " ranks";
        auto wrong = initialize(world, other, options(stage, 2));
        const Error e = test::error_of([&] { wrong.load_model(path); });
        EXPECT_EQ(e.code(), Errc::config);
        EXPECT_NE(std::string(e.what()).find("fc1.weight"), std::string::npos) << e.what();
      });
  fs::remove(path);
}

TEST(EngineFiles, AnItemIsTheLossOfThisRank) {
  in_world(2, [](World& world) {
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
