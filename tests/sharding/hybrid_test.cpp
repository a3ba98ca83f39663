/// Meshes of replicas of shards: which bits are equal, what is held and sent along each dimension.
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "autograd_lite/nn/layers.h"
#include "autograd_lite/ops.h"
#include "comm/core/error.h"
#include "sharding/huggingface/save_pretrained.h"
#include "sharding/io/json.h"
#include "sharding/model/communication_hook.h"
#include "sharding/model/power_sgd.h"
#include "sharding/optim/optimizers.h"
#include "sharding/strategy/join.h"
#include "sharding/strategy/optimizer_state.h"
#include "sharding/strategy/strategy.h"
#include "tests/lab/training.h"
#include "tests/support/error_of.h"
#include "tests/support/folder.h"
#include "tests/support/toy_training.h"

namespace rz {
namespace {

using test::kinds;
using test::ToyModel;

const MeshSizes meshes[] = {{2, 2}, {1, 4}, {4, 1}, {2, 3}, {3, 2}};

/// A number in [-1, 1) that depends on its arguments alone (splitmix64).
float noise(std::size_t a, std::size_t b, int sample) {
  std::uint64_t x =
      a * 0x9e3779b97f4a7c15u + b * 0xd1b54a32d192ed03u + static_cast<std::uint64_t>(sample + 1);
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
  return static_cast<float>(static_cast<std::int64_t>(x ^ (x >> 31)) >> 40) / (1 << 23);
}

struct TrainedRun {
  StrategyOptions options{};
  std::function<std::unique_ptr<Optimizer>()> optimizer = [] { return make_adamw({}); };
  int passes = 2;
  bool synchronise_always = false;
  int updates = 3;
};

/// All values, states and norms after some updates.
struct Result {
  std::vector<float> numbers;
  std::vector<double> norms;
  bool operator==(const Result&) const = default;
};

Result trained(StrategyKind kind, const Mesh& mesh, const TrainedRun& run) {
  ToyModel model([](std::size_t p, std::size_t i) { return 1 + noise(p, i, -1) / 4; }, mesh.part());
  Tape tape;
  const auto strategy = make_strategy(kind, model, mesh, run.options);
  strategy->attach(tape);
  const auto optimizer = run.optimizer();
  const int rank = mesh.data().rank();
  Result result;
  for (int update = 0; update < run.updates; ++update) {
    strategy->zero_grad();
    for (int pass = 0; pass < run.passes; ++pass) {
      const int sample = (update * run.passes + pass) * 64 + rank;
      const Var loss = model.loss(
          tape, [&](std::size_t p, std::size_t i) { return noise(p, i, sample); }, (rank + update) % 2 == 0);
      strategy->begin_backward(run.synchronise_always || pass + 1 == run.passes);
      tape.backward(loss);
      tape.reset();
      if (run.synchronise_always) strategy->finish_gradients();
    }
    if (!run.synchronise_always) strategy->finish_gradients();
    strategy->clip_and_step(*optimizer, {.max_norm = 1});
    result.norms.push_back(strategy->outcome(*optimizer).norm);
  }
  result.numbers = lab::values_of(*strategy, model);
  return result;
}

void expect_equal_stages(const TrainedRun& run, const char* what) {
  for (const MeshSizes& sizes : meshes)
    lab::group(sizes.ranks(), [&](Communicator& comm) {
      const Mesh mesh(comm, sizes);
      const Result ddp = trained(StrategyKind::ddp, mesh, run);
      for (const StrategyKind kind : {StrategyKind::zero1, StrategyKind::zero2, StrategyKind::zero3})
        EXPECT_EQ(trained(kind, mesh, run), ddp) << what << ", " << name(kind) << " on " << describe(sizes);
    });
}

TEST(Hybrid, AllStagesOfAMeshHaveTheSameBits) {
  expect_equal_stages({}, "f32");
  expect_equal_stages({.options = {.reduce_bucket_size = 150, .first_bucket_size = 64}}, "small buckets");
  expect_equal_stages({.options = {.overlap_comm = false}, .synchronise_always = true}, "no overlap");
  expect_equal_stages({.options = {.wire = {.communication_data_type = DType::bf16}}}, "bf16 wire");
  expect_equal_stages({.optimizer = [] { return make_lamb(LambOptions{}); }}, "LAMB");
}

/// Of layers of the library, which run in 16 bits.
struct Net : Module {
  nn::Embedding embedding{*this, "embedding", 19, 24};
  nn::Linear first{*this, "first", 24, 37}, last{*this, "last", 37, 19};

