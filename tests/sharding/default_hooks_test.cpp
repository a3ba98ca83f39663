/// Hooks under PyTorch's names have the bits of the wire formats that do the same.
#include <gtest/gtest.h>

#include <vector>

#include "sharding/model/communication_hook.h"
#include "sharding/optim/optimizers.h"
#include "sharding/strategy/strategy.h"
#include "tests/lab/group.h"
#include "tests/support/toy_training.h"

namespace rz {
namespace {

using test::ToyModel;
using test::values_of;

/// Numbers that no type of 16 bits holds.
float noise(std::size_t p, std::size_t i, int rank) {
  return 0.1f * static_cast<float>((p * 131 + i * 17 + static_cast<std::size_t>(rank) * 77) % 101) - 3.3f;
}

struct Trained {
  std::vector<float> values;
  std::uint64_t bytes = 0;
};

Trained train(Communicator& comm, const StrategyOptions& options) {
  ToyModel model(test::initial_value);
  const auto ddp = make_strategy(StrategyKind::ddp, model, comm, options);
  Tape tape;
  ddp->attach(tape);
  const auto sgd = make_sgd({.learning_rate = 0.01});
  for (int update = 0; update < 3; ++update) {
    ddp->zero_grad();
    for (int pass = 0; pass < 2; ++pass) {
      const Var loss =
          model.loss(tape, [&](std::size_t p, std::size_t i) { return noise(p, i, comm.rank() + pass); });
      ddp->begin_backward();
      tape.backward(loss);
      tape.reset();
      ddp->finish_gradients();
    }
    ddp->step(*sgd);
  }
  Trained out;
  for (const Parameter* p : model.parameters()) {
    const auto values = values_of(*ddp, *p);
    out.values.insert(out.values.end(), values.begin(), values.end());
  }
  out.bytes = ddp->traffic().total().all_reduce.bytes;
  return out;
}

class DefaultHooks : public testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Ranks, DefaultHooks, testing::Values(1, 2, 3, 4));

TEST_P(DefaultHooks, HaveTheBitsOfTheirWireFormats) {
  lab::group(GetParam(), [&](Communicator& comm) {
    const auto with = [&](const WireFormat& wire, std::shared_ptr<CommunicationHook> hook) {
      return train(comm, {.reduce_bucket_size = 225,
                          .first_bucket_size = 75,
                          .wire = wire,
                          .communication_hook = std::move(hook)});
    };
    const auto expect_same = [](const Trained& a, const Trained& b) {
      EXPECT_EQ(a.values, b.values);
      EXPECT_EQ(a.bytes, b.bytes);
    };
    const Trained plain = with({}, nullptr), f16 = with({}, make_fp16_compress_hook()),
                  bf16 = with({}, make_bf16_compress_hook());
    expect_same(f16, with({.communication_data_type = DType::f16, .prescale_gradients = true}, nullptr));
    expect_same(bf16, with({.communication_data_type = DType::bf16, .prescale_gradients = true}, nullptr));
    EXPECT_EQ(2 * f16.bytes, plain.bytes);
    EXPECT_NE(f16.values, plain.values);
    EXPECT_NE(bf16.values, f16.values);
  });
}

TEST(DefaultHooks, HavePyTorchsNames) {
  EXPECT_EQ(make_fp16_compress_hook()->describe(), "fp16_compress");
  EXPECT_EQ(make_bf16_compress_hook()->describe(), "bf16_compress");
}

}  // namespace
}  // namespace rz
