// Runs: ci
// Not under sanitizers: Ranks/Plan[.].*/[013]$

/// Plans against runs: a rank's bytes by category, and the bytes that it sends in an update.
#include <gtest/gtest.h>

#include <span>
#include <string>

#include "autograd_lite/models/gpt2.h"
#include "comm/device/allocate.h"
#include "comm/device/meta.h"
#include "sharding/engine/dry_run.h"
#include "sharding/engine/engine.h"
#include "sharding/engine/engine_options.h"
#include "sharding/engine/training_plan.h"
#include "sharding/strategy/strategy.h"
#include "tests/lab/world.h"
#include "tests/support/error_of.h"
#include "tests/support/mirrored_backend.h"
#include "tests/support/toy_training.h"

namespace rz {
namespace {

using test::error_of;
using test::kinds;

constexpr Gpt2Config small{.n_layer = 3, .n_head = 2, .n_embd = 32, .n_positions = 16, .vocab_size = 96};
constexpr std::size_t micro = 2;

struct Tokens {
  Tensor inputs, targets;
};
Tokens zeros(const Allocator& memory) {
  const Shape shape{micro, small.n_positions};
  return {Tensor::zeros(shape, DType::i32, memory), Tensor::zeros(shape, DType::i32, memory)};
}
/// The same batch again and again.
struct Batches {
  Tokens tokens = zeros(allocate_host);
  Tokens& next() { return tokens; }
};

/// A case: keys of a configuration, those of zero_optimization apart, and what is changed in the model.
struct Case {
  std::string zero, keys;
  std::function<void(Gpt2&)> change = [](Gpt2&) {};
  Gpt2Config model = small;
};

constexpr const char* in_order = R"("overlap_comm": false)";  // reductions end where a dry run ends them

std::string config(StrategyKind kind, const Case& c) {
  const bool has_optimizer = c.keys.find("\"optimizer\"") != std::string::npos;
  return concat(R"({"train_micro_batch_size_per_gpu": )", micro, R"(, "zero_optimization": {"stage": )",
                static_cast<int>(kind), c.zero.empty() ? "" : ", ", c.zero, "}",
                has_optimizer ? "" : R"(, "optimizer": {"type": "AdamW", "params": {"lr": 0.01}})",
                c.keys.empty() ? "" : ", ", c.keys, "}");
}

/// What an engine holds after some updates, and sends in the last one.
template <class Model, class Record>
TrainingPlan measured(World& world, Model& model, const std::string& json, const Record& record) {
  Engine engine = initialize(world, model, {.config = json, .threads = 1, .log = nullptr});
  Batches batches;
  MeshTraffic before;
  for (int i = 0; i < 4; ++i) {
    before = engine.strategy().traffic();
    engine.train_batch(batches, [&](Tape& tape, const Tokens& t) { return record(model, tape, t); });
  }
  return {engine.strategy().kind(),
          engine.strategy().mesh().sizes(),
          {world.rank(), world.size()},
          engine.memory(),
          engine.strategy().traffic() - before};
}

template <class Model, class Record>
TrainingPlan planned(Model& model, const std::string& json, RankOf rank, const Record& record) {
  return plan_training(
      model, {.config = json},
      [&](Tape& tape) { return record(model, tape, zeros(allocator_on(meta_device))); }, rank);
}

nn::Loss loss_of(Gpt2& model, Tape& tape, const Tokens& t) {
  return model.forward(tape, t.inputs, t.targets).loss;
}

void expect_as_planned(const TrainingPlan& run, const TrainingPlan& plan, const std::string& what) {
  EXPECT_EQ(run.update, plan.update) << what;
  const auto held = parts(run.memory), expected = parts(plan.memory);
  for (std::size_t i = 0; i < held.size(); ++i)
    EXPECT_EQ(held[i].bytes, expected[i].bytes) << what << ": " << held[i].name;
  EXPECT_EQ(run.memory.activations_in_use, plan.memory.activations_in_use) << what;
  EXPECT_EQ(run.memory.model.transient_peak, plan.memory.model.transient_peak) << what;
}

/// Where reductions overlap with backward.
void expect_at_most_planned(const TrainingPlan& run, const TrainingPlan& plan, const std::string& what) {
  EXPECT_EQ(run.update, plan.update) << what;
  EXPECT_LE(run.memory.model.transient_peak, plan.memory.model.transient_peak) << what;
  TrainingPlan rest = run;
  rest.memory.model.transient = plan.memory.model.transient;
  rest.memory.model.transient_in_use = plan.memory.model.transient_in_use;
  rest.memory.model.transient_peak = plan.memory.model.transient_peak;
  EXPECT_EQ(rest.memory, plan.memory) << what;
}

using Comparison = void (*)(const TrainingPlan& run, const TrainingPlan& plan, const std::string& what);

class Plan : public testing::TestWithParam<int> {
 protected:
  void expect(const Case& c, std::span<const StrategyKind> strategies = kinds,
              Comparison compare = expect_as_planned) {
    for (const StrategyKind kind : strategies) {
      const std::string json = config(kind, c);
      lab::world(GetParam(), [&](World& world) {
        Gpt2 model(c.model), shapes(c.model);
        c.change(model), c.change(shapes);
        const RankOf rank{world.rank(), world.size()};
        compare(measured(world, model, json, loss_of), planned(shapes, json, rank, loss_of),
                concat("rank ", rank.rank, " of ", rank.ranks, ", ", json));
      });
    }
  }
};
INSTANTIATE_TEST_SUITE_P(Ranks, Plan, testing::Values(1, 2, 3, 4));

constexpr StrategyKind zero3_only[] = {StrategyKind::zero3};

// ---- exactly

TEST_P(Plan, IsWhatARunHoldsAndSends) { expect({in_order, ""}); }

TEST_P(Plan, CountsBucketsOfAnySize) {
  for (const int elements : {64, 1000, 5000})
    expect({concat(in_order, R"(, "reduce_bucket_size": )", elements), ""});
}

TEST_P(Plan, CountsAccumulation) { expect({in_order, R"("gradient_accumulation_steps": 3)"}); }

TEST_P(Plan, CountsAMesh) {
  if (GetParam() != 4) GTEST_SKIP() << "of four ranks";
  for (const int copies : {2, 4})
    expect({in_order, concat(R"("ringzero": {"mesh": {"replicate": )", copies, "}}")});
  expect({concat(in_order, R"(, "mics_shard_size": 2)"), R"("bf16": {"enabled": true})"});
  expect({concat(in_order, R"(, "zero_hpz_partition_size": 2)"), ""}, zero3_only);
}

TEST_P(Plan, CountsSixteenBits) {
  expect({in_order, R"("bf16": {"enabled": true})"});
  expect({in_order, R"("fp16": {"enabled": true, "initial_scale_power": 4})"});
  expect({in_order, R"("bf16": {"enabled": true}, "data_types": {"grad_accum_dtype": "fp32"})"});
  expect({in_order, R"("communication_data_type": "bf16", "gradient_accumulation_steps": 2)"});
}

TEST_P(Plan, CountsAutocast) {
  expect({in_order, R"("torch_autocast": {"enabled": true, "dtype": "bfloat16"})"});
}

TEST_P(Plan, CountsGathersWithinTheirLimits) {
  for (const char* keys :
       {R"("stage3_prefetch_bucket_size": 0)", R"("stage3_param_persistence_threshold": 0)",
        R"("stage3_param_persistence_threshold": 200, "stage3_max_reuse_distance": 0)",
        R"("stage3_max_live_parameters": 20000, "stage3_prefetch_bucket_size": 5000)",
        R"("stage3_max_reuse_distance": 1000, "reduce_bucket_size": 2000)"})
    expect({concat(in_order, ", ", keys), ""}, zero3_only);
}

TEST_P(Plan, CountsFrozenParameters) {
  expect({in_order, "", [](Gpt2& model) {
            model.find_module("transformer.h.0")->requires_grad_(false);
            model.find("transformer.wpe.weight")->requires_grad = false;
          }});
}

TEST_P(Plan, CountsRecomputationAndDropout) {
  Gpt2Config dropout = small;
  dropout.embd_pdrop = dropout.attn_pdrop = dropout.resid_pdrop = 0.1;
  const char* keys = R"("activation_checkpointing": {"number_checkpoints": 1})";
  expect({in_order, keys, [](Gpt2&) {}, dropout});
  expect({in_order, concat(keys, R"(, "bf16": {"enabled": true})")});
}

constexpr const char* optimizers[] = {
    R"("AdamW", "params": {"lr": 0.01})",
    R"("AdamW", "params": {"lr": 0.01, "amsgrad": true})",
    R"("SGD", "params": {"lr": 0.01, "momentum": 0.9, "dampening": 0.5})",
    R"("SGD", "params": {"lr": 0.01})",
    R"("RMSprop", "params": {"lr": 0.01})",
    R"("RMSprop", "params": {"lr": 0.01, "centered": true, "momentum": 0.9})",
    R"("Lion", "params": {"lr": 0.01})",
    R"("Adagrad", "params": {"lr": 0.01})",
    R"("Lamb", "params": {"lr": 0.01})",
    R"("Muon", "params": {"lr": 0.01})"};

TEST_P(Plan, CountsTheStatesOfEveryOptimizer) {
  for (const char* optimizer : optimizers)
    expect({in_order, concat(R"("optimizer": {"type": )", optimizer, "}")});
}

TEST_P(Plan, HasNoEffectOfOffloadOnTheHost) {
  expect({concat(in_order, R"(, "offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"})"),
          R"("bf16": {"enabled": true})"},
         zero3_only);
}

// ---- with overlap

TEST_P(Plan, BoundsWhatOverlappedReductionsHold) {
  for (const int elements : {1000, 500000})
    expect({concat(R"("overlap_comm": true, "reduce_bucket_size": )", elements), ""}, kinds,
           expect_at_most_planned);
}

// ---- what the communicator moves

/// Bytes of calls, by collective.
struct Moved {
  std::uint64_t all_reduce = 0, reduce_scatter = 0, all_gather = 0, broadcast = 0;
  bool operator==(const Moved&) const = default;
};
void PrintTo(const Moved& m, std::ostream* out) {
  *out << concat("all_reduce ", m.all_reduce, ", reduce_scatter ", m.reduce_scatter, ", all_gather ",
                 m.all_gather, ", broadcast ", m.broadcast);
}
Moved moved(const Traffic& t) {
  return {t.all_reduce.bytes + t.control.bytes, t.reduce_scatter.bytes, t.all_gather.bytes,
          t.broadcast.bytes};
}
Moved moved(const test::CallRecord& record) {
  const auto bytes = [&](Collective kind) {
    std::uint64_t sum = 0;
    for (const auto& c : record.launched([&](const auto& call) { return call.kind == kind; }))
      sum += c.elements * size_of(c.dtype);
    return sum;
  };
  return {bytes(Collective::all_reduce), bytes(Collective::reduce_scatter), bytes(Collective::all_gather),
          bytes(Collective::broadcast)};
}

/// Norms, weights of losses, agreement on a pass, directions of Muon: nothing of an update is left out.
/// Values are what the memory has, and no update is skipped.
TEST_P(Plan, HasEveryByteThatTheCommunicatorMoves) {
  const RankOf rank{GetParam() - 1, GetParam()};
  for (const StrategyKind kind : kinds)
    for (const char* keys : optimizers) {
      const DsConfig c = parse_ds_config(
          config(kind, {in_order, concat(R"("optimizer": {"type": )", keys, "}")}), "ds.json");
      const auto optimizer = make_optimizer(*c.optimizer, Decay::all);
      const auto record = std::make_shared<test::CallRecord>();
      auto communicator = test::mirrored_communicator(rank.rank, rank.ranks, record);
      Gpt2 model(small), shapes(small);
      allocate_parameters(model);
      const auto strategy = make_strategy(kind, model, communicator);
      Tape tape;
      strategy->attach(tape);
      const Tokens tokens = zeros(allocate_host);
      MeshTraffic before;
      for (int i = 0; i < 4; ++i) {
        before = strategy->traffic();
        record->clear();
        strategy->zero_grad();
        for (const bool last : {false, true}) {
          strategy->backward(tape, loss_of(model, tape, tokens), last);
          tape.reset();
        }
        strategy->finish_gradients();
        strategy->clip_and_step(*optimizer, {.max_norm = 1});
      }
      const MeshTraffic update = strategy->traffic() - before;
      EXPECT_EQ(moved(update.total()), moved(*record)) << name(kind) << ", " << keys;
      const auto [memory, planned] = dry_run(
          shapes, *optimizer, [&](Tape& t) { return loss_of(shapes, t, zeros(allocator_on(meta_device))); },
          {.strategy = kind, .mesh = meta_mesh({.shard = rank.ranks}, rank.rank), .accumulation = 2});
      EXPECT_EQ(update, planned) << name(kind) << ", " << keys;
    }
}

// ---- any module

/// With buffers, a parameter that no loss reaches, operators of the library and a block.
struct Net : Module {
  Net() {
    register_parameter(unused, "unused", {5, 3});
    register_buffer(mean, "mean", {1000});
    fc2.one_scope();
  }
  Parameter unused;
  ModuleBuffer mean;
  nn::Embedding embedding{*this, "embedding", 96, 24};
  nn::Linear fc1{*this, "fc1", 24, 50}, fc2{*this, "fc2", 50, 96};