  nn::Loss operator()(Tape& tape, const Tensor& tokens) {
    return nn::cross_entropy(tape, last(tape, nn::gelu(tape, first(tape, embedding(tape, tokens)))), tokens);
  }
};

Result trained_in(const Precision& precision, StrategyKind kind, const Mesh& mesh, int hpz = 1) {
  Net net;
  const auto strategy =
      make_strategy(kind, net, mesh, {.precision = precision, .zero_hpz_partition_size = hpz});
  strategy->values().fill([](const Parameter& p, Range r, float* out) {
    for (std::size_t i = r.begin; i < r.end; ++i) *out++ = noise(p.count(), i, 0) / 4;
  });
  Tape tape;
  strategy->attach(tape);
  const auto adamw = make_adamw({});
  Tensor tokens = Tensor::empty({2, 8}, DType::i32);
  Result result;
  for (int update = 0; update < 3; ++update) {
    strategy->zero_grad();
    for (int pass = 0; pass < 2; ++pass) {
      for (std::size_t i = 0; i < tokens.count(); ++i)
        tokens.data<std::int32_t>()[i] = static_cast<std::int32_t>(
            std::abs(noise(i, 0, (update * 2 + pass) * 64 + mesh.data().rank())) * 18);
      strategy->backward(tape, net(tape, tokens), pass == 1);
      tape.reset();
    }
    strategy->finish_gradients();
    strategy->clip_and_step(*adamw, {.max_norm = 0.5});
    result.norms.push_back(strategy->outcome(*adamw).norm);
  }
  result.numbers = lab::values_of(*strategy, net);
  return result;
}

TEST(Hybrid, AllStagesHaveTheSameBitsInMixedPrecision) {
  for (const Precision& precision : {Precision{DType::bf16, DType::f32}, Precision{DType::bf16, DType::bf16}})
    for (const MeshSizes& sizes : {MeshSizes{2, 2}, MeshSizes{4, 1}, MeshSizes{3, 2}})
      lab::group(sizes.ranks(), [&](Communicator& comm) {
        const Mesh mesh(comm, sizes);
        const Result ddp = trained_in(precision, StrategyKind::ddp, mesh);
        EXPECT_GT(ddp.norms.back(), 0);
        for (const StrategyKind kind : {StrategyKind::zero1, StrategyKind::zero2, StrategyKind::zero3})
          EXPECT_EQ(trained_in(precision, kind, mesh), ddp) << name(kind) << " on " << describe(sizes);
        EXPECT_EQ(trained_in(precision, StrategyKind::zero3, mesh, sizes.shard),
                  trained_in(precision, StrategyKind::zero3, comm));
      });
}

/// A block of S ranks is a subtree of the pairwise order.
TEST(Hybrid, InPairwiseOrderBitsAreThoseOfPlainStages) {
  CommOptions pairwise;
  pairwise.reduction_order = ReductionOrder::pairwise;
  for (const MeshSizes& sizes : {MeshSizes{2, 2}, MeshSizes{4, 1}, MeshSizes{1, 4}, MeshSizes{3, 2}})
    lab::group(sizes.ranks(), pairwise, [&](Communicator& comm) {
      const Mesh mesh(comm, sizes);
      for (const StrategyKind kind : kinds)
        EXPECT_EQ(trained(kind, mesh, {}), trained(kind, comm, {})) << name(kind) << describe(sizes);
    });
}

/// Hooks form means over all ranks in one step, on any mesh of replicas and shards.
TEST(Hybrid, HooksHaveTheBitsOfPlainDdp) {
  const std::function<std::shared_ptr<CommunicationHook>()> hooks[] = {
      [] { return make_fp16_compress_hook(); }, [] { return make_bf16_compress_hook(); },
      [] { return make_power_sgd({.matrix_approximation_rank = 2, .start_iter = 2}); },
      [] { return make_batched_power_sgd({.matrix_approximation_rank = 2, .start_iter = 2}); }};
  lab::group(4, [&](Communicator& comm) {
    for (const auto& hook : hooks)
      for (const MeshSizes& sizes : {MeshSizes{2, 2}, MeshSizes{4, 1}}) {
        const auto run = [&](const Mesh& mesh) {
          return trained(StrategyKind::ddp, mesh, {.options = {.communication_hook = hook()}, .updates = 4});
        };
        EXPECT_EQ(run(Mesh(comm, sizes)), run(comm)) << hook()->describe() << " on " << describe(sizes);
        for (const StrategyKind kind : {StrategyKind::zero1, StrategyKind::zero2, StrategyKind::zero3}) {
          ToyModel model(test::initial_value);
          const Error error = test::error_of(
              [&] { make_strategy(kind, model, Mesh(comm, sizes), {.communication_hook = hook()}); });
          EXPECT_EQ(error.code(), Errc::unsupported) << error.what();
          EXPECT_NE(std::string(error.what()).find("which only ddp has"), std::string::npos) << error.what();
        }
      }
  });
}

/// Gathers do not round.
TEST(Hybrid, SecondaryPartitionsHaveTheBitsOfZero3) {
  lab::group(4, [](Communicator& comm) {
    const TrainedRun runs[] = {{},
                               {.passes = 3},
                               {.options = {.gathers = {.param_persistence_threshold = 70}}},
                               {.optimizer = [] { return make_lamb(LambOptions{}); }}};
    for (TrainedRun run : runs) {
      const Result plain = trained(StrategyKind::zero3, comm, run);
      run.options.zero_hpz_partition_size = 2;
      EXPECT_EQ(trained(StrategyKind::zero3, comm, run), plain);
      EXPECT_EQ(trained(StrategyKind::zero3, Mesh(comm, {2, 2}), run), plain);
    }
  });
}

struct Chain : Module {
  nn::Linear a{*this, "a", 8, 8}, b{*this, "b", 8, 8}, c{*this, "c", 8, 8}, d{*this, "d", 8, 8},
      e{*this, "e", 8, 8};

