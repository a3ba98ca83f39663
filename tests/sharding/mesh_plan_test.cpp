/// Bytes held and sent on meshes: those of a dry run and of predictions are those of training.
#include <gtest/gtest.h>

#include <functional>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "autograd_lite/models/gpt2.h"
#include "autograd_lite/models/llama.h"
#include "autograd_lite/nn/layers.h"
#include "autograd_lite/ops.h"
#include "comm/device/allocate.h"
#include "comm/device/meta.h"
#include "sharding/engine/dry_run.h"
#include "sharding/engine/engine.h"
#include "sharding/engine/training_plan.h"
#include "sharding/optim/optimizers.h"
#include "sharding/parallel/parallelize.h"
#include "sharding/strategy/prediction.h"
#include "sharding/strategy/sharding_plan.h"
#include "sharding/strategy/strategy.h"
#include "tests/lab/world.h"
#include "tests/support/error_of.h"
#include "tests/support/toy_training.h"

namespace rz {
namespace {

struct Tokens {
  Tensor inputs, targets;
};
Tokens zeros(const Allocator& memory) {
  return {Tensor::zeros({2, 8}, DType::i32, memory), Tensor::zeros({2, 8}, DType::i32, memory)};
}

/// With a buffer, a frozen parameter, and one that no loss reaches.
struct Net : Module {
  Net() {
    register_parameter(unused, "unused", {5, 3});
    register_buffer(mean, "mean", {1000});
    middle.weight.requires_grad = false;
  }
  Parameter unused;
  ModuleBuffer mean;
  nn::Embedding embedding{*this, "embedding", 96, 24};
  nn::Linear first{*this, "first", 24, 50}, middle{*this, "middle", 50, 50}, last{*this, "last", 50, 96};

  nn::Loss operator()(Tape& tape, const Tokens& t) {
    const Var x = nn::relu(tape, first(tape, embedding(tape, t.inputs)));
    return nn::cross_entropy(tape, last(tape, nn::relu(tape, middle(tape, x))), t.targets);
  }
};

struct Case {
  StrategyKind kind;
  MeshSizes mesh;
  StrategyOptions options;
  int optimizer = 0, accumulation = 1;

