/// Tiles of updates, and offload on the host, where all is in host memory already: the same bits, and the
/// same memory. tests/gpu/offload_test.cpp has offload on devices.
#include <gtest/gtest.h>

#include <map>
#include <mutex>

#include "sharding/optim/optimizers.h"
#include "sharding/strategy/optimizer_state.h"
#include "sharding/strategy/strategy.h"
#include "tests/lab/training.h"
#include "tests/support/error_of.h"
#include "tests/support/toy_training.h"

namespace rz {
namespace {

using test::kinds;
using test::ToyModel;

constexpr OffloadOptions to_host{.device = OffloadDevice::cpu};

void update(Strategy& strategy, ToyModel& model, Tape& tape, Optimizer& optimizer, int step) {
  strategy.zero_grad();
  strategy.begin_backward();
  tape.backward(model.loss(tape, [&](std::size_t p, std::size_t i) {
    return 0.01f * static_cast<float>((p * 7 + i * 3 + static_cast<std::size_t>(step)) % 11) - 0.03f;
  }));
  tape.reset();
  strategy.finish_gradients();
  strategy.step(optimizer);
}

/// Values and states after three updates, by name and first element, of all ranks.
using Elements = std::map<std::string, std::vector<float>>;
using Make = std::function<std::unique_ptr<Optimizer>()>;

Elements train(int ranks, StrategyKind kind, const StrategyOptions& options, const Make& make) {
  Elements out;
  std::mutex mutex;
  lab::group(ranks, [&](Communicator& comm) {
    ToyModel model(test::initial_value);
    const auto strategy = make_strategy(kind, model, comm, options);
    Tape tape;
    strategy->attach(tape);
    const auto optimizer = make();
    for (int step = 0; step < 3; ++step) update(*strategy, model, tape, *optimizer, step);
    const std::lock_guard lock(mutex);
    const auto keep = [&](const std::string& what, const Parameter& p, Range r, const float* x) {
      for (std::size_t i = r.begin; i < r.end; ++i) {
        auto& values = out[what + " of " + p.name];
        values.resize(p.count());
        values[i] = x[i - r.begin];
      }
    };
    strategy->values().visit_owned(
        [&](const Parameter& p, Range r, const float* x) { keep("value", p, r, x); });
    strategy->optimizer_state().visit(
        [&](const std::string& state, const Parameter& p, Range r, const float* x) { keep(state, p, r, x); });
  });
  return out;
}

class Tiles : public testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Ranks, Tiles, testing::Values(1, 2, 3, 4));

TEST_P(Tiles, DoNotChangeResults) {
  const Make makes[] = {
      [] { return make_adamw({.learning_rate = 0.01, .weight_decay = 0.1}); },
      [] { return make_lamb({.learning_rate = 0.01, .weight_decay = 0.1}); },
      [] { return make_muon({}); },
  };
  for (const Make& make : makes) {
    const Elements expected = train(GetParam(), StrategyKind::ddp, {.rebuild = false}, make);
    for (const StrategyKind kind : kinds)
      for (const std::size_t size : {1u, 64u, 200u, 1u << 30})
        EXPECT_EQ(train(GetParam(), kind, {.sub_group_size = size}, make), expected)
            << make()->name() << " " << name(kind) << " " << size;
  }
}

TEST(SubGroups, DoNotChangeResultsInMixedPrecision) {
  const auto trace = [](StrategyKind kind, std::size_t size) {
    return lab::train(
        {.model = lab::gpt(),
         .strategy = kind,
         .ranks = 2,
         .updates = 4,
         .keys =
             concat(R"("bf16": {"enabled": true}, "zero_optimization": {"sub_group_size": )", size, "}")});
  };
  const lab::Trace expected = trace(StrategyKind::ddp, 1 << 30);
  for (const lm::UpdateReport& r : expected.updates) EXPECT_FALSE(r.skipped) << "update " << r.step;
  for (const StrategyKind kind : kinds)
    for (const std::size_t size : {64, 320})
      EXPECT_EQ(trace(kind, size), expected) << name(kind) << " " << size;
}

/// Does nothing, and notes the elements of each call.
class Counting final : public Optimizer {
 public:
  Counting() : Optimizer({{"all", {}, 0}}) {}
  const char* name() const override { return "counting"; }
  std::vector<StateSpec> states(int) const override { return {}; }
  void update(std::span<const UpdateSpan> spans, const UpdateScale&, const Stream&) const override {
    calls.emplace_back();
    for (const UpdateSpan& s : spans) calls.back() += s.count;
  }
  std::vector<std::byte> constants(std::int64_t) const override { return {}; }
  mutable std::vector<std::size_t> calls;