  Var operator()(Tape& tape, const Tensor& x) {
    return nn::sum(tape, e(tape, d(tape, c(tape, b(tape, a(tape, x))))));
  }
};

/// The sums over replicas may take longer than backward: memory for the next buckets must not wait for them,
/// nor in a pass that adds to the means of the one before, nor in another format of the wire.
TEST(Hybrid, BackwardDoesNotWaitForSumsOverReplicas) {
  for (const StrategyKind kind : {StrategyKind::zero2, StrategyKind::zero3})
    for (const std::optional<DType> wire : {std::optional<DType>(), std::optional(DType::bf16)}) {
      std::atomic<int> ended = 0;
      lab::group(4, [&](Communicator& comm) {
        const Mesh mesh(comm, {2, 2});
        Chain chain;
        const auto strategy = make_strategy(
            kind, chain, mesh,
            {.reduce_bucket_size = 80, .first_bucket_size = 80, .wire = {.communication_data_type = wire}});
        Tape tape;
        strategy->attach(tape);
        for (int pass = 1; pass <= 2; ++pass) {
          const Var loss = chain(tape, Tensor::zeros({2, 8}));
          strategy->begin_backward(true);
          if (mesh.replica().rank == 1) {
            const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(20);
            while (ended < 2 * pass && std::chrono::steady_clock::now() < end) std::this_thread::yield();
            EXPECT_GE(ended, 2 * pass)
                << name(kind) << ", pass " << pass << ": backward of the other replica waits for this one";
          }
          tape.backward(loss);
          if (mesh.replica().rank == 0) ++ended;
          tape.reset();
          strategy->finish_gradients();
        }
      });
    }
}

TEST(Hybrid, SecondaryPartitionsMustFitTheMesh) {
  lab::group(4, [](Communicator& comm) {
    const auto refused = [&](StrategyKind kind, const Mesh& mesh, int size) {
      ToyModel model(test::initial_value);
      const Error error =
          test::error_of([&] { make_strategy(kind, model, mesh, {.zero_hpz_partition_size = size}); });
      EXPECT_EQ(error.code(), Errc::invalid_argument);
      return std::string(error.what());
    };
    EXPECT_EQ(refused(StrategyKind::zero3, comm, 3),
              "zero_hpz_partition_size is 3 on the mesh shard 4: it must divide the size of shard");
    EXPECT_EQ(refused(StrategyKind::zero3, Mesh(comm, {2, 2}), 4),
              "zero_hpz_partition_size is 4 on the mesh replicate 2 x shard 2: it must be the size of shard");
    EXPECT_EQ(refused(StrategyKind::zero2, comm, 2),
              "zero_hpz_partition_size needs sharded values; choose zero3");
  });
}

/// Each element of values and state is visited by one rank.
TEST(Hybrid, EachElementHasOneOwner) {
  for (const MeshSizes& sizes : meshes)
    for (const StrategyKind kind : kinds) {
      std::vector<std::map<std::string, std::vector<std::int32_t>>> counts(
          static_cast<std::size_t>(sizes.ranks()));
      lab::group(sizes.ranks(), [&](Communicator& comm) {
        test::Replica replica(kind, Mesh(comm, sizes));
        const auto adamw = make_adamw({});
        replica.strategy->optimizer_state().fill(
            *adamw, [](const std::string&, const Parameter&, Range r, float* out) {
              std::fill_n(out, r.count(), 0.0f);
            });
        std::map<std::string, std::vector<std::int32_t>> mine;
        const auto count = [&](const std::string& name, const Parameter& p, Range r) {
          auto& all = mine[name];
          all.resize(p.count());
          for (std::size_t i = r.begin; i < r.end; ++i) ++all[i];
        };
        for (const Parameter* p : replica.model.parameters()) mine[p->name].resize(p->count());
        replica.strategy->values().visit_owned(
            [&](const Parameter& p, Range r, const float*) { count(p.name, p, r); });
        for (const Parameter* p : replica.model.parameters())
          if (p->requires_grad) mine[p->name + "/exp_avg"].resize(p->count());
        for (const auto& e : replica.strategy->optimizer_state().owned())
          if (e.state == "exp_avg") count(e.of.parameter->name + "/exp_avg", *e.of.parameter, e.of.elements);
        for (auto& [name, list] : mine) {
          comm.all_reduce(Buffer(list.data(), list.size())).wait();
          EXPECT_EQ(list, std::vector<std::int32_t>(list.size(), 1))
              << name << " in " << rz::name(kind) << " on " << describe(sizes);
        }
      });
    }
}

// ---- what ranks hold alike

TEST(Hybrid, ObserversKnowTheRanksOfACollective) {
  lab::group(6, [](Communicator& comm) {
    test::Replica replica(StrategyKind::zero3, Mesh(comm, {2, 3}));
    std::map<Collective, std::set<int>> ranks;
    replica.strategy->observe_communication(
        {.started = [&](const StartedCollective& c) { ranks[c.kind].insert(c.ranks); }});
    replica.update();
    EXPECT_EQ(ranks, (std::map<Collective, std::set<int>>{{Collective::all_gather, {3}},
                                                          {Collective::reduce_scatter, {3}},
                                                          {Collective::all_reduce, {2}}}));
  });
}

TEST(Hybrid, ReplicasOfAShardAreCompared) {
  lab::group(4, [](Communicator& comm) {
    for (const StrategyKind kind : kinds) {
      test::Replica replica(kind, Mesh(comm, {2, 2}));
      replica.strategy->values().fill([&](const Parameter& p, Range r, float* out) {
        for (std::size_t i = r.begin; i < r.end; ++i)
          *out++ = comm.rank() == 3 && p.name == "tied" && i + 1 == p.count() ? 7.0f : 1.0f;
      });
      const Error error = test::error_of([&] { replica.update(); });
      EXPECT_EQ(error.code(), Errc::mismatch) << name(kind);
      EXPECT_NE(std::string(error.what()).find("tied"), std::string::npos) << error.what();
      EXPECT_NE(std::string(error.what()).find("rank 3"), std::string::npos) << error.what();
    }
  });
}

TEST(Hybrid, ACancelledUpdateLeavesTheRanksInStep) {
  for (const MeshSizes& sizes : {MeshSizes{2, 2}, MeshSizes{4, 1}})
    lab::group(4, [&](Communicator& comm) {
      for (const StrategyKind kind : kinds) {
        test::Replica replica(kind, Mesh(comm, sizes));
        replica.update();
        replica.strategy->zero_grad();
        if (comm.rank() == 1) {
          replica.strategy->cancel_update();
        } else {
          const Error error = test::error_of([&] {
            replica.strategy->begin_backward();
            replica.tape.backward(
                replica.model.loss(replica.tape, [](std::size_t, std::size_t) { return 1.0f; }));
            replica.strategy->finish_gradients();
          });
          replica.tape.reset();
          EXPECT_EQ(error.code(), Errc::cancelled) << name(kind);
          EXPECT_EQ(error.culprit(), 1);
          replica.strategy->cancel_update();
        }
        replica.update();
      }
    });
}

TEST(Hybrid, ARankWithoutDataJoins) {
  lab::group(4, [](Communicator& comm) {
    for (const StrategyKind kind : {StrategyKind::ddp, StrategyKind::zero1, StrategyKind::zero2}) {
      test::Replica replica(kind, Mesh(comm, {2, 2}));
      Join join(comm);
      int updates = 0;
      for (int batch = 0; join.next(batch < 1 + comm.rank()); ++batch, ++updates) {
        replica.strategy->zero_grad();
        if (batch < 1 + comm.rank()) {
          replica.strategy->begin_backward();
          replica.tape.backward(
              replica.model.loss(replica.tape, [](std::size_t, std::size_t) { return 1.0f; }));
          replica.tape.reset();
        } else {
          replica.strategy->backward_without_data();
        }
        replica.strategy->finish_gradients();
        replica.strategy->step(*replica.optimizer);
      }
      EXPECT_EQ(updates, 4);
    }
  });
}

// ---- parts of layers

/// Norms add squares of other blocks of elements.
TEST(Parts, TrainAsWholeParametersDo) {
  const std::vector<TrainedRun> runs = {{}, {.optimizer = [] { return make_lamb(LambOptions{}); }}};
  for (const TrainedRun& run : runs) {
    Result whole;
    lab::group(2, [&](Communicator& comm) {
      const Result result = trained(StrategyKind::zero1, comm, run);
      if (comm.rank() == 0) whole = result;
    });
    for (const MeshSizes& sizes : {MeshSizes{1, 2, 2}, MeshSizes{2, 1, 2}, MeshSizes{1, 2, 3}})
      lab::group(sizes.ranks(), [&](Communicator& comm) {
        const Mesh mesh(comm, sizes);
        const Result ddp = trained(StrategyKind::ddp, mesh, run);
        ASSERT_EQ(ddp.numbers.size(), whole.numbers.size());
        for (std::size_t i = 0; i < whole.numbers.size(); ++i)
          ASSERT_NEAR(ddp.numbers[i], whole.numbers[i], 1e-6) << i << " on " << describe(sizes);
        for (std::size_t i = 0; i < whole.norms.size(); ++i)
          EXPECT_NEAR(ddp.norms[i], whole.norms[i], 1e-6 * whole.norms[i]);
        for (const StrategyKind kind : {StrategyKind::zero1, StrategyKind::zero2, StrategyKind::zero3})
          EXPECT_EQ(trained(kind, mesh, run), ddp) << name(kind) << " on " << describe(sizes);
      });
  }
}

TEST(Parts, WeightFilesHaveWholeTensors) {
  const test::Folder folder;
  const auto file = [&](const MeshSizes& sizes) {
    const std::string path = folder / concat("tp", sizes.tp, ".safetensors");
    lab::group(sizes.ranks(), [&](Communicator& comm) {
      const Mesh mesh(comm, sizes);
      ToyModel model([](std::size_t p, std::size_t i) { return noise(p, i, 0); }, mesh.part());
      const auto strategy = make_strategy(StrategyKind::zero3, model, mesh);
      save_weights(path, model, *strategy, comm.rank(), Stream(), {});
    });
    return read_text_file(path);
  };
  const std::string expected = file({1, 2, 1});
  EXPECT_GT(expected.size(), 1000u);
  EXPECT_EQ(file({1, 2, 2}), expected);
  EXPECT_EQ(file({1, 1, 3}), expected);
}

TEST(Parts, WhatNeedsWholeParametersIsRefused) {
  lab::group(2, [](Communicator& comm) {
    const Mesh mesh(comm, {1, 1, 2});
    const auto refused = [&](const std::function<void()>& f, const char* word) {
      const Error error = test::error_of(f);
      EXPECT_EQ(error.code(), Errc::unsupported) << error.what();
      EXPECT_NE(std::string(error.what()).find(word), std::string::npos) << error.what();
    };
    ToyModel hooked(test::initial_value, mesh.part());
    refused(
        [&] {
          make_strategy(StrategyKind::ddp, hooked, mesh, {.communication_hook = make_fp16_compress_hook()});
        },
        "hook");
    ToyModel model(test::initial_value, mesh.part());
    const auto strategy = make_strategy(StrategyKind::ddp, model, mesh);
    refused([&] { strategy->backward_without_data(); }, "drop_last");
    Tape tape;
    strategy->attach(tape);
    strategy->begin_backward();
    tape.backward(model.loss(tape, [](std::size_t, std::size_t) { return 1.0f; }));
    strategy->finish_gradients();
    const auto muon =
        make_muon({}, muon_adam_options, [](const Parameter& p) { return p.shape.dims() == 2; });
    refused([&] { strategy->step(*muon); }, "whole matrices");
  });
}

/// A tp group has the same values of what it does not split.
TEST(Parts, WhatIsNotSplitIsCompared) {
  lab::group(2, [](Communicator& comm) {
    for (const StrategyKind kind : kinds) {
      const Mesh mesh(comm, {1, 1, 2});
      ToyModel model([&](std::size_t p, std::size_t) { return p == 3 && comm.rank() == 1 ? 2.0f : 1.0f; },
                     mesh.part());
      Tape tape;
      const auto strategy = make_strategy(kind, model, mesh);
      strategy->attach(tape);
      if (kind == StrategyKind::zero3)
        strategy->values().fill([&](const Parameter& p, Range r, float* out) {
          std::fill_n(out, r.count(), p.name == "first.bias" && comm.rank() == 1 ? 2.0f : 1.0f);
        });
      strategy->begin_backward();
      tape.backward(model.loss(tape, [](std::size_t, std::size_t) { return 1.0f; }));
      const Error error = test::error_of([&] { strategy->finish_gradients(); });
      EXPECT_EQ(error.code(), Errc::mismatch) << name(kind);
      EXPECT_NE(std::string(error.what()).find("first.bias"), std::string::npos) << error.what();
    }
  });
}

}  // namespace
}  // namespace rz