  std::unique_ptr<Optimizer> make_optimizer() const {
    return optimizer == 0   ? make_adamw({})
           : optimizer == 1 ? make_lamb(LambOptions{})
                            : make_sgd({.momentum = 0.9});
  }
  std::string describe() const {
    return concat(name(kind), " on ", rz::describe(mesh), ", hpz ", options.zero_hpz_partition_size, ", ",
                  name(options.precision.parameters), " and ", name(options.precision.gradients),
                  ", optimizer ", optimizer, ", accumulation ", accumulation);
  }
};

/// Any of all, from a seed.
Case random_case(unsigned seed) {
  std::mt19937 random(seed);
  const auto below = [&](int n) { return static_cast<int>(random() % static_cast<unsigned>(n)); };
  Case c{.kind = test::kinds[below(4)], .options = {.overlap_comm = false, .rebuild = false}};
  do c.mesh = {1 + below(3), 1 + below(3), 1 + below(2)};
  while (c.mesh.ranks() > 6);
  constexpr Precision precisions[] = {
      {}, {DType::bf16, DType::f32}, {DType::bf16, DType::bf16}, {DType::f16, DType::f16}};
  c.options.precision = precisions[below(4)];
  if (below(2)) c.options.reduce_bucket_size = c.options.first_bucket_size = 1200;
  if (below(3) == 0) c.options.wire.communication_data_type = DType::bf16;
  if (c.kind == StrategyKind::zero3 && below(2)) c.options.gathers.param_persistence_threshold = 60;
  if (c.kind == StrategyKind::zero3 && c.mesh.replicate > 1 && below(2))
    c.options.zero_hpz_partition_size = c.mesh.shard;
  c.optimizer = below(3);
  c.accumulation = 1 + below(2);
  return c;
}

std::string text_of(const MeshTraffic& traffic) {
  std::string text;
  const auto add = [&](const char* group, const Traffic& t) {
    const auto calls = [&](const char* kind, const CallCount& c) {
      if (c.calls) text += concat(", ", group, " ", kind, " ", c.calls, " of ", c.bytes);
    };
    calls("all_reduce", t.all_reduce), calls("reduce_scatter", t.reduce_scatter);
    calls("all_gather", t.all_gather), calls("broadcast", t.broadcast), calls("control", t.control);
  };
  add("all", traffic.all), add("data", traffic.data), add("shard", traffic.shard);
  add("replicate", traffic.replicate), add("tp", traffic.tp);
  return text;
}

void expect_planned(const Case& c) {
  lab::group(c.mesh.ranks(), [&](Communicator& comm) {
    const int rank = comm.rank();
    Net net, shapes;
    const auto optimizer = c.make_optimizer();
    const auto [planned, planned_traffic] =
        dry_run(shapes, *optimizer, [&](Tape& t) { return shapes(t, zeros(allocator_on(meta_device))); },
                {.strategy = c.kind,
                 .options = c.options,
                 .mesh = meta_mesh(mesh_of(c.mesh, c.options), rank),
                 .accumulation = c.accumulation});
    MemoryReport predicted =
        predicted_memory(c.kind, shapes, *optimizer, coordinates(c.mesh, rank), c.options);

    const auto strategy = make_strategy(c.kind, net, Mesh(comm, c.mesh), c.options);
    Tape tape;
    strategy->attach(tape);
    const Tokens tokens = zeros(allocate_host);
    MeshTraffic before;
    for (int update = 0; update < 3; ++update) {  // as many as a dry run makes
      before = strategy->traffic();
      strategy->zero_grad();
      for (int m = 1; m <= c.accumulation; ++m) {
        strategy->backward(tape, net(tape, tokens), m == c.accumulation);
        tape.reset();
      }
      strategy->finish_gradients();
      strategy->clip_and_step(*optimizer, {.max_norm = 1});
    }
    EXPECT_EQ(text_of(strategy->traffic() - before), text_of(planned_traffic)) << c.describe();
    EXPECT_EQ((strategy->traffic() - before).sent(c.mesh), planned_traffic.sent(c.mesh));
    MemoryReport held = strategy->memory();
    EXPECT_EQ(held.transient_peak, planned.model.transient_peak);
    EXPECT_EQ(describe(held), describe(planned.model)) << c.describe();
    held.transient = held.transient_in_use = held.transient_peak = 0;
    EXPECT_EQ(held, predicted) << describe(held) << "\n" << describe(predicted) << "\n" << c.describe();
  });
}

TEST(MeshPlan, IsWhatIsHeldAndSentOnTwentyRandomMeshes) {
  for (unsigned seed = 1; seed <= 20; ++seed) expect_planned(random_case(seed));
}

// ---- layers that ranks share

/// What an engine trains, and on which mesh.
struct ModelCase {
  std::function<std::unique_ptr<LanguageModel>()> make;
  MeshSizes mesh;
  std::string json;
};

constexpr std::size_t sequence_length = 12;  // 2, 3 and 4 ranks divide it, and the heads

/// An odd vocabulary, 51 = 26 + 25 = 13 · 3 + 12, and width, 61 = 31 + 30 = 21 + 21 + 19 = 16 · 3 + 13.
std::function<std::unique_ptr<LanguageModel>()> language_model(bool llama, bool tied, double dropout,
                                                               std::size_t width = 61) {
  if (llama)
    return [=] {
      LlamaConfig c;
      c.vocab_size = 51, c.hidden_size = 40, c.intermediate_size = width, c.num_hidden_layers = 2;
      c.num_attention_heads = 12, c.num_key_value_heads = 12, c.head_dim = 4;
      c.max_position_embeddings = 16, c.tie_word_embeddings = tied, c.attention_dropout = dropout;
      return std::make_unique<Llama>(c);
    };
  return [=] {
    Gpt2Config c;
    c.n_layer = 2, c.n_head = 12, c.n_embd = 48, c.n_positions = 16, c.vocab_size = 51;
    c.tie_word_embeddings = tied;
    c.embd_pdrop = c.attn_pdrop = c.resid_pdrop = dropout;
    return std::make_unique<Gpt2>(c);
  };
}

/// Any of all, from a seed, with tp of 2, 3 and 4.
ModelCase random_model_case(unsigned seed) {
  std::mt19937 random(seed);
  const auto below = [&](int n) { return static_cast<int>(random() % static_cast<unsigned>(n)); };
  ModelCase c;
  do c.mesh = {1 + below(3), 1 + below(3), 2 + below(3)};
  while (c.mesh.ranks() > 6);
  const int stage = below(4);
  c.make = language_model(below(2), below(2), below(2) ? 0.1 : 0, seed % 3 ? 61 : 5);
  constexpr const char* precisions[] = {"", R"(, "bf16": {"enabled": true})",
                                        R"(, "fp16": {"enabled": true})"};
  constexpr const char* optimizers[] = {"AdamW", "Lamb", "SGD"};
  c.json = concat(
      R"({"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": )", 1 + below(3),
      R"(, "gradient_clipping": 1.0, "optimizer": {"type": ")", optimizers[below(3)],
      R"(", "params": {"lr": 0.01}}, "zero_optimization": {"overlap_comm": false, "stage": )", stage,
      stage == 3 && below(2) ? R"(, "stage3_param_persistence_threshold": 60)" : "",
      stage == 3 && c.mesh.replicate == 1 && c.mesh.shard > 1 && below(2)
          ? concat(R"(, "zero_hpz_partition_size": )", c.mesh.shard)
          : "",
      below(2) ? R"(, "reduce_bucket_size": 1200)" : "", "}", precisions[below(3)],
      below(3) == 0 ? R"(, "activation_checkpointing": {"partition_activations": true})" : "",
      R"(, "ringzero": {"mesh": {"replicate": )", c.mesh.replicate, R"(, "shard": )", c.mesh.shard,
      R"(, "tp": )", c.mesh.tp, R"(}, "sequence_parallel": )", below(2) ? "true" : "false",
      below(3) == 0 ? R"(, "lora": {"r": 3, "lora_dropout": 0.1, "target_modules": "all-linear"})" : "",
      "}}");
  return c;
}

