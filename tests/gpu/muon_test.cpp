// Runs: ci operators

// Muon on devices: the host's course, and the same bits for every strategy and number of groups.

#include "autograd_lite/nn/layers.h"
#include "comm/core/error.h"
#include "comm/device/cuda_runtime.h"
#include "sharding/optim/newton_schulz.h"
#include "sharding/optim/optimizers.h"
#include "sharding/strategy/strategy.h"
#include "tests/gpu/on_card.h"
#include "tests/gpu/on_device.h"
#include "tests/lab/training.h"
#include "tests/support/ranks.h"
#include "tests/support/reference.h"

namespace rz::test {
namespace {

constexpr std::size_t rows = 6;

/// A wide and a tall matrix, and biases, which AdamW updates.
struct Net final : Module {
  nn::Linear wide{*this, "wide", 24, 10, nn::WeightLayout::out_in},
      tall{*this, "tall", 10, 17, nn::WeightLayout::out_in};
  Var loss(Tape& tape, const Tensor& x, const Tensor& targets) {
    return nn::mse(tape, tall(tape, nn::tanh(tape, wide(tape, tape.constant(x)))), targets);
  }
};

/// The values after three updates; `prepared`: their constants are in device memory.
std::vector<double> train(StrategyKind kind, Communicator& comm, bool prepared = false) {
  const Device device = comm.options().device;
  Net net;
  const auto strategy = make_strategy(kind, net, comm, {.reduce_bucket_size = 200, .first_bucket_size = 100});
  Tape tape(Stream::create(device));
  const Stream& stream = tape.stream();
  strategy->attach(tape);
  strategy->values().fill([](const Parameter& p, Range r, float* out) {
    const Values all = random_values(p.count(), static_cast<unsigned>(p.count()), 0.3);
    for (std::size_t i = 0; i < r.count(); ++i) out[i] = static_cast<float>(all[r.begin + i]);
  });
  const auto seed = static_cast<unsigned>(comm.rank());
  const Tensor x = to_device(random_values(rows * 24, seed), {rows, 24}, DType::f32, stream),
               targets = to_device(random_values(rows * 17, seed + 7), {rows, 17}, DType::f32, stream);
  const auto muon = make_muon({.learning_rate = 0.05, .weight_decay = 0.1});
  for (int update = 0; update < 3; ++update) {
    if (prepared) strategy->next_update(*muon, stream);
    strategy->zero_grad();
    const Var loss = net.loss(tape, x, targets);
    strategy->begin_backward();
    tape.backward(loss);
    tape.reset();
    strategy->finish_gradients(stream);
    strategy->clip_and_step(*muon, {.max_norm = 0.03}, stream);
    EXPECT_FALSE(strategy->outcome(*muon, stream).skipped);
  }
  const std::vector<float> values = lab::values_of(*strategy, net, stream);
  return {values.begin(), values.end()};
}

class MuonOnDevice : public OnDevice, public testing::WithParamInterface<int> {};
INSTANTIATE_TEST_SUITE_P(Ranks, MuonOnDevice, testing::Values(1, 2, 3, 4));

/// An update moves a value by 0.05 · 1.2; three of them with gradients whose relative error is 1e-6 differ by
/// less than 1e-4 even where the iterations enlarge small singular values thirty times.
TEST_P(MuonOnDevice, FollowsTheHost) {
  run_ranks(GetParam(), [&](int rank, std::shared_ptr<Store> store) {
    auto on_host = Communicator::connect(rank, GetParam(), prefix_store(store, "host"));
    const std::vector<double> expected = train(StrategyKind::ddp, on_host);
    auto comm = Communicator::connect(rank, GetParam(), prefix_store(store, "device"), on_a_card(rank));
    const std::vector<double> first = train(StrategyKind::ddp, comm);
    ASSERT_EQ(first.size(), expected.size());
    for (std::size_t i = 0; i < first.size(); ++i) ASSERT_NEAR(first[i], expected[i], 1e-4) << i;
    EXPECT_EQ(train(StrategyKind::ddp, comm, true), first);
    for (const StrategyKind kind : {StrategyKind::zero1, StrategyKind::zero2, StrategyKind::zero3})
      EXPECT_EQ(train(kind, comm), first) << name(kind);
  });
}

class OrthogonalizeOnDevice : public OnDevice {};

/// Singular values go to between 0.6 and 1.3, and the host's arithmetic is the device's except for the order
/// of sums. The emulated device has the host's BLAS, which the host has for products of more than 8 rows.
TEST_F(OrthogonalizeOnDevice, ADeviceOrthogonalizesAsTheHostDoes) {
  for (const auto& [r, c] : {std::array<std::size_t, 2>{8, 8}, {5, 33}, {40, 12}}) {
    const Values x = random_values(r * c, 3);
    const Tensor on_device = to_device(x, {r, c}, DType::f32, stream), on_host = Tensor::empty({r, c});
    for (std::size_t i = 0; i < x.size(); ++i) on_host.data<float>()[i] = static_cast<float>(x[i]);
    newton_schulz(
        on_device, 5, [&](const Shape& s) { return empty_on(stream, s); }, stream);
    newton_schulz(on_host, 5, [](const Shape& s) { return Tensor::empty(s); }, {});
    const Values got = from_device(on_device, stream);
    double squares = 0;
    for (std::size_t i = 0; i < got.size(); ++i) {
      if (emulated_device && std::min(r, c) > 8)
        ASSERT_EQ(static_cast<float>(got[i]), on_host.data<float>()[i]) << i;
      else
        ASSERT_NEAR(got[i], on_host.data<float>()[i], 1e-4) << i;
      squares += got[i] * got[i];
    }
    const auto small = static_cast<double>(std::min(r, c));
    EXPECT_GT(squares, 0.36 * small);
    EXPECT_LT(squares, 1.69 * small);
  }
}

}  // namespace
}  // namespace rz::test
