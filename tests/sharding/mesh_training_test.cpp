/// Training on a mesh that the configuration names: the same bits in every stage, batches by rank with other
/// data, and checkpoints that go on with another mesh.
#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>
#include <string>
#include <vector>

#include "sharding/data/dataset.h"
#include "tests/lab/world.h"
#include "tests/support/engine.h"
#include "tests/support/error_of.h"
#include "tests/support/folder.h"

namespace rz {
namespace {

using test::engine::Batch;
using test::engine::batch;
using test::engine::Batches;
using test::engine::classes;
using test::engine::config;
using test::engine::in;
using test::engine::Net;
using test::engine::options;
using test::engine::values_of;

struct Trained {
  std::vector<double> losses, norms;
  std::vector<float> values;
  bool operator==(const Trained&) const = default;
};

void train(Engine& engine, Net& net, int updates, Trained& out) {
  const Communicator& data = engine.mesh().data();
  Batches batches{data.rank(), data.size(), 4};
  batches.made = static_cast<std::uint64_t>(engine.global_steps() * engine.config().sizes.accumulation);
  for (int u = 0; u < updates; ++u) {
    engine.train_batch(batches,
                       [&](Tape& t, const Batch& b) { return nn::cross_entropy(t, net(t, b.x), b.y); });
    out.losses.push_back(engine.loss());
    out.norms.push_back(engine.report().grad_norm);
  }
  out.values = values_of(engine.strategy(), net);
}

Trained trained(World& world, const std::string& config, int updates = 6) {
  Net net;
  auto engine = initialize(world, net, options(config));
  Trained out;
  train(engine, net, updates, out);
  return out;
}

std::string with_mesh(int stage, const std::string& mesh, const std::string& more = "") {
  return config(stage, concat(R"(, "ringzero": {)", more, R"("mesh": {)", mesh, "}}"));
}

TEST(MeshTraining, HasTheSameBitsInEveryStage) {
  lab::world(4, [](World& world) {
    const Trained ddp = trained(world, with_mesh(0, R"("replicate": 2, "shard": 2)"));
    for (int stage = 1; stage < 4; ++stage)
      EXPECT_TRUE(trained(world, with_mesh(stage, R"("replicate": 2)")) == ddp) << "stage " << stage;
    const Trained plain = trained(world, config(0));
    ASSERT_EQ(plain.losses.size(), ddp.losses.size());
    for (std::size_t i = 0; i < plain.losses.size(); ++i) {
      EXPECT_NEAR(plain.losses[i], ddp.losses[i], 1e-5);
      EXPECT_NEAR(plain.norms[i], ddp.norms[i], 1e-5);
    }
  });
}

/// An aligned block of a power of two of ranks is a subtree of the pairwise order.
TEST(MeshTraining, HasTheBitsOfAllMeshesInPairwiseOrder) {
  const std::string pairwise = R"("deterministic": "world_size_invariant", )";
  lab::world(4, [&](World& world) {
    const Trained plain = trained(world, with_mesh(2, "", pairwise));
    for (int stage = 0; stage < 4; ++stage) {
      EXPECT_TRUE(trained(world, with_mesh(stage, R"("replicate": 2)", pairwise)) == plain) << stage;
      EXPECT_TRUE(trained(world, with_mesh(stage, R"("replicate": 4)", pairwise)) == plain) << stage;
    }
  });
}

TEST(MeshTraining, MicsIsAMeshOfReplicas) {
  lab::world(4, [](World& world) {
    std::string mics = config(3);
    const std::string stage = R"("stage": 3)";
    mics.replace(mics.find(stage), stage.size(), stage + R"(, "mics_shard_size": 2)");
    Net net;
    auto engine = initialize(world, net, options(mics));
    EXPECT_EQ(engine.mesh().sizes(), (MeshSizes{2, 2, 1}));
    EXPECT_EQ(engine.mesh().replica().rank, world.rank() / 2);
    Trained out;
    train(engine, net, 6, out);
    EXPECT_TRUE(out == trained(world, with_mesh(3, R"("replicate": 2)")));
  });
}

TEST(MeshTraining, HpzHasTheBitsOfStage3) {
  lab::world(4, [](World& world) {
    std::string hpz = config(3);
    const std::string stage = R"("stage": 3)";
    hpz.replace(hpz.find(stage), stage.size(), stage + R"(, "zero_hpz_partition_size": 2)");
    EXPECT_TRUE(trained(world, hpz) == trained(world, config(3)));
  });
}

/// Ranks that share layers have the same batches; here they share none.
TEST(MeshTraining, RanksOfATpGroupCountOnce) {
  lab::world(4, [](World& world) {
    const auto run = [&](bool other_batches) {
      Net net;
      EngineOptions o = options(with_mesh(3, R"("tp": 2)"));
      o.parallelize = [](Module&, const Mesh& mesh) {
        EXPECT_EQ(mesh.part().ranks, 2);
        return std::string();
      };
      auto engine = initialize(world, net, std::move(o));
      EXPECT_EQ(engine.config().sizes.train, 4 * 3 * 2);
      Batches batches{engine.mesh().data().rank(), 2, 4};
      if (other_batches) batches.made = static_cast<std::uint64_t>(engine.mesh().part().rank);
      Trained out;
      for (int u = 0; u < 4; ++u) {
        engine.train_batch(batches,
                           [&](Tape& t, const Batch& b) { return nn::cross_entropy(t, net(t, b.x), b.y); });
        out.losses.push_back(engine.loss());
        out.norms.push_back(engine.report().grad_norm);
      }
      out.values = values_of(engine.strategy(), net);
      return out;
    };
    const Trained tp = run(false);
    Communicator pair = std::move(*world.communicator().split(world.rank() / 2, world.rank()));
    World two(std::move(pair));
    EXPECT_TRUE(tp == trained(two, config(3), 4)) << "as two ranks without tp";
    const Error e = test::error_of([&] { run(true); });
    EXPECT_EQ(e.code(), Errc::mismatch);
    EXPECT_NE(std::string(e.what()).find("ranks 0 and 1 share layers (tp) and have different losses"),
              std::string::npos)
        << e.what();
  });
}

/// Of an engine that has ranks with parts of layers.
TEST(MeshTraining, UnevenInputsNeedWholeLayers) {
  lab::world(2, [](World& world) {
    Net net;
    EngineOptions o = options(with_mesh(1, R"("tp": 2)", R"("join": {"enable": true}, )"));
    o.parallelize = [](Module&, const Mesh&) { return std::string(); };
    auto engine = initialize(world, net, std::move(o));
    const Error e = test::error_of([&] { Engine::Join{engine}; });
    EXPECT_EQ(e.code(), Errc::unsupported);
    EXPECT_STREQ(
        e.what(),
        "Engine::Join on the mesh shard 1 x tp 2: the layers of other ranks need this one; give every "
        "rank as many batches (drop_last), or choose tp 1");
  });
}

/// Ranks run out of batches in other updates; some passes reduce nothing.
TEST(MeshTraining, UnevenInputsHaveTheSameBitsInEveryStage) {
  lab::world(4, [](World& world) {
    const auto run = [&](int stage, const std::string& mesh) {
      Net net;
      auto engine = initialize(world, net, options(with_mesh(stage, mesh, R"("join": {"enable": true}, )")));
      Engine::Join join(engine);
      Trained out;
      const int own = 6 + world.rank();
      for (int b = 0; join.next(b < own); ++b) {
        if (join.active()) {
          const Batch x = batch(static_cast<std::uint64_t>(4 * b + world.rank()), 4);
          engine.backward(nn::cross_entropy(engine.tape(), net(engine.tape(), x.x), x.y));
        } else {
          join.backward_without_data();
        }
        if (!engine.step()) continue;
        out.losses.push_back(engine.loss());
        out.norms.push_back(engine.report().grad_norm);
      }
      out.values = values_of(engine.strategy(), net);
      return out;
    };
    const Trained plain = run(0, "");
    ASSERT_EQ(plain.losses.size(), 3u);
    for (const char* mesh : {R"("replicate": 2)", R"("replicate": 4)"}) {
      const Trained ddp = run(0, mesh);
      for (std::size_t i = 0; i < 3; ++i) {
        EXPECT_NEAR(ddp.losses[i], plain.losses[i], 1e-6) << mesh;
        EXPECT_NEAR(ddp.norms[i], plain.norms[i], 1e-6) << mesh;
      }
      for (int stage = 1; stage < 3; ++stage) EXPECT_TRUE(run(stage, mesh) == ddp) << mesh << stage;
    }
  });
}

TEST(MeshTraining, AModelWithoutAPlanNeedsAFunctionForTp) {
  lab::world(2, [](World& world) {
    Net net;
    const Error e = test::error_of([&] { initialize(world, net, options(with_mesh(1, R"("tp": 2)"))); });
    EXPECT_EQ(e.code(), Errc::config);
    EXPECT_NE(std::string(e.what()).find("EngineOptions::parallelize"), std::string::npos) << e.what();
  });
}

TEST(MeshTraining, OptionsOfTheEngineMustAgreeWithTheConfiguration) {
  lab::world(4, [](World& world) {
    Net net;
    const auto on = [&](const MeshSizes& mesh, const std::string& config) {
      return initialize(world, net, {.config = config, .mesh = mesh, .log = nullptr});
    };
    EXPECT_EQ(on({.replicate = 2}, config(1)).mesh().sizes(), (MeshSizes{2, 2, 1}));
    const Error e = test::error_of([&] { on({.replicate = 2}, with_mesh(1, R"("replicate": 4)")); });
    EXPECT_EQ(e.code(), Errc::config);
    EXPECT_STREQ(e.what(),
                 "configuration: ringzero.mesh.replicate: is 4, but EngineOptions::mesh (arguments) is 2; "
                 "remove one of them, or write \"auto\" here");
  });
}

class MeshCheckpoint : public testing::Test, protected test::Folder {};

/// The order is pairwise, so that the bits are those of a run that was not interrupted.
TEST_F(MeshCheckpoint, GoesOnWithAnotherMesh) {
  const std::string pairwise = R"("deterministic": "world_size_invariant", )";
  const auto part = [&](int ranks, int stage, const std::string& mesh, bool saves) {
    Trained out;
    lab::world(ranks, [&](World& world) {
      Net net;
      std::string text = with_mesh(stage, mesh, pairwise);
      if (ranks < 4) text.replace(text.find("steps\": 3"), 9, concat("steps\": ", 12 / ranks));
      auto engine = initialize(world, net, options(text));
      if (!saves) engine.load_checkpoint(path());
      Trained own;
      // Update u has the samples 48 u to 48 u + 47 whatever the mesh is.
      const Communicator& data = engine.mesh().data();
      const auto accumulation = static_cast<std::uint64_t>(engine.config().sizes.accumulation);
      for (int u = 0; u < 3; ++u) {
        const auto first = static_cast<std::uint64_t>(engine.global_steps()) * 12 +
                           static_cast<std::uint64_t>(data.rank()) * accumulation;
        std::vector<Batch> batches;
        for (std::uint64_t m = 0; m < accumulation; ++m) batches.push_back(batch(first + m, 4));
        for (const Batch& b : batches) {
          Tape& t = engine.tape();
          engine.backward(nn::cross_entropy(t, net(t, b.x), b.y));
          engine.step();
        }
        own.losses.push_back(engine.loss());
        own.norms.push_back(engine.report().grad_norm);
      }
      own.values = values_of(engine.strategy(), net);
      if (saves) engine.save_checkpoint(path());
      if (world.is_main()) out = std::move(own);
    });
    return out;
  };
  part(4, 3, R"("replicate": 2)", true);
  const Trained whole = part(4, 3, R"("replicate": 2)", false);
  for (int stage = 0; stage < 4; ++stage) {
    EXPECT_TRUE(part(4, stage, "", false) == whole) << "4 shards, stage " << stage;
    EXPECT_TRUE(part(4, stage, R"("replicate": 4)", false) == whole) << "4 replicas, stage " << stage;
    EXPECT_TRUE(part(2, stage, R"("replicate": 2)", false) == whole) << "2 replicas, stage " << stage;
    EXPECT_TRUE(part(1, stage, "", false) == whole) << "1 rank, stage " << stage;
  }
}

}  // namespace
}  // namespace rz