Tokens tokens_on(const Allocator& memory) {
  return {Tensor::zeros({2, sequence_length}, DType::i32, memory),
          Tensor::zeros({2, sequence_length}, DType::i32, memory)};
}

/// Between nodes layers compute beside their sums, which changes what is in memory at a time.
void expect_planned(const ModelCase& c, bool one_node) {
  SCOPED_TRACE(concat(c.json, one_node ? "" : ", over tcp"));
  const MakePlanned make = [&] {
    const std::shared_ptr<LanguageModel> model = c.make();
    return PlannedModule{model, [model](Tape& t) {
                           const Tokens tokens = tokens_on(allocator_on(meta_device));
                           return model->forward(t, tokens.inputs, tokens.targets).loss;
                         }};
  };
  const std::vector<TrainingPlan> plans =
      plan_all_ranks(make, {.config = c.json}, c.mesh.ranks(), Device::host, one_node ? c.mesh.ranks() : 1);
  lab::world(c.mesh.ranks(), {.transport = one_node ? "shm" : "tcp"}, [&](World& world) {
    const TrainingPlan& plan = plans[static_cast<std::size_t>(world.rank())];
    const auto model = c.make();
    Engine engine = initialize(world, *model, {.config = c.json, .threads = 1, .log = nullptr});
    struct {
      Tokens tokens = tokens_on(allocate_host);
      Tokens& next() { return tokens; }
    } batches;
    MeshTraffic before;
    for (int update = 0; update < 4; ++update) {
      before = engine.strategy().traffic();
      engine.train_batch(batches, [&](Tape& tape, const Tokens& t) {
        return model->forward(tape, t.inputs, t.targets).loss;
      });
    }
    const MeshTraffic sent = engine.strategy().traffic() - before;
    EXPECT_EQ(text_of(sent), text_of(plan.update));
    EXPECT_EQ(sent.sent(engine.strategy().mesh().sizes()), plan.update.sent(plan.mesh));
    EXPECT_GT(plan.update.tp.sent(c.mesh.tp), 0u);
    const MemoryUse held = engine.memory();
    const auto measured = parts(held), expected = parts(plan.memory);
    for (std::size_t i = 0; i < measured.size(); ++i)
      EXPECT_EQ(measured[i].bytes, expected[i].bytes) << measured[i].name << " of rank " << world.rank();
    EXPECT_EQ(held, plan.memory);
  });
}

TEST(MeshPlan, IsWhatIsHeldAndSentWhereRanksShareLayers) {
  for (unsigned seed = 1; seed <= 20; ++seed)
    for (const bool one_node : {true, false}) expect_planned(random_model_case(seed), one_node);
}

