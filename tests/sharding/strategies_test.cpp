/// Every strategy against one process that sees the whole batch, on exact data: no tolerance.
#include <gtest/gtest.h>

#include <array>
#include <atomic>
#include <chrono>
#include <cmath>
#include <random>
#include <thread>

#include "comm/core/error.h"
#include "sharding/optim/optimizers.h"
#include "sharding/parallel/rank_consistency.h"
#include "sharding/strategy/pass_rules.h"
#include "sharding/strategy/pass_state.h"
#include "sharding/strategy/sharding_plan.h"
#include "sharding/strategy/strategy.h"
#include "tests/lab/training.h"
#include "tests/support/error_of.h"
#include "tests/support/toy_training.h"

namespace rz {
namespace {

using test::datum;
using test::initial_value;
using test::kinds;
using test::Replica;
using test::ToyModel;
using test::values_of;

constexpr int steps = 3;

bool uses_sometimes(int rank, int step) { return (rank + step) % 2 == 0; }

/// The result of one process after `steps` updates with SGD, in double, where all of it is exact.
struct Reference {
  std::vector<std::vector<double>> values;
  std::vector<double> losses, norms;
};
Reference reference(int ranks, int micro_batches) {
  Reference ref;
  ToyModel model(initial_value);
  for (const Parameter* p : model.parameters())
    ref.values.emplace_back(p->value.data<float>(), p->value.data<float>() + p->count());
  for (int step = 0; step < steps; ++step) {
    double loss = 0, square = 0;
    for (std::size_t p = 0; p < ref.values.size(); ++p) {
      const Parameter& parameter = model[p];
      if (parameter.name == "never") continue;
      const double factor = parameter.name == "tied" ? 3 : 1;
      for (std::size_t i = 0; i < ref.values[p].size(); ++i) {
        double x = 0;
        for (int r = 0; r < ranks; ++r)
          for (int m = 0; m < micro_batches; ++m)
            if (parameter.name != "sometimes" || uses_sometimes(r, step))
              x += factor * datum(p, i, r * micro_batches + m, step);
        x /= ranks * micro_batches;
        double& w = ref.values[p][i];
        loss += 0.5 * x * w * w;
        if (!parameter.requires_grad) continue;
        square += x * w * x * w;
        w -= x * w / 64;
      }
    }
    ref.losses.push_back(loss);
    ref.norms.push_back(std::sqrt(square));
  }
  return ref;
}

struct Run {
  int ranks = 1, micro_batches = 1;
  bool synchronise_always = false;
  StrategyOptions options{};
  MeshSizes mesh{};
};

/// Trains on one rank and checks it against the reference.
void train(StrategyKind kind, const Run& run, Communicator& comm, const Reference& ref) {
  const Mesh mesh(comm, run.mesh);
  const int rank = mesh.data().rank(), ranks = mesh.data().size();
  ToyModel model([&](std::size_t p, std::size_t i) { return rank == 0 ? initial_value(p, i) : -77; },
                 mesh.part());
  Tape tape;
  const auto strategy = make_strategy(kind, model, mesh, run.options);
  strategy->attach(tape);
  const auto sgd = make_sgd({.learning_rate = 1.0 / 64});
  for (int step = 0; step < steps; ++step) {
    strategy->zero_grad();
    double loss = 0;
    for (int m = 0; m < run.micro_batches; ++m) {
      const int sample = rank * run.micro_batches + m;
      const Var l = model.loss(
          tape, [&](std::size_t p, std::size_t i) { return datum(p, i, sample, step); },
          uses_sometimes(rank, step));
      loss += *tape.value(l).data<float>();
      strategy->begin_backward(run.synchronise_always || m + 1 == run.micro_batches);
      tape.backward(l, 1.0f / static_cast<float>(run.micro_batches));
      tape.reset();
      if (run.synchronise_always) strategy->finish_gradients();
    }
    if (!run.synchronise_always) strategy->finish_gradients();
    mesh.data().all_reduce(Buffer(&loss, 1)).wait();
    if (!mesh.tp()) {
      ASSERT_EQ(loss / (ranks * run.micro_batches), ref.losses[static_cast<std::size_t>(step)])
          << "step " << step;
    }
    ASSERT_EQ(strategy->gradient_norm(), ref.norms[static_cast<std::size_t>(step)]) << "step " << step;
    strategy->step(*sgd);
  }
  const auto parameters = model.parameters();
  for (std::size_t p = 0; p < parameters.size(); ++p) {
    const Tensor value = strategy->values().whole(*parameters[p]);
    ASSERT_EQ(value.shape(), parameters[p]->global_shape());
    for (std::size_t i = 0; i < value.count(); ++i)
      ASSERT_EQ(value.data<float>()[i], ref.values[p][i]) << parameters[p]->name << '[' << i << ']';
  }
}

void expect_like_one_process(const Run& run) {
  const Reference ref = reference(run.ranks / run.mesh.tp, run.micro_batches);
  for (const StrategyKind kind : kinds)
    lab::group(run.ranks, [&](Communicator& comm) {
      SCOPED_TRACE(concat(name(kind), " on rank ", comm.rank(), " of ", run.ranks, ", ", describe(run.mesh)));
      train(kind, run, comm, ref);
    });
}

/// Two-step sums, values and state divided within each copy of the model.
class Hybrid : public testing::TestWithParam<MeshSizes> {};
INSTANTIATE_TEST_SUITE_P(Meshes, Hybrid,
                         testing::Values(MeshSizes{2, 2}, MeshSizes{1, 4}, MeshSizes{4, 1}, MeshSizes{2, 3},
                                         MeshSizes{3, 2}, MeshSizes{1, 2, 2}, MeshSizes{2, 1, 2},
                                         MeshSizes{1, 1, 3}, MeshSizes{2, 2, 2}),
                         [](const auto& test) {
                           return concat("replicate", test.param.replicate, "shard", test.param.shard, "tp",
                                         test.param.tp);
                         });

TEST_P(Hybrid, TrainsLikeOneProcess) {
  const MeshSizes mesh = GetParam();
  const int n = mesh.ranks();
  expect_like_one_process({.ranks = n, .mesh = mesh});
  expect_like_one_process({.ranks = n, .micro_batches = 2, .mesh = mesh});
  for (const bool overlap : {true, false})
    expect_like_one_process(
        {.ranks = n,
         .micro_batches = 2,
         .synchronise_always = true,
         .options = {.reduce_bucket_size = 150, .first_bucket_size = 64, .overlap_comm = overlap},
         .mesh = mesh});
  expect_like_one_process(
      {.ranks = n, .options = {.gathers = {.param_persistence_threshold = 70}}, .mesh = mesh});
}

class Strategies : public testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Ranks, Strategies, testing::Values(1, 2, 3, 4));

TEST_P(Strategies, TrainLikeOneProcess) { expect_like_one_process({.ranks = GetParam()}); }

TEST_P(Strategies, SmallBucketsAndNoOverlap) {
  expect_like_one_process(
      {.ranks = GetParam(), .options = {.reduce_bucket_size = 150, .first_bucket_size = 64}});
  expect_like_one_process(
      {.ranks = GetParam(),
       .options = {.reduce_bucket_size = 150, .first_bucket_size = 64, .overlap_comm = false}});
}

TEST_P(Strategies, AccumulationWithoutSynchronisingIsExact) {
  expect_like_one_process({.ranks = GetParam(), .micro_batches = 4});
}

TEST_P(Strategies, AccumulationThatSynchronisesEachTimeIsExact) {
  expect_like_one_process({.ranks = GetParam(), .micro_batches = 4, .synchronise_always = true});
}

TEST_P(Strategies, PersistenceReuseAndLiveParametersDoNotMatter) {
  for (const GatherLimits& limits :
       {GatherLimits{.param_persistence_threshold = 70}, GatherLimits{.param_persistence_threshold = 1000},
        GatherLimits{.param_persistence_threshold = 70, .model_persistence_threshold = 100},
        GatherLimits{.prefetch_bucket_size = 1000, .max_reuse_distance = GatherLimits::none},
        GatherLimits{.max_live_parameters = 200, .max_reuse_distance = 1000}})
    expect_like_one_process({.ranks = GetParam(), .micro_batches = 2, .options = {.gathers = limits}});
}

TEST_P(Strategies, PrefetchDoesNotMatter) {
  for (const std::size_t elements : {0, 200, 10'000})
    expect_like_one_process(
        {.ranks = GetParam(), .options = {.gathers = {.prefetch_bucket_size = elements}}});
}

// ---- the same bits, on data where every rounding shows

struct Outcome {
  std::vector<float> values;
  std::vector<double> losses, norms;
  bool operator==(const Outcome&) const = default;
};

using Make = std::function<std::unique_ptr<Strategy>(Module&)>;

Outcome train_on_random_data(Communicator& comm, const Make& make) {
  const auto noise = [](std::size_t p, std::size_t i, int seed) {
    std::minstd_rand random(
        static_cast<unsigned>(p * 1000 + i + static_cast<std::size_t>(seed) * 100000 + 1));
    random.discard(3);
    return static_cast<float>(random()) / 1e9f - 1;
  };
  ToyModel model([&](std::size_t p, std::size_t i) { return noise(p, i, 99); });
  Tape tape;
  const auto strategy = make(model);
  strategy->attach(tape);
  const auto adamw = make_adamw(matrices_and_rest(AdamOptions{.learning_rate = 0.05, .weight_decay = 0.1}));
  Outcome out;
  for (int step = 0; step < 4; ++step) {
    strategy->zero_grad();
    const Var loss = model.loss(
        tape, [&](std::size_t p, std::size_t i) { return noise(p, i, step * 8 + comm.rank()); },
        uses_sometimes(comm.rank(), step));
    out.losses.push_back(*tape.value(loss).data<float>());
    strategy->begin_backward();
    tape.backward(loss);
    tape.reset();
    strategy->finish_gradients();
    out.norms.push_back(strategy->clip_gradients(0.3));
    strategy->step(*adamw);
  }
  out.values = lab::values_of(*strategy, model);
  return out;
}

Outcome train_on_random_data(StrategyKind kind, Communicator& comm, const StrategyOptions& options) {
  return train_on_random_data(comm, [&](Module& model) { return make_strategy(kind, model, comm, options); });
}

TEST_P(Strategies, HaveTheSameBitsForEveryStrategyBucketSizeAndOverlap) {
  lab::group(GetParam(), [&](Communicator& comm) {
    const Outcome expected = train_on_random_data(StrategyKind::ddp, comm, {});
    EXPECT_GT(expected.norms[0], 0.3);  // so that clipping applies
    for (const StrategyKind kind : kinds)
      for (const StrategyOptions& options :
           {StrategyOptions{}, StrategyOptions{.reduce_bucket_size = 1, .first_bucket_size = 1},
            StrategyOptions{
                .reduce_bucket_size = 225, .first_bucket_size = 75, .overlap_comm = false, .rebuild = false}})
        EXPECT_TRUE(train_on_random_data(kind, comm, options) == expected)
            << name(kind) << " on rank " << comm.rank();
  });
}

// ---- plans

/// Values are sharded, and whole gradients are kept: a combination that is no kind.
constexpr ShardingPlan whole_gradients{.values = Placement::sharded, .state = Placement::sharded};

TEST_P(Strategies, APlanThatIsNoKindHasTheSameBits) {
  lab::group(GetParam(), [&](Communicator& comm) {
    ToyModel sharded(initial_value);
    const std::size_t all_gradients = static_cast<std::size_t>(GetParam()) *
                                      make_strategy(StrategyKind::zero3, sharded, comm)->memory().gradients;
    const Outcome planned = train_on_random_data(comm, [&](Module& model) {
      auto strategy =
          std::make_unique<Strategy>(StrategyKind::zero3, whole_gradients, model, comm, StrategyOptions{});
      EXPECT_EQ(strategy->memory().gradients, all_gradients);
      return strategy;
    });
    EXPECT_TRUE(planned == train_on_random_data(StrategyKind::ddp, comm, {})) << "on rank " << comm.rank();
  });
}

TEST(Strategy, KindsAreThePlansOfTheZeroPaper) {
  using enum Placement;
  EXPECT_EQ(plan_of(StrategyKind::ddp), (ShardingPlan{replicated, replicated, replicated}));
  EXPECT_EQ(plan_of(StrategyKind::zero1), (ShardingPlan{replicated, replicated, sharded}));
  EXPECT_EQ(plan_of(StrategyKind::zero2), (ShardingPlan{replicated, sharded, sharded}));
  EXPECT_EQ(plan_of(StrategyKind::zero3), (ShardingPlan{sharded, sharded, sharded}));
}

TEST(Strategy, APlanThatShardsMoreThanItsStateIsAnError) {
  using enum Placement;
  auto comm = Communicator::connect(0, 1, memory_store());
  ToyModel model(initial_value);
  for (const ShardingPlan& plan : {ShardingPlan{.values = sharded}, ShardingPlan{.gradients = sharded}}) {
    const Error e =
        test::error_of([&] { Strategy(StrategyKind::ddp, plan, model, comm, StrategyOptions{}); });
    EXPECT_EQ(e.code(), Errc::invalid_argument) << e.what();
  }
}

// ---- clipping and loss scale reach the update

/// The distance that one SGD update with rate 1 moves all parameters, and the reported norm.
struct Moved {
  double distance = 0, norm = 0;
  std::vector<float> values;
};
Moved update_clipped(StrategyKind kind, Communicator& comm, bool in_one, double max_norm, double loss_scale) {
  ToyModel model(initial_value);
  Tape tape;
  const auto strategy = make_strategy(kind, model, comm);
  strategy->attach(tape);
  strategy->settings().set_loss_scale(loss_scale);
  const auto sgd = make_sgd({.learning_rate = 1});
  const Var loss =
      model.loss(tape, [&](std::size_t p, std::size_t i) { return datum(p, i, comm.rank(), 0) / 16; });
  strategy->begin_backward();
  tape.backward(loss, static_cast<float>(loss_scale));
  tape.reset();
  strategy->finish_gradients();
  Moved out;
  if (in_one) {
    strategy->clip_and_step(*sgd, {.max_norm = max_norm});
    out.norm = strategy->outcome(*sgd).norm;
  } else {
    out.norm = max_norm > 0 ? strategy->clip_gradients(max_norm) : strategy->gradient_norm();
    strategy->step(*sgd);
  }
  const auto parameters = model.parameters();
  for (std::size_t p = 0; p < parameters.size(); ++p) {
    const Tensor value = strategy->values().whole(*parameters[p]);
    for (std::size_t i = 0; i < value.count(); ++i) {
      out.values.push_back(value.data<float>()[i]);
      out.distance += std::pow(out.values.back() - initial_value(p, i), 2);
    }
  }
  out.distance = std::sqrt(out.distance);
  return out;
}

TEST(Strategy, ClippingAndLossScaleReachTheUpdate) {
  constexpr double limit = 0.5;
  lab::group(2, [&](Communicator& comm) {
    for (const StrategyKind kind : kinds) {
      SCOPED_TRACE(concat(name(kind), " on rank ", comm.rank()));
      const Moved free = update_clipped(kind, comm, true, 0, 1),
                  clipped = update_clipped(kind, comm, true, limit, 1);
      ASSERT_GT(free.norm, 2 * limit);
      EXPECT_NEAR(free.distance, free.norm, 1e-5 * free.norm);
      EXPECT_NEAR(clipped.distance, limit, 1e-4 * limit);
      EXPECT_EQ(clipped.norm, free.norm) << "the norm before clipping";
      for (const bool in_one : {true, false})
        for (const double scale : {1.0, 4.0})
          for (const double max_norm : {0.0, limit}) {
            const Moved m = update_clipped(kind, comm, in_one, max_norm, scale);
            EXPECT_EQ(m.norm, free.norm) << in_one << ' ' << scale << ' ' << max_norm;
            EXPECT_EQ(m.values, (max_norm > 0 ? clipped : free).values)
                << in_one << ' ' << scale << ' ' << max_norm;
          }
    }
  });
}

// ---- streams and times

/// An update rule that records its streams.
class Watching final : public Optimizer {
 public:
  Watching() : Optimizer({{.name = "all", .learning_rate = 0}}) {}
  const char* name() const override { return "watching"; }
  std::string describe_group(int) const override { return "watching"; }
  std::vector<StateSpec> states(int) const override { return {}; }
  void update(std::span<const UpdateSpan>, const UpdateScale&, const Stream& s) const override {
    threads.push_back(s.threads());
  }
  std::vector<std::byte> constants(std::int64_t) const override { return {}; }
  mutable std::vector<int> threads;
};

TEST(Strategy, TheDefaultStreamIsTheTapes) {
  auto comm = Communicator::connect(0, 1, memory_store());
  ToyModel model(initial_value);
  const auto strategy = make_strategy(StrategyKind::ddp, model, comm);
  Tape tape(Stream::host(3));
  strategy->attach(tape);
  Watching watching;
  const auto update = [&](const Stream& stream) {
    strategy->zero_grad();
    strategy->begin_backward();
    tape.backward(model.loss(tape, [](std::size_t, std::size_t) { return 1.0f; }));
    tape.reset();
    strategy->finish_gradients(stream);
    strategy->step(watching, stream);
  };
  update({});
  update(Stream::host(2));
  EXPECT_EQ(watching.threads, (std::vector<int>{3, 2}));
}

TEST(Strategy, ASkippedUpdateReportsItsOwnExposedTime) {
  constexpr auto late = std::chrono::milliseconds(200);
  std::atomic<bool> waits = false;
  lab::group(2, [&](Communicator& comm) {
    const int rank = comm.rank();
    ToyModel model(initial_value);
    const auto strategy = make_strategy(StrategyKind::ddp, model, comm, {.rebuild = false});
    Tape tape;
    strategy->attach(tape);
    const auto sgd = make_sgd({});
    for (const bool overflows : {false, true, false}) {
      strategy->zero_grad();
      const Var loss = model.loss(tape, [&](std::size_t, std::size_t) { return overflows ? NAN : 1.0f; });
      strategy->begin_backward();
      if (overflows && rank == 0) {
        while (!waits) std::this_thread::yield();
        std::this_thread::sleep_for(late);
      }
      tape.backward(loss);
      tape.reset();
      if (overflows && rank == 1) waits = true;
      strategy->finish_gradients();
      strategy->clip_and_step(*sgd, {.skip_overflow = true});
      ASSERT_EQ(strategy->outcome(*sgd).skipped, overflows);
      if (overflows && rank == 1) {
        EXPECT_GE(strategy->exposed_seconds(), std::chrono::duration<double>(late).count() / 10);
      }
    }
  });
}

// ---- parameters that no loss reached

/// "sometimes" after updates that reach it or not, and "never", with weight decay everywhere.
struct Unused {
  std::vector<float> sometimes, never;
};
Unused train_unused(StrategyKind kind, Communicator& comm, UnusedParameterPolicy unreached,
                    const std::vector<bool>& reached) {
  ToyModel model(initial_value);
  const auto strategy =
      make_strategy(kind, model, comm,
                    {.reduce_bucket_size = 225, .first_bucket_size = 75, .unused_parameters = unreached});
  Tape tape;
  strategy->attach(tape);
  const auto adamw = make_adamw({.learning_rate = 0.1, .weight_decay = 0.1});
  for (const bool r : reached) {
    strategy->zero_grad();
    // One rank is enough to reach it.
    const Var loss = model.loss(
        tape, [](std::size_t p, std::size_t i) { return datum(p, i, 0, 0); }, r && comm.rank() == 0);
    strategy->begin_backward();
    tape.backward(loss);
    tape.reset();
    strategy->finish_gradients();
    strategy->clip_and_step(*adamw, {});
  }
  return {values_of(*strategy, model[model.index("sometimes")]),
          values_of(*strategy, model[model.index("never")])};
}

TEST_P(Strategies, AnUnusedParameterIsSkippedAsInPyTorch) {
  for (const StrategyKind kind : kinds)
    lab::group(GetParam(), [&](Communicator& comm) {
      SCOPED_TRACE(concat(name(kind), " on rank ", comm.rank()));
      const auto after = [&](const std::vector<bool>& reached) {
        return train_unused(kind, comm, UnusedParameterPolicy::pytorch, reached);
      };
      const Unused a = after({true, false, true, false}), b = after({true, true});
      EXPECT_EQ(a.sometimes, b.sometimes) << "updates that skip a parameter leave no trace in it";
      EXPECT_NE(a.sometimes, after({true}).sometimes);
      EXPECT_EQ(after({false, true}).sometimes, after({true}).sometimes)
          << "the first update corrects the bias";
      for (std::size_t i = 0; i < a.never.size(); ++i) ASSERT_EQ(a.never[i], initial_value(5, i));
    });
}

TEST_P(Strategies, AnUnusedParameterDecaysAsInDeepSpeed) {
  for (const StrategyKind kind : kinds)
    lab::group(GetParam(), [&](Communicator& comm) {
      SCOPED_TRACE(concat(name(kind), " on rank ", comm.rank()));
      const Unused a = train_unused(kind, comm, UnusedParameterPolicy::deepspeed, {true, false});
      for (std::size_t i = 0; i < a.never.size(); ++i)
        ASSERT_EQ(a.never[i], initial_value(5, i) * 0.99f * 0.99f);
    });
}

TEST(Replicas, BuffersAreBroadcast) {
  lab::group(3, [](Communicator& comm) {
    const Tensor mean = Tensor::zeros({300}), count = Tensor::zeros({1}, DType::i32);
    mean.data<float>()[299] = static_cast<float>(comm.rank());
    *count.data<std::int32_t>() = 7 * comm.rank();
    const std::vector<Tensor> buffers{mean, Tensor(), count, Tensor::zeros({0})};
    broadcast_buffers(buffers, comm, {}, 2);
    EXPECT_EQ(mean.data<float>()[299], 2);
    EXPECT_EQ(*count.data<std::int32_t>(), 14);
  });
}

TEST(PassRules, RanksAgreeOnUsedParameters) {
  lab::group(3, [](Communicator& comm) {
    const int rank = comm.rank();
    std::array<Parameter, 4> all;
    const std::array<Parameter*, 4> members{&all[0], &all[1], &all[2], &all[3]};
    const ModelParameters parameters(members);
    const ExposedTime exposed;
    PassState state(4, exposed);
    const StrategyOptions options;
    PassRules rules(options, state, parameters, comm);
    state.mark_used(rank);
    rules.begin_exchange();
    rules.wait();
    for (int m = 0; m < 4; ++m) EXPECT_EQ(rules.is_used(m), m < 3);
    EXPECT_TRUE(rules.values_need_check());
    rules.mark_values_checked();
    rules.reuse_last();  // a captured pass that reaches the same parameters
    state.mark_used(3);
    EXPECT_EQ(test::error_of([&] { rules.reuse_last(); }).code(), Errc::invalid_argument);
    state.reset();
    if (rank == 2) rules.mark_values_written();
    rules.begin_exchange();
    rules.wait();
    EXPECT_FALSE(rules.is_used(rank));
    EXPECT_TRUE(rules.values_need_check()) << "written on one rank";
  });
}

TEST(Strategy, NamesOfChoicesRoundTrip) {
  for (const UnusedParameterPolicy u : {UnusedParameterPolicy::pytorch, UnusedParameterPolicy::deepspeed})
    EXPECT_EQ(unused_parameter_policy_from_name(name(u)), u);
  EXPECT_THROW(unused_parameter_policy_from_name("jax"), Error);
}

TEST(Strategy, NamesRoundTrip) {
  for (const StrategyKind kind : kinds) EXPECT_EQ(strategy_from_name(name(kind)), kind);
  EXPECT_THROW(strategy_from_name("zero4"), Error);
}

// ---- parameters in and out

TEST(Strategy, AFullValueIsNewAfterAStepAndAFill) {
  for (const StrategyKind kind : kinds)
    lab::group(2, [&](Communicator& comm) {
      SCOPED_TRACE(name(kind));
      Replica r(kind, comm);
      const Parameter& p = r.model[r.model.index("second.weight")];
      const auto first = [&] { return *r.strategy->values().whole(p).data<float>(); };
      r.strategy->zero_grad();
      r.strategy->begin_backward();
      r.tape.backward(r.model.loss(r.tape, [](std::size_t, std::size_t) { return 1.0f; }));
      r.tape.reset();
      r.strategy->finish_gradients();
      const float before = first();
      r.strategy->step(*r.optimizer);
      EXPECT_NE(first(), before);
      r.fill("second.weight", 17);
      EXPECT_EQ(first(), 17);
    });
}

TEST_P(Strategies, FillAndVisitCoverEveryElementOnce) {
  for (const auto& [kind, persistent] :
       std::vector<std::pair<StrategyKind, std::size_t>>{{StrategyKind::ddp, 0},
                                                         {StrategyKind::zero1, 0},
                                                         {StrategyKind::zero2, 0},
                                                         {StrategyKind::zero3, 0},
                                                         {StrategyKind::zero3, 70}})
    lab::group(GetParam(), [&](Communicator& comm) {
      ToyModel model({});
      const auto strategy =
          make_strategy(kind, model, comm, {.gathers = {.param_persistence_threshold = persistent}});
      std::size_t stored = 0;
      strategy->values().fill([&](const Parameter& p, Range r, float* out) {
        stored += r.count();
        for (std::size_t i = r.begin; i < r.end; ++i) *out++ = initial_value(model.index(p.name), i);
      });
      std::size_t total = 0;
      for (const Parameter* p : model.parameters()) total += p->count();
      if (kind != StrategyKind::zero3) {
        EXPECT_EQ(stored, total);
      }

      std::vector<std::vector<float>> seen;
      for (const Parameter* p : model.parameters()) seen.emplace_back(p->count());
      strategy->values().visit_owned([&](const Parameter& p, Range r, const float* value) {
        const std::size_t index = model.index(p.name);
        for (std::size_t i = r.begin; i < r.end; ++i) {
          EXPECT_EQ(*value++, initial_value(index, i));
          seen[index][i] += 1;
        }
      });
      for (auto& counts : seen) {
        comm.all_reduce(Buffer(counts.data(), counts.size())).wait();
        EXPECT_EQ(counts, std::vector<float>(counts.size(), 1));
      }
      const auto parameters = model.parameters();
      for (std::size_t p = 0; p < parameters.size(); ++p) {
        const Tensor whole = strategy->values().whole(*parameters[p]);
        for (std::size_t i = 0; i < parameters[p]->count(); ++i)
          ASSERT_EQ(whole.data<float>()[i], initial_value(p, i)) << parameters[p]->name;
      }
    });
}

}  // namespace
}  // namespace rz
