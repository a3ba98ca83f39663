/// State left by a strategy that is destroyed in the middle of a step.
#include <gtest/gtest.h>

#include <chrono>

#include "comm/core/error.h"
#include "sharding/strategy/strategy.h"
#include "tests/lab/group.h"
#include "tests/support/toy_model.h"

namespace rz {
namespace {

TEST(Strategy, OneThatIsDestroyedMidStepEndsTheOtherRanksStep) {
  for (const StrategyKind kind : {StrategyKind::ddp, StrategyKind::zero1, StrategyKind::zero2})
    lab::group(2, [&](Communicator& comm) {
      test::ToyModel model([](std::size_t, std::size_t) { return 1.0f; });
      const auto start = std::chrono::steady_clock::now();
      try {
        Tape tape;
        const auto strategy = make_strategy(kind, model, comm);
        strategy->attach(tape);
        const Var loss = model.loss(tape, [](std::size_t, std::size_t) { return 1.0f; });
        strategy->begin_backward();
        if (comm.rank() == 0) return;  // as an exception would
        tape.backward(loss);
        strategy->finish_gradients();
        ADD_FAILURE() << "no error";
      } catch (const Error& e) {
        EXPECT_EQ(e.code(), Errc::aborted) << e.what();
        EXPECT_EQ(e.culprit(), 0);
      }
      EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(10));
    });
}

}  // namespace
}  // namespace rz