/// A module of one's own is divided by the function that its engine has.
TEST(MeshPlan, AModuleIsDividedAsItsEngineDividesIt) {
  struct Mlp : Module {
    nn::Linear up{*this, "up", 24, 48}, down{*this, "down", 48, 24};
    nn::Loss operator()(Tape& t, const Tensor& x) {
      const Tensor targets = Tensor::zeros({2}, DType::i32, allocator_on(t.stream().device()));
      return nn::cross_entropy(t, down(t, nn::gelu(t, up(t, t.constant(x)))), targets);
    }
  };
  constexpr const char* json = R"({"train_micro_batch_size_per_gpu": 2, "ringzero": {"mesh": {"tp": 2}},
      "optimizer": {"type": "AdamW", "params": {"lr": 0.01}}, "zero_optimization": {"overlap_comm": false}})";
  const auto options = [&](bool divides) {
    EngineOptions o{.config = json, .threads = 1, .log = nullptr};
    if (divides)
      o.parallelize = [](Module& m, const Mesh& mesh) {
        return parallelize(m, {{"up", ParallelStyle::column}, {"down", ParallelStyle::row}}, mesh);
      };
    return o;
  };
  const MakePlanned make = [] {
    const auto net = std::make_shared<Mlp>();
    return PlannedModule{net, [net](Tape& t) {
                           return (*net)(t, Tensor::zeros({2, 24}, DType::f32, allocator_on(meta_device)));
                         }};
  };
  const auto plans = plan_all_ranks(make, options(true), 4);
  lab::world(4, [&](World& world) {
    Mlp net;
    Engine engine = initialize(world, net, options(true));
    struct {
      Tensor x = Tensor::zeros({2, 24});
      Tensor& next() { return x; }
    } batches;
    MeshTraffic before;
    for (int update = 0; update < 4; ++update) {
      before = engine.strategy().traffic();
      engine.train_batch(batches, [&](Tape& t, const Tensor& x) { return net(t, x); });
    }
    const TrainingPlan& plan = plans[static_cast<std::size_t>(world.rank())];
    EXPECT_EQ(text_of(engine.strategy().traffic() - before), text_of(plan.update));
    EXPECT_EQ(engine.memory(), plan.memory);
    EXPECT_EQ(plan.update.tp.all_reduce, (CallCount{1, 2 * 24 * 4}));
  });
  const auto refusal = [&](const std::function<void()>& f) { return std::string(test::error_of(f).what()); };
  EXPECT_EQ(refusal([&] { plan_all_ranks(make, options(false), 4); }),
            "configuration: ringzero.mesh.tp: is 2, and the module has no plan of what ranks share; set "
            "EngineOptions::parallelize, or tp to 1");
  const PlannedModule one = make();
  EXPECT_EQ(refusal([&] { plan_all_ranks(*one.module, options(true), one.record, 4); }),
            "configuration: ringzero.mesh.tp: is 2, and one module has the parts of one rank: give "
            "plan_all_ranks() a function that makes modules");
}

// ---- by hand: 1536 elements, which no mesh pads

struct Even : Module {
  Even() {
    register_parameter(w, "w", {1536});
    scope = &register_scope("all", {&w});
  }
  Var loss(Tape& t) {
    return t.scope(*scope, [&] { return nn::sum(t, t.parameter(w)); });
  }
  Parameter w;
  const Scope* scope = nullptr;
};

/// What the ranks of each dimension send in an update of f32 values, without control, in elements.
void expect_sent(StrategyKind kind, const MeshSizes& mesh, int hpz, std::uint64_t shard,
                 std::uint64_t replicate, std::uint64_t data) {
  SCOPED_TRACE(concat(name(kind), " on ", describe(mesh), ", hpz ", hpz));
  lab::group(mesh.ranks(), [&](Communicator& comm) {
    Even model;
    const auto strategy = make_strategy(
        kind, model, Mesh(comm, mesh),
        {.rebuild = false, .gathers = {.prefetch_bucket_size = 0}, .zero_hpz_partition_size = hpz});
    Tape tape;
    strategy->attach(tape);
    const auto sgd = make_sgd({});
    MeshTraffic before;
    for (int update = 0; update < 2; ++update) {
      before = strategy->traffic();
      strategy->zero_grad();
      const Var loss = model.loss(tape);
      strategy->begin_backward();
      tape.backward(loss);
      tape.reset();
      strategy->finish_gradients();
      strategy->step(*sgd);
    }
    MeshTraffic sent = strategy->traffic() - before;
    for (Traffic* t : {&sent.all, &sent.data, &sent.shard, &sent.replicate}) t->control = {};
    EXPECT_EQ(sent.shard.sent(mesh.shard), 4 * shard);
    EXPECT_EQ(sent.replicate.sent(mesh.replicate), 4 * replicate);
    EXPECT_EQ(sent.data.sent(mesh.data()), 4 * data);
  });
}

