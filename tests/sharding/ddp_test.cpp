/// DDP only: buckets that follow the order in which gradients became ready.
#include <gtest/gtest.h>

#include "sharding/optim/optimizers.h"
#include "sharding/strategy/strategy.h"
#include "tests/lab/group.h"
#include "tests/support/error_of.h"
#include "tests/support/toy_model.h"

namespace rz {
namespace {

using test::ToyModel;

float initial_value(std::size_t p, std::size_t i) { return 0.25f + static_cast<float>((p + i) % 7); }
float datum(std::size_t p, std::size_t i) { return 1.0f / static_cast<float>(1 + (p * 3 + i) % 5); }

struct Trained {
  std::vector<float> values;
  std::vector<const float*> places_before, places_after;
};

std::vector<const float*> places(ToyModel& model) {
  std::vector<const float*> out;
  for (const Parameter* p : model.parameters()) out.push_back(p->value.data<float>());
  return out;
}

Trained train(Communicator& comm, bool rebuild) {
  ToyModel model(initial_value);
  Tape tape;
  const auto ddp = make_strategy(StrategyKind::ddp, model, comm,
                                 {.reduce_bucket_size = 256, .first_bucket_size = 128, .rebuild = rebuild});
  ddp->attach(tape);
  const auto adam = make_adam({.learning_rate = 0.125});
  Trained out;
  out.places_before = places(model);
  for (int step = 0; step < 4; ++step) {
    ddp->zero_grad();
    const Var loss = model.loss(tape, datum);
    ddp->begin_backward();
    tape.backward(loss);
    tape.reset();
    ddp->finish_gradients();
    ddp->step(*adam);
  }
  out.places_after = places(model);
  for (const Parameter* p : model.parameters())
    out.values.insert(out.values.end(), p->value.data<float>(), p->value.data<float>() + p->count());
  return out;
}

/// "tied" is used first, hence planned last, and "never" never becomes ready: the ready order differs from
/// the plan.
TEST(Ddp, RebuildMovesParametersAndKeepsOptimizerState) {
  lab::group(2, [](Communicator& comm) {
    const Trained still = train(comm, false), moved = train(comm, true);
    EXPECT_EQ(still.places_before, still.places_after);
    EXPECT_NE(moved.places_before, moved.places_after);
    EXPECT_EQ(moved.values, still.values);
  });
}

TEST(Ddp, GradientsAreMeansInPlaceOnEveryRank) {
  lab::group(2, [](Communicator& comm) {
    const int rank = comm.rank();
    ToyModel model([](std::size_t, std::size_t) { return 2.0f; });
    Tape tape;
    const auto ddp = make_strategy(StrategyKind::ddp, model, comm);
    ddp->attach(tape);
    std::vector<const std::byte*> before;
    for (const Parameter* p : model.parameters()) before.push_back(p->grad.raw());
    const Var loss = model.loss(
        tape, [&](std::size_t, std::size_t) { return static_cast<float>(1 + 2 * rank); }, rank == 0);
    ddp->begin_backward();
    tape.backward(loss);
    ddp->finish_gradients();
    const auto gradient = [&](const char* name) { return *model[model.index(name)].grad.data<float>(); };
    EXPECT_EQ(gradient("norm"), 2 * 2.0f);      // mean of 1 · 2 and 3 · 2
    EXPECT_EQ(gradient("tied"), 3 * 2 * 2.0f);  // used twice
    EXPECT_EQ(gradient("sometimes"), 1.0f);     // 2 on rank 0, unused on rank 1
    EXPECT_EQ(gradient("never"), 0.0f);
    EXPECT_FALSE(model[model.index("frozen")].grad.defined());
    for (std::size_t i = 0; i < before.size(); ++i) EXPECT_EQ(model[i].grad.raw(), before[i]);
  });
}

/// Strategies place the parameters, and are where a model is built for training.
TEST(Ddp, TwoParametersOfOneNameAreRefused) {
  lab::group(2, [](Communicator& comm) {
    ToyModel model(initial_value);
    model[1].name = model[3].name;
    for (const auto kind : {StrategyKind::ddp, StrategyKind::zero2, StrategyKind::zero3}) {
      const Error e = test::error_of([&] { make_strategy(kind, model, comm); });
      EXPECT_EQ(e.code(), Errc::invalid_argument);
      EXPECT_NE(std::string(e.what()).find("two parameters are called first.bias"), std::string::npos)
          << e.what();
    }
  });
}

}  // namespace
}  // namespace rz
