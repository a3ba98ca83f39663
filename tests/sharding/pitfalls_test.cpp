/// Mistakes that users of other systems make: each has the right result, or an error that names it.
#include <gtest/gtest.h>

#include <functional>
#include <string>
#include <vector>

#include "sharding/engine/engine.h"
#include "sharding/strategy/strategy.h"
#include "tests/lab/world.h"
#include "tests/support/error_of.h"

namespace rz {
namespace {

struct Net : Module {
  nn::Linear fc1{*this, "fc1", 3, 8}, fc2{*this, "fc2", 8, 2};
  Var operator()(Tape& t, const Tensor& x) { return fc2(t, nn::gelu(t, fc1(t, x))); }
};

struct Samples {
  explicit Samples(int rank) {
    for (std::size_t i = 0; i < x.count(); ++i)
      x.data<float>()[i] =
          static_cast<float>(random_uniform(5, "x", i + 12 * static_cast<std::size_t>(rank)));
    for (int i = 0; i < 4; ++i) y.data<std::int32_t>()[i] = i % 2;
  }
  Tensor x = Tensor::empty({4, 3}), y = Tensor::empty({4}, DType::i32);
};

EngineOptions options(int stage, const std::string& more = "") {
  return {.config = concat(R"({"train_micro_batch_size_per_gpu": 4, "zero_optimization": {"stage": )", stage,
                           R"(, "stage3_param_persistence_threshold": 0}, )", more,
                           R"("optimizer": {"type": "SGD", "params": {"lr": 0.5}}})"),
          .log = nullptr};
}

nn::Loss loss(Tape& t, Net& net, const Samples& s) { return nn::cross_entropy(t, net(t, s.x), s.y); }

std::vector<float> values(Engine& engine, Parameter& p) {
  const Tensor value = engine.strategy().values().whole(p);
  return {value.data<float>(), value.data<float>() + value.count()};
}

/// In DDP and ZeRO-1 the replicas would diverge without a word.
TEST(Pitfalls, AStepInNoSyncIsAnErrorInEveryStage) {
  lab::world(2, [](World& world) {
    for (int stage = 0; stage < 4; ++stage) {
      Net net;
      auto engine = initialize(world, net, options(stage));
      const Samples samples(world.rank());
      const std::vector<float> before = values(engine, net.fc2.weight);
      {
        const Engine::NoSync no_sync(engine);
        engine.backward(loss(engine.tape(), net, samples));
        EXPECT_EQ(test::error_of([&] { engine.step(); }).code(), Errc::unsynchronised) << "stage " << stage;
      }
      engine.cancel_update();
      EXPECT_EQ(values(engine, net.fc2.weight), before);
    }
  });
}

/// Frozen parameters are not unused ones: they need no search, and do not change.
TEST(Pitfalls, FrozenParametersNeedNoOption) {
  lab::world(2, [](World& world) {
    std::vector<float> expected;
    for (int stage = 0; stage < 4; ++stage) {
      Net net;
      net.fc1.requires_grad_(false);
      auto engine = initialize(world, net, options(stage));
      const Samples samples(world.rank());
      const std::vector<float> frozen = values(engine, net.fc1.weight);
      const std::vector<float> before = values(engine, net.fc2.weight);
      for (int u = 0; u < 3; ++u) {
        engine.backward(loss(engine.tape(), net, samples));
        EXPECT_TRUE(engine.step());
      }
      EXPECT_EQ(values(engine, net.fc1.weight), frozen) << "stage " << stage;
      const std::vector<float> trained = values(engine, net.fc2.weight);
      EXPECT_NE(trained, before) << "stage " << stage;
      if (stage == 0) expected = trained;
      EXPECT_EQ(trained, expected) << "stage " << stage;
    }
  });
}

TEST(Pitfalls, AModelThatNoEngineHasPreparedIsNamed) {
  lab::world(1, [](World& world) {
    Net net, unprepared;
    auto engine = initialize(world, net, options(0));
    const Samples samples(0);
    const Error e = test::error_of([&] { loss(engine.tape(), unprepared, samples); });
    EXPECT_EQ(e.code(), Errc::invalid_argument);
    EXPECT_NE(std::string(e.what()).find("fc1.weight"), std::string::npos) << e.what();
    EXPECT_NE(std::string(e.what()).find("initialize"), std::string::npos) << e.what();
  });
}

/// The second of two models, passed to the engine of the first.
TEST(Pitfalls, AModelOfAnotherEngineIsAnError) {
  lab::world(2, [](World& world) {
    for (int stage = 0; stage < 4; ++stage) {
      Net net1, net2;
      auto engine1 = initialize(world, net1, options(stage)),
           engine2 = initialize(world, net2, options(stage));
      const Samples samples(world.rank());
      const std::vector<float> before = values(engine2, net2.fc2.weight);
      const Error e = test::error_of([&] {
        engine1.backward(loss(engine1.tape(), net2, samples));
        engine1.step();
      });
      EXPECT_EQ(e.code(), Errc::invalid_argument) << "stage " << stage << ": " << e.what();
      EXPECT_NE(std::string(e.what()).find("to which the model belongs"), std::string::npos) << e.what();
      EXPECT_EQ(values(engine2, net2.fc2.weight), before);
    }
  });
}

/// "if rank != 0: return" before a call that all ranks make.
TEST(Pitfalls, ARankThatReturnsBeforeACollectiveIsNamed) {
  const Error e = test::error_of([] {
    spawn(3, [](World& world) {
      if (world.rank() == 2) return;
      world.reduce(1.0);
    });
  });
  EXPECT_NE(std::string(e.what()).find("rank 2"), std::string::npos) << e.what();
}

TEST(Pitfalls, AGlobalBatchThatDoesNotDivideIsAnErrorWithTheNumbers) {
  lab::world(3, [](World& world) {
    Net net;
    EngineOptions o = options(0);
    o.config =
        R"({"train_batch_size": 64, "train_micro_batch_size_per_gpu": 4, "optimizer": {"type": "SGD"}})";
    const Error e = test::error_of([&] { initialize(world, net, std::move(o)); });
    EXPECT_EQ(e.code(), Errc::config);
    for (const char* number : {"64", "4", "3", "60", "72"})
      EXPECT_NE(std::string(e.what()).find(number), std::string::npos) << e.what();
  });
}

/// As NumPy and torch give them.
TEST(Pitfalls, DataThatNoLayerTakesAreNamedWithTheLayer) {
  lab::world(1, [](World& world) {
    Net net;
    auto engine = initialize(world, net, options(0));
    const auto what_of = [&](DType dtype) {
      auto loader = engine.loader(tensor_dataset({{"x", Tensor::zeros({8, 3}, dtype)}}));
      return std::string(test::error_of([&] { net(engine.tape(), loader.next()["x"]); }).what());
    };
    EXPECT_EQ(what_of(DType::f64),
              "fc1: its input [4, 3] is f64; a layer takes f32, f16 or bf16: convert the "
              "data before they are a dataset");
    EXPECT_TRUE(what_of(DType::u8).starts_with("fc1: its input [4, 3] is u8;")) << what_of(DType::u8);
  });
}

/// A dataset need not know the precision of the model.
TEST(Pitfalls, DataInF32AreConvertedForAModelOf16Bits) {
  lab::world(2, [](World& world) {
    for (const char* precision : {"bf16", "fp16"}) {
      Net net;
      auto engine = initialize(world, net, options(0, concat("\"", precision, R"(": {"enabled": true}, )")));
      Samples samples(world.rank());
      const double from_f32 = engine.item(loss(engine.tape(), net, samples)).sum;
      engine.tape().reset();
      const Tensor x = Tensor::empty(samples.x.shape(), net.fc1.weight.value.dtype());
      ops::copy(x, samples.x, engine.stream());
      samples.x = x;
      EXPECT_EQ(engine.item(loss(engine.tape(), net, samples)).sum, from_f32);
      engine.tape().reset();
    }
  });
}

}  // namespace
}  // namespace rz