 protected:
  std::string describe_group(int) const override { return ""; }
};

/// 64 + 64 + 192 + 64 + 64 + 128 + 192 + 64 elements with padding; a loss does not reach the 64 of "never",
/// between 192 + 64 and 128.
TEST(SubGroups, HaveTheElementsOfASubGroup) {
  auto comm = Communicator::connect(0, 1, memory_store());
  const auto calls = [&](std::size_t size) {
    ToyModel model(test::initial_value);
    const auto strategy =
        make_strategy(StrategyKind::zero1, model, comm,
                      {.sub_group_size = size, .unused_parameters = UnusedParameterPolicy::deepspeed});
    Tape tape;
    strategy->attach(tape);
    Counting optimizer;
    update(*strategy, model, tape, optimizer, 0);
    return optimizer.calls;
  };
  EXPECT_EQ(calls(1 << 30), (std::vector<std::size_t>{832}));
  EXPECT_EQ(calls(400), (std::vector<std::size_t>{384, 384, 64})) << "rounded down to a multiple of 64";
  EXPECT_EQ(calls(0), std::vector<std::size_t>(13, 64)) << "at least 64";
}

TEST(OffloadOnTheHost, HasNoEffect) {
  auto comm = Communicator::connect(0, 1, memory_store());
  const auto memory = [&](StrategyOptions options) {
    options.overlap_comm = false;  // the peak of transient memory depends on when overlapped reductions end
    ToyModel model(test::initial_value);
    const auto strategy = make_strategy(StrategyKind::zero3, model, comm, options);
    Tape tape;
    strategy->attach(tape);
    const auto adamw = make_adamw({});
    update(*strategy, model, tape, *adamw, 0);
    return strategy->memory();
  };
  MemoryReport expected = memory({});
  EXPECT_EQ(expected.offloaded, OffloadedMemory{});
  EXPECT_EQ(describe(expected).find("host"), std::string::npos);
  expected.offload_has_no_effect = true;
  const MemoryReport offloaded = memory({.offload_optimizer = to_host, .offload_param = to_host});
  EXPECT_EQ(offloaded, expected);
  EXPECT_NE(describe(offloaded).find("; offload has no effect: all is in host memory already"),
            std::string::npos)
      << describe(offloaded);
}

TEST(OffloadOnTheHost, TheSameBits) {
  const Make adamw = [] { return make_adamw({}); };
  EXPECT_EQ(train(2, StrategyKind::zero3, {.offload_optimizer = to_host, .offload_param = to_host}, adamw),
            train(2, StrategyKind::zero3, {}, adamw));
}

TEST(Offload, IsDescribedInItsPlace) {
  EXPECT_EQ(describe({.parameters = 1024, .offloaded = {.masters = 2048, .optimizer_state = 4096}}),
            "parameters 1 KiB, gradients 0 B, optimizer state 0 B, transient 0 B (peak 0 B); in host memory: "
            "masters 2 KiB, optimizer state 4 KiB");
}

TEST(Offload, NeedsAPlanThatShards) {
  auto comm = Communicator::connect(0, 1, memory_store());
  ToyModel model(test::initial_value);
  const auto refused = [&](StrategyKind kind, const StrategyOptions& options, const std::string& part) {
    const Error e = test::error_of([&] { make_strategy(kind, model, comm, options); });
    EXPECT_EQ(e.code(), Errc::invalid_argument);
    EXPECT_NE(std::string(e.what()).find(part), std::string::npos) << e.what();
  };
  refused(StrategyKind::ddp, {.offload_optimizer = to_host}, "choose zero1, zero2 or zero3");
  refused(StrategyKind::zero2, {.offload_param = to_host}, "choose zero3");
  refused(StrategyKind::zero3, {.offload_optimizer = {.device = OffloadDevice::cpu, .ratio = 1.5}},
          "offload_optimizer: ratio is 1.5, expected 0 to 1");
}

TEST(Offload, MustBeTheSameOnAllRanks) {
  const std::pair<StrategyOptions, const char*> others[] = {
      {{.sub_group_size = 64}, "sub_group_size"},
      {{.offload_optimizer = to_host}, "offload_optimizer.device"},
      {{.offload_param = {.pin_memory = false}}, "offload_param.pin_memory"},
  };
  for (const auto& other : others)
    lab::group(2, [&](Communicator& comm) {
      ToyModel model(test::initial_value);
      const Error e = test::error_of([&] {
        make_strategy(StrategyKind::zero3, model, comm, comm.rank() == 1 ? other.first : StrategyOptions{});
      });
      EXPECT_EQ(e.code(), Errc::mismatch);
      EXPECT_NE(std::string(e.what()).find(other.second), std::string::npos) << e.what();
    });
}

}  // namespace
}  // namespace rz