TEST(MeshPlan, DimensionsSendWhatTheirNumbersOfRanksSay) {
  constexpr std::uint64_t n = 1536;
  // In two steps: a reduce_scatter and an all_gather of all in a copy, and an all_reduce of a half between
  // copies.
  expect_sent(StrategyKind::ddp, {2, 2}, 1, 2 * n / 2, 2 * (n / 2) / 2, 0);
  expect_sent(StrategyKind::zero1, {2, 2}, 1, 2 * n / 2, 2 * (n / 2) / 2, 0);
  expect_sent(StrategyKind::zero2, {2, 3}, 1, 2 * n / 3 * 2, 2 * (n / 3) / 2, 0);
  expect_sent(StrategyKind::zero3, {2, 2}, 1, 3 * n / 2, 2 * (n / 2) / 2, 0);
  expect_sent(StrategyKind::zero3, {4, 1}, 1, 0, 2 * n / 4 * 3, 0);
  // hpZ: backward gathers in a block, all else is between all ranks.
  expect_sent(StrategyKind::zero3, {2, 2}, 2, n / 2, 0, 2 * n / 4 * 3);
}

// ---- layers, by hand

/// What layers exchange in a pass of a GPT-2 of two layers, 2 x 8 tokens of 24 channels, of 3 ranks: sums of
/// activations of the table, of attention and of the block's second product; in backward of the inputs of
/// both and of the head; with sequence parallelism each sum is a reduce-scatter or a gather, of each
/// sequence.
TEST(MeshPlan, LayersAreCountedAmongTheRanksThatShareThem) {
  constexpr std::uint64_t ranks = 3, layers = 2, sequences = 2, rows = 2 * 9, activation = rows * 24 * 4;
  constexpr std::uint64_t vectors = (4 * layers + 2) + 2 * layers, whole = vectors * 24 * 4 + 16 * 24 * 4;
  for (const bool sequence : {false, true})
    lab::group(ranks, [&](Communicator& comm) {
      const Mesh mesh(comm, {.shard = 1, .tp = ranks});
      Gpt2 model({.n_layer = layers, .n_head = 3, .n_embd = 24, .n_positions = 16, .vocab_size = 32});
      parallelize(model, model.parallel_plan(), mesh, {.sequence_parallel = sequence});
      const auto strategy = make_strategy(StrategyKind::ddp, model, mesh, {.rebuild = false});
      std::vector<std::pair<Collective, std::size_t>> observed;
      strategy->observe_communication({[&](const StartedCollective& c) {
                                         if (c.ranks == ranks) observed.emplace_back(c.kind, c.bytes);
                                       },
                                       {}});
      Tape tape;
      strategy->attach(tape);
      const Tensor tokens = Tensor::zeros({sequences, 9}, DType::i32);
      strategy->backward(tape, model.forward(tape, tokens, tokens).loss);
      tape.reset();
      Traffic sent = strategy->traffic().tp, seen;
      sent.control = {};
      const std::uint64_t sums = 2 * (2 * layers + 1);
      if (!sequence) {
        EXPECT_EQ(sent,
                  (Traffic{.all_reduce = {sums, sums * activation}, .all_gather = {1, ranks * rows * 8}}));
      } else {
        EXPECT_EQ(sent,
                  (Traffic{.all_reduce = {vectors + 1, whole},
                           .reduce_scatter = {sums * sequences, sums * activation},
                           .all_gather = {sums * sequences + 1, sums * activation + ranks * rows * 8}}));
      }
      for (const auto& [kind, bytes] : observed) seen.of(kind).bytes += bytes;
      EXPECT_EQ(seen.all_gather.bytes, sent.all_gather.bytes);
      EXPECT_EQ(seen.reduce_scatter.bytes, sent.reduce_scatter.bytes);
    });
}

}  // namespace
}  // namespace rz
