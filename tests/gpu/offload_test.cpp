// Runs: ci long operators

// Training with optimizer state, masters and values in host memory has the bits of training without, for
// every strategy, tile and precision; what lies where is counted exactly.

#include <algorithm>
#include <cmath>
#include <map>
#include <mutex>

#include "comm/device/cuda_runtime.h"
#include "comm/device/graph.h"
#include "sharding/engine/engine_options.h"
#include "sharding/optim/optimizers.h"
#include "sharding/strategy/optimizer_state.h"
#include "sharding/strategy/prediction.h"
#include "sharding/strategy/strategy.h"
#include "tests/gpu/on_card.h"
#include "tests/gpu/on_device.h"
#include "tests/lab/training.h"
#include "tests/support/error_of.h"

namespace rz::test {
namespace {

using Type = OptimizerConfig::Type;
constexpr Precision brain{DType::bf16, DType::bf16}, half{DType::f16, DType::f16};
constexpr OffloadOptions pinned{.device = OffloadDevice::cpu},
    pageable{.device = OffloadDevice::cpu, .pin_memory = false},
    a_half{.device = OffloadDevice::cpu, .ratio = 0.5};

struct Case {
  const char* name;
  StrategyKind kind;
  int ranks;
  Precision precision;
  OffloadOptions state, values;
  std::size_t sub_group_size = 1'000'000'000;
  Type type = Type::adamw;
  bool overflow = false;       ///< the first two updates are skipped
  std::size_t persistent = 0;  ///< param_persistence_threshold
  bool one_bucket = false;
  bool third_state = false;  ///< amsgrad, centered
};
void PrintTo(const Case& c, std::ostream* out) { *out << c.name; }

/// All values and states, by name and first element; and what the updates left.
struct Result {
  lab::Trace trace;
  std::map<std::string, std::vector<float>> elements;
  MemoryReport memory, predicted;  ///< of rank 0
};

/// `share_a_card`: all ranks are on the first device, as threads.
Result run(const Case& c, bool offloads, bool graph = false, int updates = 3, bool share_a_card = false) {
  lab::Gpt gpt;
  if (c.ranks == 3) gpt.batch = 3;
  if (c.one_bucket) gpt.bucket = 1 << 20;
  lab::Run run{.model = lab::gpt(gpt), .strategy = c.kind, .ranks = c.ranks, .updates = updates};
  run.options = [&](EngineOptions& o) {
    StrategyOptions& s = o.ds_config->strategy;
    s.precision = c.precision;
    s.gathers.param_persistence_threshold = c.persistent;
    if (offloads)
      s.offload_optimizer = c.state, s.offload_param = c.values, s.sub_group_size = c.sub_group_size;
    o.ds_config->optimizer = {.type = c.type,
                              .lr = 1e-2,
                              .momentum = 0.9,
                              .weight_decay = 0.1,
                              .amsgrad = c.third_state,
                              .centered = c.third_state};
    o.ds_config->precision.skip_overflow = c.precision.parameters == DType::f16;
    o.ds_config->precision.loss_scale = {.fixed = c.overflow ? 0.0 : 1024.0, .initial_power = 32};
    o.graph = graph;
  };
  run.comm = [=](int rank) { return on_a_card(share_a_card ? 0 : rank); };
  Result result;
  std::mutex mutex;
  run.each = [&](Engine& engine, Module&) {  // before the values are gathered, which takes memory
    if (engine.global_steps() < updates) return;
    const std::lock_guard lock(mutex);
    const auto keep = [&](const std::string& what, const Parameter& p, Range r, const float* x) {
      result.elements[concat(what, " of ", p.name, " from ", r.begin)].assign(x, x + r.count());
    };
    engine.strategy().values().visit_owned(
        [&](const Parameter& p, Range r, const float* x) { keep("value", p, r, x); });
    engine.strategy().optimizer_state().visit(
        [&](const std::string& state, const Parameter& p, Range r, const float* x) { keep(state, p, r, x); });
    EXPECT_EQ(engine.report().ran_graph, updates > 3 && graph && !(share_a_card && offloads));
    if (!engine.world().is_main()) return;
    result.memory = engine.strategy().memory();
    Gpt2 shapes(gpt.config);
    const auto optimizer = make_optimizer(*engine.config().optimizer, Decay::matrices);
    result.predicted = predicted_memory(c.kind, shapes, *optimizer, RankOf{0, c.ranks},
                                        strategy_options(engine.config(), c.kind), Device::cuda);
  };
  result.trace = lab::train(run);
  return result;
}

void expect_same(const Result& with, const Result& without) {
  EXPECT_EQ(with.trace, without.trace);
  ASSERT_FALSE(without.elements.empty());
  ASSERT_EQ(with.elements.size(), without.elements.size());
  for (const auto& [name, values] : without.elements) EXPECT_EQ(with.elements.at(name), values) << name;
}

class Offload : public OnDevice, public testing::WithParamInterface<Case> {};

TEST_P(Offload, HasTheSameBits) {
  const Result without = run(GetParam(), false);
  reschedule(1);
  const Result with = run(GetParam(), true);
  expect_same(with, without);
  EXPECT_EQ(with.trace.updates.front().skipped, GetParam().overflow);
  EXPECT_GT(with.memory.offloaded.total(), 0u);
  EXPECT_EQ(with.memory.offloaded.total() + with.memory.total() - with.memory.transient,
            without.memory.total() - without.memory.transient);
  EXPECT_EQ(with.memory.offloaded, with.predicted.offloaded);
  EXPECT_EQ(with.memory.total() - with.memory.transient, with.predicted.total());
}

const Case cases[] = {
    {"zero3_bf16", StrategyKind::zero3, 2, brain, pinned, pinned, 256},
    {"zero1", StrategyKind::zero1, 2, {}, pinned, {}, 192},
    {"zero2_bf16_on_4", StrategyKind::zero2, 4, brain, pinned, {}, 64},
    {"zero3_values_alone", StrategyKind::zero3, 2, {}, {}, pinned, 1000},
    {"zero3_state_alone", StrategyKind::zero3, 3, {}, pinned, {}, 320},
    {"zero3_f16_skips", StrategyKind::zero3, 2, half, pinned, pinned, 512, Type::adamw, true},
    {"lamb", StrategyKind::zero3, 2, brain, pinned, pinned, 256, Type::lamb},
    // Its one tile is stored by the measurement, and fetched by the update.
    {"lamb_in_one_tile", StrategyKind::zero1, 2, brain, pinned, {}, 1 << 20, Type::lamb, false, 0, true},
    {"lion_on_1", StrategyKind::zero3, 1, brain, pinned, pinned, 704, Type::lion},
    {"adagrad", StrategyKind::zero2, 2, {}, pinned, {}, 1, Type::adagrad},
    {"amsgrad", StrategyKind::zero3, 2, brain, pinned, pinned, 192, Type::adamw, false, 0, false, true},
    {"rmsprop", StrategyKind::zero1, 2, {}, pinned, {}, 256, Type::rmsprop, false, 0, false, true},
    {"persistent", StrategyKind::zero3, 2, brain, pinned, pinned, 256, Type::adamw, false, 256},
    {"half_of_it", StrategyKind::zero3, 2, brain, a_half, {}, 256},
    {"pageable", StrategyKind::zero3, 2, brain, pageable, pageable, 512},
};
INSTANTIATE_TEST_SUITE_P(Cases, Offload,
                         testing::ValuesIn(std::begin(cases), checks_addresses ? cases + 1 : std::end(cases)),
                         [](const auto& info) { return info.param.name; });

class OffloadOnDevice : public OnDevice {};

/// State and masters of all buckets, or of the first ones that have at least the share.
TEST_F(OffloadOnDevice, MemoryIsCountedWhereItLies) {
  const Case c{"", StrategyKind::zero3, 2, brain, pinned, pinned, 256};
  const MemoryReport all = run(c, true, false, 1).memory, none = run(c, false, false, 1).memory;
  EXPECT_EQ(all.offloaded, (OffloadedMemory{none.parameters, none.masters, none.optimizer_state}));
  EXPECT_EQ(all.parameters + all.masters + all.optimizer_state, 0u);
  EXPECT_EQ(all.gradients, none.gradients);
  EXPECT_EQ(none.masters, 2 * none.parameters);
  Case part = c;
  part.state = a_half, part.values = {}, part.persistent = 1 << 20;
  const MemoryReport halved = run(part, true, false, 1).memory;
  EXPECT_EQ(halved.offloaded.parameters, 0u);
  EXPECT_EQ(halved.offloaded.optimizer_state, 2 * halved.offloaded.masters);
  EXPECT_EQ(halved.offloaded.masters + halved.masters, none.masters);
  EXPECT_GE(2 * halved.offloaded.masters, none.masters);
  EXPECT_LT(halved.offloaded.masters, none.masters);
  part.state = pinned, part.values = pinned;
  const MemoryReport persistent = run(part, true, false, 1).memory;
  EXPECT_EQ(persistent.parameters, 2 * none.parameters) << "whole on each of two ranks";
  EXPECT_EQ(persistent.offloaded.parameters, 0u);
}

/// A master and two states of each element, for two tiles.
TEST_F(OffloadOnDevice, AnUpdateHoldsTwoTiles) {
  Case c{"", StrategyKind::zero1, 2, brain, pinned, {}};
  EXPECT_EQ(run(c, false, false, 1).memory.transient_peak, 0u);
  for (const std::size_t size : {64, 128, 200}) {
    c.sub_group_size = size;
    EXPECT_EQ(run(c, true, false, 1).memory.transient_peak, 2 * 3 * 4 * (size / 64 * 64)) << size;
  }
}

/// Ranks that share a GPU as threads cannot run such graphs: see peer_cuda_backend.h.
TEST_F(OffloadOnDevice, AGraphHasTheSameBits) {
  const int ranks = emulated_device || cuda::device_count() > 1 ? 2 : 1;
  const Case c{"", StrategyKind::zero3, ranks, brain, pinned, pinned, 512, Type::lamb};
  const Result without = run(c, false, false, 6);
  expect_same(run(c, true, true, 6), without);
}

TEST_F(OffloadOnDevice, RanksThatShareACardAsThreadsRunNoGraphThatOffloads) {
  lab::group(2, on_a_card(0), [&](Communicator& comm) {
    Gpt2 model({.n_layer = 1, .n_head = 2, .n_embd = 16, .n_positions = 8, .vocab_size = 32});
    const auto reason = [&](const StrategyOptions& o) {
      return make_strategy(StrategyKind::zero3, model, comm, o)->reason_against_capture();
    };
    EXPECT_EQ(reason({}), "");
    for (const StrategyOptions& o :
         {StrategyOptions{.offload_param = pinned}, StrategyOptions{.offload_optimizer = pinned}})
      EXPECT_EQ(
          reason(o),
          "ranks 0 and 1 are threads that share a GPU, where a graph that copies between host and device "
          "memory may wait for ever; use a process for each rank");
  });
}

/// The engine trains without one.
TEST_F(OffloadOnDevice, UpdatesOfRanksThatShareACardAsThreadsHaveTheSameBits) {
  const Case c{"", StrategyKind::zero3, 2, brain, pinned, pinned, 512, Type::lamb};
  const Result without = run(c, false, false, 6, true);
  expect_same(run(c, true, true, 6, true), without);
}

TEST_F(OffloadOnDevice, WhatIsNotPinnedIsNotCaptured) {
  Communicator comm = Communicator::connect(0, 1, memory_store(), on_a_card(0));
  Gpt2 model({.n_layer = 1, .n_head = 2, .n_embd = 16, .n_positions = 8, .vocab_size = 32});
  const auto strategy = make_strategy(StrategyKind::zero3, model, comm, {.offload_param = pageable});
  EXPECT_FALSE(strategy->capturable());
  Tape tape(stream);
  strategy->attach(tape);
  const Tensor tokens = to_device(std::vector<std::int32_t>(8, 1), {1, 8}, stream);
  const auto forward = [&] {
    const Tape::NoGrad no_grad(tape);
    model.forward(tape, tokens, tokens);
    tape.reset();
  };
  forward();
  const Error e = error_of([&] { capture(stream, forward); });
  EXPECT_EQ(e.code(), Errc::unsupported);
  EXPECT_NE(std::string(e.what()).find("set pin_memory"), std::string::npos) << e.what();
}

/// Values and states that were written on the host are those that are read, from host memory and gathered.
TEST_F(OffloadOnDevice, ValuesAndStatesAreImportedAndExported) {
  constexpr int ranks = 2;
  const auto exact = [](const Parameter& p, std::size_t i) {
    return static_cast<float>(i % 509) + static_cast<float>(p.name.size()) + 0x1p-13f;
  };
  lab::group(ranks, on_a_card, [&](Communicator& comm) {
    Gpt2 model({.n_layer = 1, .n_head = 2, .n_embd = 16, .n_positions = 8, .vocab_size = 32});
    const auto s = make_strategy(StrategyKind::zero3, model, comm,
                                 {.precision = brain, .offload_optimizer = pinned, .offload_param = pinned});
    s->values().fill([&](const Parameter& p, Range r, float* out) {
      for (std::size_t i = r.begin; i < r.end; ++i) out[i - r.begin] = exact(p, i);
    });
    const auto adamw = make_adamw({});
    s->optimizer_state().fill(*adamw, [&](const std::string& state, const Parameter& p, Range r, float* out) {
      for (std::size_t i = r.begin; i < r.end; ++i)
        out[i - r.begin] = exact(p, i) * (state == "exp_avg" ? 2.0f : 4.0f);
    });
    s->values().visit_owned([&](const Parameter& p, Range r, const float* x) {
      for (std::size_t i = r.begin; i < r.end; ++i) ASSERT_EQ(x[i - r.begin], exact(p, i));
    });
    s->optimizer_state().visit([&](const std::string& state, const Parameter& p, Range r, const float* x) {
      for (std::size_t i = r.begin; i < r.end; ++i)
        ASSERT_EQ(x[i - r.begin], exact(p, i) * (state == "exp_avg" ? 2.0f : 4.0f));
    });
    const Stream reader = Stream::create(comm.options().device);
    for (const Parameter* p : model.parameters()) {
      const Tensor whole = s->values().whole(*p, reader).on_host(reader);
      for (std::size_t i = 0; i < whole.count(); ++i)
        ASSERT_EQ(whole.data<float>()[i], exact(*p, i)) << p->name;
    }
    comm.barrier().wait();
  });
}

}  // namespace
}  // namespace rz::test