  nn::Loss operator()(Tape& tape, const Tokens& t) {
    const Var x = nn::relu(tape, fc1(tape, embedding(tape, t.inputs)));
    return nn::cross_entropy(tape, fc2(tape, nn::softmax(tape, nn::add(tape, x, x))), t.targets);
  }
};

TEST_P(Plan, IsOfAnyModule) {
  for (const StrategyKind kind : kinds) {
    const std::string json = config(kind, {in_order, R"("gradient_accumulation_steps": 2)"});
    const auto record = [](Net& net, Tape& tape, const Tokens& t) { return net(tape, t); };
    lab::world(GetParam(), [&](World& world) {
      Net net, shapes;
      const RankOf rank{world.rank(), world.size()};
      const TrainingPlan plan = planned(shapes, json, rank, record);
      expect_as_planned(measured(world, net, json, record), plan, name(kind));
      EXPECT_EQ(plan.memory.buffers, 4000u);
    });
  }
}

TEST_P(Plan, OfAllRanksIsThatOfEach) {
  for (const char* optimizer : {"AdamW", "Muon"}) {
    const Case c{in_order, concat(R"("optimizer": {"type": ")", optimizer, R"(", "params": {"lr": 0.01}})")};
    const std::string json = config(StrategyKind::zero2, c);
    Gpt2 model(small);
    const RecordLoss record = [&](Tape& t) { return loss_of(model, t, zeros(allocator_on(meta_device))); };
    const auto all = plan_all_ranks(model, {.config = json}, record, GetParam());
    ASSERT_EQ(all.size(), static_cast<std::size_t>(GetParam()));
    for (int r = 0; r < GetParam(); ++r) {
      const TrainingPlan one = plan_training(model, {.config = json}, record, {r, GetParam()});
      const TrainingPlan& same = all[static_cast<std::size_t>(r)];
      EXPECT_EQ(same.rank.rank, r);
      EXPECT_EQ(same.memory, one.memory) << optimizer << ", rank " << r;
      EXPECT_EQ(same.update, one.update);
    }
  }
}

// ---- without memory

/// 175e9 parameters, on one rank of 1024.
TEST(PlanOfALargeModel, NeedsNoMemory) {
  Gpt2 model({.n_layer = 96, .n_head = 96, .n_embd = 12288, .n_positions = 2048, .vocab_size = 50257});
  const RecordLoss record = [&](Tape& tape) {
    return model.forward(tape, tape.empty({1, 2048}, DType::i32), tape.empty({1, 2048}, DType::i32)).loss;
  };
  const TrainingPlan plan = plan_training(
      model, {.config = config(StrategyKind::zero3, {in_order, R"("bf16": {"enabled": true})"})}, record,
      {0, 1024});
  std::size_t elements = 0;
  for (const Parameter* p : model.parameters()) {
    elements += p->count();
    EXPECT_FALSE(p->value.defined() || p->grad.defined());
  }
  EXPECT_NEAR(static_cast<double>(plan.memory.model.optimizer_state), 8.0 * elements / 1024,
              0.01 * elements / 1024);
  EXPECT_GT(plan.memory.activations, std::size_t{1} << 32);
}

TEST(PlanOfALargeModel, RefusesAModelWithValues) {
  Gpt2 model(small);
  allocate_parameters(model);
  const Error e = error_of([&] {
    plan_training(model, {.config = config(StrategyKind::ddp, {})},
                  [&](Tape& t) { return loss_of(model, t, zeros(allocator_on(meta_device))); }, {});
  });
  EXPECT_EQ(e.code(), Errc::invalid_argument);
}

TEST(PlanOfALargeModel, NeedsAnOptimizer) {
  Gpt2 model(small);
  const RecordLoss record = [&](Tape& t) { return loss_of(model, t, zeros(allocator_on(meta_device))); };
  const Error e = error_of(
      [&] { plan_training(model, {.config = R"({"train_micro_batch_size_per_gpu": 1})"}, record, {}); });
  EXPECT_EQ(e.code(), Errc::config);
  EXPECT_NE(std::string(e.what()).find("optimizer: missing"), std::string::npos) << e.what();
}

}  // namespace
}  // namespace rz
