// Runs: ci operators

// PowerSGD on devices: the host's course, the same bits on every rank, and without its factors the exact
// mean.

#include "sharding/model/power_sgd.h"

#include <algorithm>

#include "autograd_lite/nn/layers.h"
#include "comm/device/cuda_runtime.h"
#include "sharding/optim/optimizers.h"
#include "sharding/strategy/strategy.h"
#include "tests/gpu/on_card.h"
#include "tests/gpu/on_device.h"
#include "tests/lab/training.h"
#include "tests/support/ranks.h"
#include "tests/support/reference.h"

namespace rz::test {
namespace {

constexpr std::size_t rows = 6, in = 24, out = 17;

struct Net final : Module {
  nn::Linear layer{*this, "layer", in, out, nn::WeightLayout::out_in};
};

/// The values after six updates, of which the last four are compressed.
std::vector<double> train(Communicator& comm, std::shared_ptr<CommunicationHook> hook) {
  const Device device = comm.options().device;
  Net net;
  const auto ddp = make_strategy(StrategyKind::ddp, net, comm, {.communication_hook = std::move(hook)});
  Tape tape(Stream::create(device));
  const Stream& stream = tape.stream();
  ddp->attach(tape);
  ddp->values().fill([](const Parameter& p, Range r, float* to) {
    const Values all = random_values(p.count(), static_cast<unsigned>(p.count()), 0.3);
    for (std::size_t i = 0; i < r.count(); ++i) to[i] = static_cast<float>(all[r.begin + i]);
  });
  const auto seed = static_cast<unsigned>(comm.rank());
  const Tensor x = to_device(random_values(rows * in, seed), {rows, in}, DType::f32, stream),
               targets = to_device(random_values(rows * out, seed + 7), {rows, out}, DType::f32, stream);
  const auto sgd = make_sgd({.learning_rate = 0.1});
  for (int update = 0; update < 6; ++update) {
    ddp->zero_grad();
    const Var loss = nn::mse(tape, net.layer(tape, tape.constant(x)), targets);
    ddp->begin_backward();
    tape.backward(loss);
    tape.reset();
    ddp->finish_gradients(stream);
    ddp->clip_and_step(*sgd, {}, stream);
  }
  const std::vector<float> values = lab::values_of(*ddp, net, stream);
  return {values.begin(), values.end()};
}

class PowerSgdOnDevice : public OnDevice, public testing::WithParamInterface<int> {};
INSTANTIATE_TEST_SUITE_P(Ranks, PowerSgdOnDevice, testing::Values(1, 2, 3));

/// Values and gradients are below 1; an update multiplies roundings of 6e-8 by less than 10.
TEST_P(PowerSgdOnDevice, FollowsTheHost) {
  const PowerSgdOptions options{.matrix_approximation_rank = 2, .start_iter = 2, .min_compression_rate = 1};
  run_ranks(GetParam(), [&](int rank, std::shared_ptr<Store> store) {
    auto on_host = Communicator::connect(rank, GetParam(), prefix_store(store, "host"));
    auto comm = Communicator::connect(rank, GetParam(), prefix_store(store, "device"), on_a_card(rank));
    const std::vector<double> plain = train(on_host, nullptr);
    for (const bool batched : {false, true}) {
      const auto hook = [&] { return batched ? make_batched_power_sgd(options) : make_power_sgd(options); };
      const auto expected = train(on_host, hook()), got = train(comm, hook());
      ASSERT_EQ(got.size(), expected.size());
      double lost = 0;
      for (std::size_t i = 0; i < got.size(); ++i) {
        ASSERT_NEAR(got[i], expected[i], 2e-5) << i;
        lost = std::max(lost, std::abs(got[i] - plain[i]));
      }
      EXPECT_GT(lost, 1e-3) << "compressed";
      std::vector<double> of_first = got;
      on_host.broadcast(Buffer(of_first.data(), of_first.size()), 0).wait();
      EXPECT_EQ(got, of_first);
    }
  });
}

}  // namespace
}  // namespace rz::test
