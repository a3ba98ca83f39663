/// Training on a mesh that the configuration names: the same bits in every stage, batches by rank with other
/// data, and checkpoints that go on with another mesh.
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "tests/lab/training.h"
#include "tests/support/error_of.h"
#include "tests/support/folder.h"

namespace rz {
namespace {

using lab::Trace;

lab::Run with_mesh(int stage, const std::string& mesh, const std::string& more = "") {
  return {.strategy = static_cast<StrategyKind>(stage),
          .updates = 6,
          .keys = concat(R"("ringzero": {)", more, R"("mesh": {)", mesh, "}}"),
          .whole_updates = true};
}
EngineOptions options(const lab::Run& run) { return lab::options(lab::config(run)); }

TEST(MeshTraining, HasTheSameBitsInEveryStage) {
  lab::world(4, [](World& world) {
    const Trace ddp = lab::train(world, with_mesh(0, R"("replicate": 2, "shard": 2)"));
    for (int stage = 1; stage < 4; ++stage)
      EXPECT_EQ(lab::train(world, with_mesh(stage, R"("replicate": 2)")), ddp) << "stage " << stage;
    const Trace plain = lab::train(world, {.updates = 6});
    ASSERT_EQ(plain.updates.size(), ddp.updates.size());
    for (std::size_t i = 0; i < plain.updates.size(); ++i) {
      EXPECT_NEAR(plain.updates[i].loss, ddp.updates[i].loss, 1e-5);
      EXPECT_NEAR(plain.updates[i].grad_norm, ddp.updates[i].grad_norm, 1e-5);
    }
  });
}

/// An aligned block of a power of two of ranks is a subtree of the pairwise order.
TEST(MeshTraining, HasTheBitsOfAllMeshesInPairwiseOrder) {
  const std::string pairwise = R"("deterministic": "world_size_invariant", )";
  lab::world(4, [&](World& world) {
    const Trace plain = lab::train(world, with_mesh(2, "", pairwise));
    for (int stage = 0; stage < 4; ++stage) {
      EXPECT_EQ(lab::train(world, with_mesh(stage, R"("replicate": 2)", pairwise)), plain) << stage;
      EXPECT_EQ(lab::train(world, with_mesh(stage, R"("replicate": 4)", pairwise)), plain) << stage;
    }
  });
}

TEST(MeshTraining, MicsIsAMeshOfReplicas) {
  lab::world(4, [](World& world) {
    lab::Run mics{.strategy = StrategyKind::zero3,
                  .updates = 6,
                  .keys = R"("zero_optimization": {"mics_shard_size": 2})"};
    mics.start = [](Engine& engine, Module&) {
      EXPECT_EQ(engine.mesh().sizes(), (MeshSizes{2, 2, 1}));
      EXPECT_EQ(engine.mesh().replica().rank, engine.world().rank() / 2);
    };
    EXPECT_EQ(lab::train(world, mics), lab::train(world, with_mesh(3, R"("replicate": 2)")));
  });
}

TEST(MeshTraining, HpzHasTheBitsOfStage3) {
  lab::Run run{.strategy = StrategyKind::zero3, .ranks = 4, .updates = 6};
  const Trace whole = lab::train(run);
  run.keys = R"("zero_optimization": {"zero_hpz_partition_size": 2})";
  EXPECT_EQ(lab::train(run), whole);
}

/// Ranks that share layers have the same batches; here they share none.
TEST(MeshTraining, RanksOfATpGroupCountOnce) {
  lab::world(4, [](World& world) {
    lab::Run tp = with_mesh(3, R"("tp": 2)");
    tp.options = [](EngineOptions& o) {
      o.parallelize = [](Module&, const Mesh& mesh) {
        EXPECT_EQ(mesh.part().ranks, 2);
        return std::string();
      };
    };
    tp.start = [](Engine& engine, Module&) { EXPECT_EQ(engine.config().sizes.train, 4 * 3 * 2); };
    Communicator pair = std::move(*world.communicator().split(world.rank() / 2, world.rank()));
    World two(std::move(pair));
    EXPECT_EQ(lab::train(world, tp), lab::train(two, {.strategy = StrategyKind::zero3, .updates = 6}))
        << "as two ranks without tp";
    tp.model.loss = [&](Module& net, Tape& t, const Batch&) {
      return dynamic_cast<lab::Mlp&>(net)(t, lab::batch(static_cast<std::uint64_t>(world.rank())));
    };
    const Error e = test::error_of([&] { lab::train(world, tp); });
    EXPECT_EQ(e.code(), Errc::mismatch);
    EXPECT_NE(std::string(e.what()).find("ranks 0 and 1 share layers (tp) and have different losses"),
              std::string::npos)
        << e.what();
  });
}

/// Of an engine that has ranks with parts of layers.
TEST(MeshTraining, UnevenInputsNeedWholeLayers) {
  lab::world(2, [](World& world) {
    lab::Mlp net;
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
      lab::Mlp net;
      auto engine = initialize(world, net, options(with_mesh(stage, mesh, R"("join": {"enable": true}, )")));
      Engine::Join join(engine);
      Trace out;
      const int own = 6 + world.rank();
      for (int b = 0; join.next(b < own); ++b) {
        if (join.active())
          engine.backward(net(engine.tape(), lab::batch(static_cast<std::uint64_t>(4 * b + world.rank()))));
        else
          join.backward_without_data();
        if (engine.step()) out.updates.push_back(lab::report_of(engine));
      }
      out.values = lab::values_of(engine, net);
      return out;
    };
    const Trace plain = run(0, "");
    ASSERT_EQ(plain.updates.size(), 3u);
    for (const char* mesh : {R"("replicate": 2)", R"("replicate": 4)"}) {
      const Trace ddp = run(0, mesh);
      for (std::size_t i = 0; i < 3; ++i) {
        EXPECT_NEAR(ddp.updates[i].loss, plain.updates[i].loss, 1e-6) << mesh;
        EXPECT_NEAR(ddp.updates[i].grad_norm, plain.updates[i].grad_norm, 1e-6) << mesh;
      }
      for (int stage = 1; stage < 3; ++stage) EXPECT_EQ(run(stage, mesh), ddp) << mesh << stage;
    }
  });
}

TEST(MeshTraining, AModelWithoutAPlanNeedsAFunctionForTp) {
  lab::world(2, [](World& world) {
    lab::Mlp net;
    const Error e = test::error_of([&] { initialize(world, net, options(with_mesh(1, R"("tp": 2)"))); });
    EXPECT_EQ(e.code(), Errc::config);
    EXPECT_NE(std::string(e.what()).find("EngineOptions::parallelize"), std::string::npos) << e.what();
  });
}

TEST(MeshTraining, OptionsOfTheEngineMustAgreeWithTheConfiguration) {
  lab::world(4, [](World& world) {
    lab::Mlp net;
    const auto on = [&](const MeshSizes& mesh, const std::string& config) {
      return initialize(world, net, {.config = config, .mesh = mesh, .log = nullptr});
    };
    EXPECT_EQ(on({.replicate = 2}, lab::config(1)).mesh().sizes(), (MeshSizes{2, 2, 1}));
    const Error e =
        test::error_of([&] { on({.replicate = 2}, lab::config(with_mesh(1, R"("replicate": 4)"))); });
    EXPECT_EQ(e.code(), Errc::config);
    EXPECT_STREQ(e.what(),
                 "configuration: ringzero.mesh.replicate: is 4, but EngineOptions::mesh (arguments) is 2; "
                 "remove one of them, or write \"auto\" here");
  });
}

/// The order is pairwise, so that the bits are those of a run that was not interrupted.
TEST(MeshTraining, GoesOnWithAnotherMesh) {
  const test::Folder folder;
  const auto part = [&](int ranks, int stage, const std::string& mesh, bool saves) {
    lab::Run run = with_mesh(stage, mesh, R"("deterministic": "world_size_invariant", )");
    run.ranks = ranks;
    run.updates = saves ? 3 : 6;
    run.whole_updates = false;
    run.keys += concat(R"(, "gradient_accumulation_steps": )", 12 / ranks);
    if (saves)
      run.end = [&](Engine& engine, Module&) { engine.save_checkpoint(folder.path()); };
    else
      run.start = [&](Engine& engine, Module&) { engine.load_checkpoint(folder.path()); };
    return lab::train(run);
  };
  part(4, 3, R"("replicate": 2)", true);
  const Trace whole = part(4, 3, R"("replicate": 2)", false);
  EXPECT_EQ(whole.updates.size(), 3u);
  for (int stage = 0; stage < 4; ++stage) {
    EXPECT_EQ(part(4, stage, "", false), whole) << "4 shards, stage " << stage;
    EXPECT_EQ(part(4, stage, R"("replicate": 4)", false), whole) << "4 replicas, stage " << stage;
    EXPECT_EQ(part(2, stage, R"("replicate": 2)", false), whole) << "2 replicas, stage " << stage;
    EXPECT_EQ(part(1, stage, "", false), whole) << "1 rank, stage " << stage;
  }
}

}  // namespace
}  // namespace rz
