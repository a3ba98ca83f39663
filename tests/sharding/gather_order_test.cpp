/// Which units ZeRO-3 gathers when, and what it holds. No clocks: a mirrored communicator records calls.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>

#include "comm/core/error.h"
#include "sharding/optim/optimizers.h"
#include "sharding/strategy/strategy.h"
#include "tests/lab/group.h"
#include "tests/support/error_of.h"
#include "tests/support/scope_course.h"

namespace rz {
namespace {

using test::CallRecord;

constexpr int ranks = 2;
using Course = test::ScopeCourse;
using test::Order;
using test::scopes_of;

bool is_gather(const CallRecord::Call& c) {
  return c.kind == Collective::all_gather && c.dtype == DType::f32;
}
bool is_reduction(const CallRecord::Call& c) { return c.kind == Collective::reduce_scatter; }

/// One rank that trains.
struct Training {
  explicit Training(GatherLimits limits, bool overlap = true, const Order& listed = {0, 1, 2, 3},
                    bool tied = false)
      : model([this](int scope, Pass pass) { look(scope, pass); }, false, listed),
        comm(test::mirrored_communicator(0, ranks, record)) {
    if (tied) model.scope(3).parameters.push_back(&model.parameter(0));
    strategy = make_strategy(StrategyKind::zero3, model, comm, {.overlap_comm = overlap, .gathers = limits});
    strategy->attach(tape);
  }
  void update(const std::function<Var()>& loss) {
    strategy->zero_grad();
    record->clear();
    held.clear();
    held_backward.clear();
    ahead.clear();
    const Var l = loss();
    strategy->begin_backward();
    tape.backward(l);
    tape.reset();
    gathers = scopes_of(record->launched(is_gather));
    reductions = scopes_of(record->launched(is_reduction));
    strategy->finish_gradients();
    EXPECT_EQ(strategy->memory().transient_in_use, 0u);
    strategy->step(sgd());
    EXPECT_EQ(strategy->memory().transient_in_use, 0u);
  }
  /// `times` updates; afterwards the record is of the last one.
  void run(const Order& order, int times = 2) {
    for (int i = 0; i < times; ++i) update([&] { return model.loss(tape, order); });
  }
  Optimizer& sgd() {
    if (!optimizer) optimizer = make_sgd({.learning_rate = 0});
    return *optimizer;
  }
  void look(int scope, Pass pass) {
    (pass == Pass::forward ? held : held_backward)
        .push_back(strategy->memory().transient_in_use / sizeof(float));
    ahead.push_back(scopes_of(record->in_flight(is_gather)));
    EXPECT_TRUE(model.parameter(scope).value.defined());
  }

