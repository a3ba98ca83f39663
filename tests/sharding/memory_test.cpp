/// Bytes held and sent by every strategy against the formulas of the ZeRO paper, padding included.
#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <vector>

#include "autograd_lite/losses.h"
#include "autograd_lite/nn/layers.h"
#include "comm/core/integer_math.h"
#include "sharding/model/runtime.h"
#include "sharding/optim/optimizers.h"
#include "sharding/strategy/strategy.h"
#include "tests/lab/group.h"
#include "tests/support/toy_model.h"

namespace rz {
namespace {

using test::ToyModel;

float one(std::size_t, std::size_t) { return 1; }

/// Three updates, with `micro_batches` passes each of which only the last synchronises.
void train(Strategy& strategy, ToyModel& model, int micro_batches = 1) {
  Tape tape;
  strategy.attach(tape);
  const auto adamw = make_adamw({});
  for (int step = 0; step < 3; ++step) {
    strategy.zero_grad();
    for (int m = 1; m <= micro_batches; ++m) {
      const Var loss = model.loss(tape, one);
      strategy.begin_backward(m == micro_batches);
      tape.backward(loss);
      tape.reset();
    }
    strategy.finish_gradients();
    strategy.step(*adamw);
  }
}

/// Elements with padding, of the trainable parameters in buckets of unlimited size, and of the frozen one.
struct Sizes {
  std::size_t bucket = 0, frozen = 0;
};
Sizes sizes(ToyModel& model, std::size_t ranks) {
  Sizes s;
  for (const Parameter* p : model.parameters())
    (p->requires_grad ? s.bucket : s.frozen) += p->requires_grad ? round_up(p->count(), 64) : p->count();
  s.bucket = round_up(s.bucket, 64 * ranks);
  return s;
}

/// Flat parameters of zero3 by hand: parameters that stand in the same scopes, trainable and frozen apart.
std::map<std::string, std::size_t> units(ToyModel& model, std::size_t ranks) {
  const std::map<std::string, std::vector<const char*>> grouped{
      {"tied", {"tied"}},
      {"position", {"position"}},
      {"first", {"first.weight", "first.bias", "never"}},
      {"frozen", {"frozen"}},
      {"second", {"sometimes", "second.weight"}},
      {"norm", {"norm"}}};
  std::map<std::string, std::size_t> out;
  for (const auto& [unit, names] : grouped) {
    for (const char* name : names) out[unit] += round_up(model[model.index(name)].count(), 64);
    out[unit] = round_up(out[unit], 64 * ranks);
  }
  return out;
}

class Memory : public testing::TestWithParam<int> {
 protected:
  /// Runs `check` on every rank after three updates of AdamW.
  void after_training(StrategyKind kind, const std::function<void(ToyModel&, const MemoryReport&)>& check,
                      int micro_batches = 1) {
    lab::group(GetParam(), [&](Communicator& comm) {
      ToyModel model(one);
      const auto strategy = make_strategy(kind, model, comm);
      EXPECT_EQ(strategy->memory().optimizer_state, 0u);
      train(*strategy, model, micro_batches);
      check(model, strategy->memory());
      EXPECT_GT(strategy->exposed_seconds(), 0);
    });
  }
  std::size_t ranks() const { return static_cast<std::size_t>(GetParam()); }
};
INSTANTIATE_TEST_SUITE_P(Ranks, Memory, testing::Values(1, 2, 3, 4));

TEST_P(Memory, Ddp) {
  after_training(StrategyKind::ddp, [&](ToyModel& model, const MemoryReport& r) {
    const Sizes s = sizes(model, ranks());
    EXPECT_EQ(r.parameters, 4 * s.bucket + 4 * s.frozen);
    EXPECT_EQ(r.gradients, 4 * s.bucket);
    EXPECT_EQ(r.optimizer_state, 8 * s.bucket);
    EXPECT_EQ(r.transient, 0u);
    EXPECT_EQ(r.total(), 16 * s.bucket + 4 * s.frozen);
  });
}

TEST_P(Memory, Zero1) {
  after_training(StrategyKind::zero1, [&](ToyModel& model, const MemoryReport& r) {
    const Sizes s = sizes(model, ranks());
    EXPECT_EQ(r.parameters, 4 * s.bucket + 4 * s.frozen);
    EXPECT_EQ(r.gradients, 4 * s.bucket);
    EXPECT_EQ(r.optimizer_state, 8 * s.bucket / ranks());
    EXPECT_EQ(r.transient, 0u);
  });
}

TEST_P(Memory, Zero2) {
  after_training(StrategyKind::zero2, [&](ToyModel& model, const MemoryReport& r) {
    const Sizes s = sizes(model, ranks());
    EXPECT_EQ(r.parameters, 4 * s.bucket + 4 * s.frozen);
    EXPECT_EQ(r.gradients, 4 * s.bucket / ranks());
    EXPECT_EQ(r.optimizer_state, 8 * s.bucket / ranks());
    EXPECT_EQ(r.transient_in_use, 0u);
    EXPECT_EQ(r.transient_peak, 4 * s.bucket);  // all is one bucket here
  });
}

TEST_P(Memory, Zero3) {
  after_training(StrategyKind::zero3, [&](ToyModel& model, const MemoryReport& r) {
    std::size_t all = 0;
    for (const auto& [name, elements] : units(model, ranks())) all += elements;
    const std::size_t frozen = units(model, ranks())["frozen"];
    EXPECT_EQ(r.parameters, 4 * all / ranks());
    EXPECT_EQ(r.gradients, 4 * (all - frozen) / ranks());
    EXPECT_EQ(r.optimizer_state, 8 * (all - frozen) / ranks());
    EXPECT_EQ(r.transient_in_use, 0u);
  });
}

TEST_P(Memory, Zero3NeverGathersMoreThanTheTwoLargestScopes) {
  lab::group(GetParam(), [&](Communicator& comm) {
    ToyModel model(one);
    const auto strategy = make_strategy(StrategyKind::zero3, model, comm);
    Tape tape;
    strategy->attach(tape);
    const Tape::NoGrad no_grad(tape);
    for (int i = 0; i < 3; ++i) model.loss(tape, one), tape.reset();
    auto u = units(model, ranks());
    std::vector<std::size_t> scopes{u["tied"] + u["position"], u["first"] + u["frozen"], u["second"],
                                    u["norm"] + u["tied"]};
    std::sort(scopes.rbegin(), scopes.rend());
    EXPECT_LE(strategy->memory().transient_peak, 4 * (scopes[0] + scopes[1]));
    // Small flat parameters may use large free blocks: held memory exceeds used memory, but within a bound.
    EXPECT_LE(strategy->memory().transient, 2 * 4 * (scopes[0] + scopes[1]));
  });
}

/// Without overlap a bucket is released before the next one is filled. "tied" is used by the first and the
/// last scope, so that its bucket is filled all the time.
TEST_P(Memory, WithoutOverlapZero2HoldsTheBucketThatIsFilled) {
  lab::group(GetParam(), [&](Communicator& comm) {
    ToyModel model(one);
    model[model.index("never")].requires_grad =
        false;  // a parameter that no loss reaches delays the buckets behind it
    const auto strategy =
        make_strategy(StrategyKind::zero2, model, comm,
                      {.reduce_bucket_size = 1, .first_bucket_size = 1, .overlap_comm = false});
    train(*strategy, model);
    const auto bucket = [&](const char* name) {
      return 4 * round_up(model[model.index(name)].count(), 64 * ranks());
    };
    EXPECT_EQ(strategy->memory().transient_peak, bucket("tied") + bucket("first.weight"));
  });
}

TEST_P(Memory, LocalAccumulationHoldsWholeGradientsUntilTheyAreReduced) {
  lab::group(GetParam(), [&](Communicator& comm) {
    ToyModel model(one);
    const auto strategy = make_strategy(StrategyKind::zero2, model, comm);
    Tape tape;
    strategy->attach(tape);
    for (const bool synchronise : {false, true}) {
      const Var loss = model.loss(tape, one);
      strategy->begin_backward(synchronise);
      tape.backward(loss);
      tape.reset();
      const std::size_t whole = 4 * sizes(model, ranks()).bucket;
      if (!synchronise) {
        EXPECT_EQ(strategy->memory().transient_in_use, whole);
      }
    }
    strategy->finish_gradients();
    EXPECT_EQ(strategy->memory().transient_in_use, 0u);
  });
}

/// Of 2 M parameters, whose gradients would fit into one bucket of 25 MiB.
struct Layers : Module {
  Var operator()(Tape& t, Var x) {
    for (nn::Linear& layer : layers) x = nn::gelu(t, layer(t, x));
    return x;
  }
  static constexpr std::size_t width = 512;
  nn::Linear layers[8] = {{*this, "0", width, width}, {*this, "1", width, width}, {*this, "2", width, width},
                          {*this, "3", width, width}, {*this, "4", width, width}, {*this, "5", width, width},
                          {*this, "6", width, width}, {*this, "7", width, width}};
};

/// With buckets of the default size.
TEST_P(Memory, AStageHoldsLessThanTheOneBefore) {
  if (GetParam() == 1) GTEST_SKIP() << "one rank holds all";
  lab::group(GetParam(), [&](Communicator& comm) {
    const auto held = [&](StrategyKind kind) {
      Layers model;
      const auto strategy = make_strategy(kind, model, comm, {.overlap_comm = false});
      strategy->values().fill(
          [](const Parameter&, Range e, float* out) { std::fill_n(out, e.count(), 0.5f); });
      Tape tape;
      strategy->attach(tape);
      const auto adamw = make_adamw({});
      for (int update = 0; update < 2; ++update) {
        strategy->zero_grad();
        const Tensor x = Tensor::zeros({1, Layers::width});
        const nn::Loss loss = nn::squared_error(tape, model(tape, tape.constant(x)), x);
        strategy->backward(tape, loss);
        tape.reset();
        strategy->finish_gradients();
        strategy->clip_and_step(*adamw, {});
      }
      return strategy->memory().total();
    };
    const std::size_t one = held(StrategyKind::zero1), two = held(StrategyKind::zero2);
    EXPECT_LT(one, held(StrategyKind::ddp));
    EXPECT_LT(two, one);
    EXPECT_LT(held(StrategyKind::zero3), two);
  });
}

// ---- bytes sent

/// Of one update after others.
Traffic traffic_of_update(StrategyKind kind, Communicator& comm, ToyModel& model,
                          const StrategyOptions& options, int micro_batches = 1) {
  const auto strategy = make_strategy(kind, model, comm, options);
  train(*strategy, model, micro_batches);
  const Traffic three = strategy->traffic().total();
  train(*strategy, model, micro_batches);
  const auto difference = [](const CallCount& six, const CallCount& three) {
    return CallCount{(six.calls - three.calls) / 3, (six.bytes - three.bytes) / 3};
  };
  const Traffic six = strategy->traffic().total();
  return {difference(six.all_reduce, three.all_reduce), difference(six.reduce_scatter, three.reduce_scatter),
          difference(six.all_gather, three.all_gather)};
}

TEST_P(Memory, BytesSentAreThoseOfThePlan) {
  lab::group(GetParam(), [&](Communicator& comm) {
    ToyModel sized(one);
    const std::size_t all = 4 * sizes(sized, ranks()).bucket, n = ranks();
    for (const int micro_batches : {1, 3}) {  // which do not communicate
      ToyModel ddp(one), zero1(one), zero2(one);
      const Traffic of_ddp = traffic_of_update(StrategyKind::ddp, comm, ddp, {}, micro_batches);
      EXPECT_EQ(of_ddp, (Traffic{.all_reduce = {1, all}}));
      EXPECT_EQ(of_ddp.sent(GetParam()), 2 * all / n * (n - 1));
      const Traffic sharded{.reduce_scatter = {1, all}, .all_gather = {1, all}};
      EXPECT_EQ(traffic_of_update(StrategyKind::zero1, comm, zero1, {}, micro_batches), sharded);
      EXPECT_EQ(traffic_of_update(StrategyKind::zero2, comm, zero2, {}, micro_batches), sharded);
      EXPECT_EQ(sharded.sent(GetParam()), of_ddp.sent(GetParam())) << "as much as ddp";
    }
  });
}

TEST_P(Memory, BytesSentByZero3CountEveryGather) {
  lab::group(GetParam(), [&](Communicator& comm) {
    ToyModel again(one), kept(one), persistent(one);
    auto u = units(again, ranks());
    const std::size_t trained = u["tied"] + u["position"] + u["first"] + u["second"] + u["norm"];
    const std::size_t pass = trained + u["frozen"] + u["tied"];  // "tied" in two scopes
    const CallCount reduced{5, 4 * trained};
    EXPECT_EQ(traffic_of_update(StrategyKind::zero3, comm, again, {.gathers = {.prefetch_bucket_size = 0}}),
              (Traffic{.reduce_scatter = reduced, .all_gather = {14, 2 * 4 * pass}}))
        << "forward and backward";
    EXPECT_EQ(traffic_of_update(StrategyKind::zero3, comm, kept,
                                {.gathers = {.max_reuse_distance = GatherLimits::none}}),
              (Traffic{.reduce_scatter = reduced, .all_gather = {6, 4 * (trained + u["frozen"])}}))
        << "once";
    EXPECT_EQ(traffic_of_update(StrategyKind::zero3, comm, persistent,
                                {.gathers = {.param_persistence_threshold = 1000}}),
              (Traffic{.reduce_scatter = reduced, .all_gather = {5, 4 * trained}}))
        << "after the update";
  });
}

TEST(MemoryReport, ReadsAsOneLine) {
  EXPECT_EQ(describe({.parameters = 1536, .gradients = 512, .transient = 1024, .transient_peak = 2048}),
            "parameters 1.5 KiB, gradients 512 B, optimizer state 0 B, transient 1 KiB (peak 2 KiB)");
}

// ---- the pool below it

TEST(TransientMemory, UsesBlocksAgainAndDropsThoseThatAreTooSmall) {
  TransientMemory memory(allocate_host);
  Tensor small = memory.allocate({100});
  Tensor large = memory.allocate({1000});
  EXPECT_EQ(memory.in_use(), 4400u);
  std::byte* const place = large.raw();
  large = {};
  EXPECT_EQ(memory.in_use(), 400u);
  EXPECT_EQ(memory.held(), 4400u);
  large = memory.allocate({900});  // fits into released memory
  EXPECT_EQ(large.raw(), place);
  EXPECT_EQ(memory.in_use(), 4000u);
  small = {};
  small = memory.allocate({200});  // 100 is too small and is freed
  EXPECT_EQ(memory.held(), 4800u);
  EXPECT_EQ(memory.peak(), 4400u);
  EXPECT_EQ(memory.allocations(), 3u);
  small = {}, large = {};
  small = memory.allocate({100});  // 200 suffices
  EXPECT_EQ(memory.allocations(), 3u);
}

TEST(TransientMemory, TensorsMayOutliveIt) {
  Tensor t;
  {
    TransientMemory memory(allocate_host);
    t = memory.allocate({10});
  }
  t.data<float>()[9] = 1;
  EXPECT_EQ(t.data<float>()[9], 1);
}

TEST(TransientMemory, ConvergesToTheLargestConcurrentSet) {
  TransientMemory memory(allocate_host);
  const auto round = [&] {
    Tensor before;
    for (const std::size_t n : {10, 20, 300, 40, 500, 60, 500, 40, 300, 20, 10})
      before = memory.allocate({n});
  };
  for (int i = 0; i < 3; ++i) round();
  const std::size_t allocations = memory.allocations();
  for (int i = 0; i < 3; ++i) round();
  EXPECT_EQ(memory.allocations(), allocations);
  EXPECT_LE(memory.held(), 4u * 2 * 500);
}

/// Small blocks in use keep large ones from being released, and the reverse. A step that is repeated must
/// find its blocks again, before it may be captured in a graph of a device.
TEST(TransientMemory, AStepThatIsRepeatedStopsAllocating) {
  TransientMemory memory(Allocator(allocate_host, {Device::cuda, 0}));
  constexpr std::size_t small = 64, large = 8 * small;
  const auto step = [&] {
    std::vector<Tensor> s;
    for (int i = 0; i < 4; ++i) s.push_back(memory.allocate({small}));
    Tensor first = memory.allocate({large});
    s.push_back(memory.allocate({small}));
    s.erase(s.begin(), s.begin() + 2);
    const Tensor second = memory.allocate({large});
    first = {};
  };
  for (int i = 0; i < 2; ++i) step();
  const std::size_t allocations = memory.allocations();
  for (int i = 0; i < 6; ++i) step();
  EXPECT_EQ(memory.allocations(), allocations);
  EXPECT_EQ(memory.peak(), 19 * 4 * small);
  EXPECT_EQ(memory.held(), 21 * 4 * small);
}

}  // namespace
}  // namespace rz
