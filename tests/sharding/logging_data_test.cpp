/// What a strategy logs: buckets, times and unused parameters; and the buffers that it broadcasts.
#include "sharding/strategy/logging_data.h"

#include <gtest/gtest.h>

#include <chrono>
#include <numeric>
#include <thread>

#include "sharding/model/power_sgd.h"
#include "sharding/optim/optimizers.h"
#include "sharding/strategy/strategy.h"
#include "tests/lab/group.h"
#include "tests/support/toy_training.h"

namespace rz {
namespace {

using namespace std::chrono_literals;
using test::initial_value;
using test::kinds;
using test::ToyModel;

class Logging : public testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Ranks, Logging, testing::Values(1, 2, 3, 4));

/// An update whose forward takes 20 ms and whose backward takes 40 ms. Returns its seconds.
double slow_update(Strategy& strategy, ToyModel& model, Tape& tape, Optimizer& sgd, bool use_sometimes) {
  const auto start = std::chrono::steady_clock::now();
  model.in_backward = [] { std::this_thread::sleep_for(40ms); };
  strategy.zero_grad();
  const Var loss = model.loss(
      tape,
      [](std::size_t p, std::size_t i) {
        if (p == 3 && i == 0) std::this_thread::sleep_for(20ms);
        return 1.0f;
      },
      use_sometimes);
  strategy.begin_backward();
  tape.backward(loss);
  tape.reset();
  strategy.finish_gradients();
  strategy.clip_and_step(sgd, {});
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

TEST_P(Logging, HasBucketsTimesAndUnusedParameters) {
  for (const StrategyKind kind : kinds)
    lab::group(GetParam(), [&](Communicator& comm) {
      const int rank = comm.rank();
      SCOPED_TRACE(concat(name(kind), " on rank ", rank));
      ToyModel model(initial_value);
      Tape tape;
      const auto strategy =
          make_strategy(kind, model, comm, {.reduce_bucket_size = 225, .first_bucket_size = 75});
      strategy->attach(tape);
      const auto sgd = make_sgd({});
      EXPECT_EQ(strategy->logging_data().forward_seconds, 0);
      EXPECT_FALSE(strategy->logging_data().rebuilt_buckets);
      double seconds = 0;
      for (int update = 0; update < 2; ++update)
        seconds = slow_update(*strategy, model, tape, *sgd, rank == 0);
      const LoggingData d = strategy->logging_data();
      EXPECT_EQ(d.strategy, name(kind));
      EXPECT_EQ(d.rank, rank);
      EXPECT_EQ(d.world_size, GetParam());
      EXPECT_EQ(d.backend, comm.describe());
      EXPECT_EQ(d.rebuilt_buckets, kind == StrategyKind::ddp);
      EXPECT_EQ(d.communication_hook, "none");
      EXPECT_EQ(d.unused_parameters, rank == 0 ? std::vector<std::string>{"never"}
                                               : (std::vector<std::string>{"never", "sometimes"}));
      // The second update reduced every bucket once.
      const std::size_t bytes = std::accumulate(d.bucket_bytes.begin(), d.bucket_bytes.end(), std::size_t{0});
      const CallCount& calls =
          kind == StrategyKind::ddp ? d.traffic.total().all_reduce : d.traffic.total().reduce_scatter;
      EXPECT_GT(d.bucket_bytes.size(), 1u);
      EXPECT_GE(calls.bytes, bytes);
      EXPECT_EQ(d.traffic, strategy->traffic());
      EXPECT_GE(d.forward_seconds, 0.02);
      EXPECT_GE(d.backward_seconds, 0.04);
      EXPECT_GT(d.communication_seconds, 0);
      EXPECT_EQ(d.exposed_seconds, strategy->exposed_seconds());
      const std::string text = describe(d);
      for (const char* line : {"buckets: ", "unused parameters: never", "exposed communication: "})
        EXPECT_NE(text.find(line), std::string::npos) << text;
      EXPECT_LE(d.forward_seconds + d.backward_seconds + d.exposed_seconds, seconds) << "times are disjoint";
    });
}

TEST(Logging, NamesTheCommunicationHook) {
  auto comm = Communicator::connect(0, 1, memory_store());
  ToyModel model(initial_value);
  const auto strategy =
      make_strategy(StrategyKind::ddp, model, comm, {.communication_hook = make_power_sgd({})});
  EXPECT_EQ(strategy->logging_data().communication_hook.substr(0, 15), "powersgd, rank ");
}

// ---- buffers

struct WithBuffers final : Module {
  WithBuffers() {
    register_parameter(weight, "weight", {3});
    weight.value = Tensor::zeros({3});
    register_buffer(mean, "mean", {2});
    register_buffer(count, "count", {1}, DType::i32);
  }
  Var loss(Tape& tape) {
    return in_scope(tape, [&] {
      const Var w = tape.parameter(weight);
      seen = mean.value.data<float>()[1];
      return tape.record(Tensor::zeros({}), {w}, [w](Tape& t, const Tensor&) {
        const auto target = t.grad_target(w);
        if (target.tensor.defined() && !target.accumulate) std::fill_n(target.tensor.data<float>(), 3, 0.0f);
      });
    });
  }
  Parameter weight;
  ModuleBuffer mean, count;
  float seen = -1;  ///< the mean in the last forward pass
};

TEST_P(Logging, BuffersAreThoseOfRankZeroInEveryForwardPassThatTrains) {
  for (const StrategyKind kind : kinds)
    for (const bool broadcast : {true, false})
      lab::group(GetParam(), [&](Communicator& comm) {
        const int rank = comm.rank();
        SCOPED_TRACE(concat(name(kind), " on rank ", rank));
        WithBuffers model;
        Tape tape;
        const auto strategy = make_strategy(kind, model, comm, {.broadcast_buffers = broadcast});
        strategy->attach(tape);
        const auto sgd = make_sgd({});
        for (int update = 0; update < 3; ++update) {
          strategy->zero_grad();
          for (const bool synchronise : {false, true}) {
            const float own = static_cast<float>(10 * update + rank);
            model.mean.value.data<float>()[1] = own;
            *model.count.value.data<std::int32_t>() = rank;
            const bool joins = update == 2 && synchronise && rank == 1 && kind != StrategyKind::zero3;
            if (joins) {
              strategy->backward_without_data(synchronise);
            } else {
              const Var loss = model.loss(tape);
              EXPECT_EQ(model.seen, broadcast ? static_cast<float>(10 * update) : own);
              strategy->begin_backward(synchronise);
              tape.backward(loss);
              tape.reset();
            }
            EXPECT_EQ(*model.count.value.data<std::int32_t>(), broadcast ? 0 : rank);
          }
          strategy->finish_gradients();
          strategy->step(*sgd);
          if (kind == StrategyKind::zero3) continue;
          const EvalMode evaluation(model);  // on one rank alone
          model.mean.value.data<float>()[1] = 77;
          if (rank == GetParam() - 1) model.loss(tape);
          tape.reset();
          EXPECT_EQ(model.mean.value.data<float>()[1], 77);
        }
      });
}

}  // namespace
}  // namespace rz