  std::shared_ptr<CallRecord> record = std::make_shared<CallRecord>();
  Course model;
  Communicator comm;
  Tape tape;
  std::unique_ptr<Strategy> strategy;
  std::unique_ptr<Optimizer> optimizer;
  Order gathers;                           ///< of one update, in the order of their launch
  Order reductions;                        ///< launched in backward
  std::vector<std::size_t> held;           ///< elements that are gathered while a scope runs forward
  std::vector<std::size_t> held_backward;  ///< the same backward, with gradients
  std::vector<Order> ahead;                ///< gathers in flight while a scope runs
};

// ---- the order

TEST(GatherOrder, TheFirstPassFollowsTheListWhereItCan) {
  Training listed({});
  listed.run({0, 1, 2, 3}, 1);
  EXPECT_EQ(listed.gathers, (Order{0, 1, 2, 3, 2, 1, 0}));
  EXPECT_EQ(listed.ahead, (std::vector<Order>{{1}, {2}, {3}, {}, {2}, {1}, {0}, {}}));
  Training other({}, true, {3, 1, 0, 2});
  other.run({0, 1, 2, 3}, 1);
  EXPECT_EQ(other.gathers, (Order{0, 1, 2, 3, 3, 2, 1, 0})) << "on demand";
  for (const Order& ahead : other.ahead) EXPECT_EQ(ahead, Order{});
}

TEST(GatherOrder, LaterPassesFollowTheFirst) {
  Training t({});
  t.run({0, 1, 2, 3});
  EXPECT_EQ(t.gathers, (Order{0, 1, 2, 3, 2, 1, 0}));
  EXPECT_EQ(t.ahead, (std::vector<Order>{{1}, {2}, {3}, {}, {2}, {1}, {0}, {}}));
}

TEST(GatherOrder, FollowsThePassAndNotTheList) {
  for (const Order& listed : {Order{0, 1, 2, 3}, Order{3, 2, 1, 0}, Order{2, 0, 3, 1}}) {
    Training t({}, true, listed);
    t.run({2, 0, 3, 1});
    EXPECT_EQ(t.gathers, (Order{2, 0, 3, 1, 3, 0, 2}));
    EXPECT_EQ(t.ahead, (std::vector<Order>{{0}, {3}, {1}, {}, {3}, {0}, {2}, {}}));
  }
}

TEST(GatherOrder, AScopeMayRunSeveralTimes) {
  Training t({});
  t.run({0, 1, 0, 2, 0, 3});
  EXPECT_EQ(t.gathers, (Order{0, 1, 0, 2, 0, 3, 0, 2, 0, 1, 0}));
  EXPECT_EQ(t.ahead, (std::vector<Order>{{1}, {0}, {2}, {0}, {3}, {}, {0}, {2}, {0}, {1}, {0}, {}}));
}

TEST(GatherOrder, RecomputedScopesArePrefetchedForwardAndBackward) {
  Training t({});
  for (int i = 0; i < 2; ++i) t.update([&] { return t.model.recomputed_loss(t.tape); });
  // Forward 0 1 2 3; backward: 1 around the second run of 2 and 3, which then run backward, 0.
  EXPECT_EQ(t.gathers, (Order{0, 1, 2, 3, 2, 3, 2, 0}));
}

TEST(GatherOrder, ADeviationGathersOnDemandAndIsLearned) {
  Training t({});
  t.run({0, 1, 2, 3});
  t.run({0, 2, 1, 3}, 1);
  EXPECT_EQ(t.gathers, (Order{0, 1, 2, 1, 3, 3, 2, 1, 2, 0}))
      << "1, and 2 in backward, were prefetched without use";
  t.run({0, 2, 1, 3}, 1);
  EXPECT_EQ(t.gathers, (Order{0, 2, 1, 3, 1, 2, 0}));
  t.run({0, 1, 2, 3}, 3);
  EXPECT_EQ(t.gathers, (Order{0, 1, 2, 3, 2, 1, 0}));
}

TEST(GatherOrder, EvaluationBetweenUpdatesIsLearnedToo) {
  Training t({});
  const auto evaluate = [&] {
    const Tape::NoGrad no_grad(t.tape);
    t.record->clear();
    for (int i = 0; i < 2; ++i) t.model.loss(t.tape, {0, 1, 2, 3}), t.tape.reset();
    return scopes_of(t.record->launched(is_gather));
  };
  for (int i = 0; i < 2; ++i) t.run({0, 1, 2, 3}), evaluate();
  t.run({0, 1, 2, 3});
  EXPECT_EQ(t.gathers, (Order{0, 1, 2, 3, 2, 1, 0}));
}

TEST(GatherOrder, WithoutOverlapNothingIsPrefetched) {
  Training t({.prefetch_bucket_size = 10'000}, false);
  t.run({0, 1, 2, 3});
  for (const Order& ahead : t.ahead) EXPECT_EQ(ahead, Order{});
}

/// Not the gradients of the whole pass: a reduction ends where it is launched, and its whole gradient is
/// dropped before the next one is written.
TEST(GatherOrder, WithoutOverlapOneScopeIsHeld) {
  Training t({.prefetch_bucket_size = 10'000}, false);
  t.run({0, 1, 2, 3});
  EXPECT_EQ(t.held, (std::vector<std::size_t>{128, 256, 384, 512}));
  EXPECT_EQ(t.held_backward, (std::vector<std::size_t>{512, 384 + 512, 256 + 384, 128 + 256}))
      << "its values, and the last gradients";
  EXPECT_EQ(t.strategy->memory().transient_peak, sizeof(float) * 2 * 512);
}

TEST(GatherOrder, WithOverlapTwoReductionsAreHeldAtMost) {
  Training t({});
  t.run({0, 1, 2, 3});
  EXPECT_EQ(t.held, (std::vector<std::size_t>{128 + 256, 256 + 384, 384 + 512, 512}));
  EXPECT_EQ(t.held_backward,
            (std::vector<std::size_t>{512 + 384, 384 + 256 + 512, 256 + 128 + 384 + 512, 128 + 256 + 384}))
      << "values of a scope and of the next one, and gradients of two";
}

// ---- the limits; the four units have 128, 256, 384 and 512 elements

TEST(GatherLimits, PrefetchBucketSizeCountsElements) {
  const auto ahead = [](std::size_t elements) {
    Training t({.prefetch_bucket_size = elements});
    t.run({0, 1, 2, 3});
    return t.ahead;
  };
  EXPECT_EQ(ahead(0), std::vector<Order>(8));
  EXPECT_EQ(ahead(256)[0], Order{1});
  EXPECT_EQ(ahead(257)[0], (Order{1, 2}));
  EXPECT_EQ(ahead(257)[1], Order{2}) << "its 384 elements suffice";
  EXPECT_EQ(ahead(256 + 384)[0], (Order{1, 2}));
  EXPECT_EQ(ahead(256 + 384 + 1)[0], (Order{1, 2, 3}));
}

TEST(GatherLimits, MaxReuseDistanceKeepsWhatIsUsedAgainSoon) {
  const auto gathers = [](std::size_t elements) {
    Training t({.prefetch_bucket_size = 0, .max_reuse_distance = elements});
    t.run({0, 1, 2, 3});
    return t.gathers;
  };
  EXPECT_EQ(gathers(0), (Order{0, 1, 2, 3, 3, 2, 1, 0}));
  EXPECT_EQ(gathers(1), (Order{0, 1, 2, 3, 2, 1, 0}));
  EXPECT_EQ(gathers(2 * 512), (Order{0, 1, 2, 3, 2, 1, 0})) << "2 is used again behind twice 3";
  EXPECT_EQ(gathers(2 * 512 + 1), (Order{0, 1, 2, 3, 1, 0}));
  EXPECT_EQ(gathers(2 * (512 + 384) + 1), (Order{0, 1, 2, 3, 0}));
  EXPECT_EQ(gathers(GatherLimits::none), (Order{0, 1, 2, 3}));
}

TEST(GatherLimits, MaxLiveParametersBoundsWhatIsHeld) {
  const auto trained = [](std::size_t elements) {
    auto t = std::make_unique<Training>(GatherLimits{.prefetch_bucket_size = 10'000,
                                                     .max_live_parameters = elements,
                                                     .max_reuse_distance = GatherLimits::none});
    t->run({0, 1, 2, 3});
    return t;
  };
  const auto max_held = [](const Training& t) { return *std::ranges::max_element(t.held); };
  EXPECT_EQ(max_held(*trained(GatherLimits::none)), 128u + 256 + 384 + 512);
  EXPECT_EQ(trained(GatherLimits::none)->gathers, (Order{0, 1, 2, 3}));
  EXPECT_EQ(max_held(*trained(512 + 384)), 512u + 384);
  EXPECT_EQ(trained(512 + 384)->gathers, (Order{0, 1, 2, 3, 1, 0}));
  EXPECT_EQ(max_held(*trained(512 + 383)), 512u + 256) << "2 runs while 1 is kept, 3 while 2 is not";
  EXPECT_EQ(max_held(*trained(0)), 512u) << "the scope that runs has its values in any case";
  EXPECT_EQ(trained(0)->gathers, (Order{0, 1, 2, 3, 3, 2, 1, 0}));
}

TEST(GatherLimits, PersistentParametersAreHeldWhole) {
  Training t({.prefetch_bucket_size = 0, .param_persistence_threshold = 256});
  t.run({0, 1, 2, 3}, 1);
  EXPECT_EQ(t.gathers, (Order{2, 3, 3, 2}));
  EXPECT_TRUE(t.model.parameter(1).value.defined());
  EXPECT_FALSE(t.model.parameter(2).value.defined());
  const MemoryReport memory = t.strategy->memory();
  EXPECT_EQ(memory.parameters, 4 * (128 + 256 + (384 + 512) / ranks));
  EXPECT_EQ(memory.gradients, 4 * (128 + 256 + 384 + 512) / ranks) << "sharded nevertheless";
  EXPECT_EQ(scopes_of(t.record->launched(is_gather)), (Order{2, 3, 3, 2, 1, 0}))
      << "1 and 0 after the update";
}

TEST(GatherLimits, ModelPersistenceThresholdBoundsTheirSum) {
  const auto parameters = [](std::size_t per_parameter, std::size_t whole_model) {
    Training t({.param_persistence_threshold = per_parameter, .model_persistence_threshold = whole_model});
    return t.strategy->memory().parameters / sizeof(float);
  };
  constexpr std::size_t half = (128 + 256 + 384 + 512) / 2;
  EXPECT_EQ(parameters(127, GatherLimits::none), half);
  EXPECT_EQ(parameters(128, GatherLimits::none), half + 64);
  EXPECT_EQ(parameters(512, GatherLimits::none), 2 * half);
  EXPECT_EQ(parameters(512, 128 + 384), half + 64 + 64 * 2) << "0 and 1, which leave too little for 2";
  EXPECT_EQ(parameters(512, 127), half);
}

/// A tied parameter is complete behind the scope that forward entered first, wherever that one is listed.
TEST(GatherOrder, ATiedParameterIsReducedInBackwardOnceItIsComplete) {
  const auto trained = [](const Order& listed) {
    auto t = std::make_unique<Training>(GatherLimits{}, true, listed, true);
    for (int i = 0; i < 2; ++i) t->update([&] { return t->model.tied_loss(t->tape); });
    // Gradients are the values i + 1, that of p0 twice; rank 0 has half of them, and the other rank as much.
    EXPECT_EQ(t->strategy->gradient_norm(), std::sqrt(128 * 4 + 256 * 4 + 384 * 9 + 512 * 16));
    return t;
  };
  EXPECT_EQ(trained({0, 1, 2, 3})->reductions, (Order{3, 2, 1, 0}));
  EXPECT_EQ(trained({3, 2, 1, 0})->reductions, (Order{1, 2, 3, 0})) << "launched in the order of the list";
}

// ---- ranks

TEST(GatherOrder, RanksThatRunOtherScopesAreNamed) {
  lab::group(3, [](Communicator& comm) {
    Course model([](int, Pass) {}, true);  // equal sizes: the gathers themselves match
    const auto strategy =
        make_strategy(StrategyKind::zero3, model, comm, {.gathers = {.prefetch_bucket_size = 0}});
    Tape tape;
    strategy->attach(tape);
    const auto pass = [&](const Order& evaluated) {
      strategy->zero_grad();
      {
        const Tape::NoGrad no_grad(tape);
        model.loss(tape, evaluated);
      }
      const Var loss = model.loss(tape, {0, 1, 2, 3});
      strategy->begin_backward();
      tape.backward(loss);
      tape.reset();
      strategy->finish_gradients();
    };
    pass({0, 1, 2, 3});
    const Error e = test::error_of([&] { pass(comm.rank() == 2 ? Order{0, 2, 1, 3} : Order{0, 1, 2, 3}); });
    EXPECT_EQ(e.code(), Errc::mismatch);
    EXPECT_EQ(e.culprit(), 2);
    EXPECT_NE(std::string(e.what()).find("number 1 is s1 forward on rank 0 and s2 forward on rank 2"),
              std::string::npos)
        << e.what();
  });
}

}  // namespace
}  // namespace rz
