/// Batch norms over ranks: each rank has a part of a batch, and the results are those of the whole batch on
/// one rank.
#include <gtest/gtest.h>

#include "autograd_lite/nn/image_layers.h"
#include "autograd_lite/nn/init.h"
#include "sharding/parallel/collectives.h"
#include "tests/autograd/gradients.h"
#include "tests/support/ranks.h"

namespace rz {
namespace {

struct Net : Module {
  nn::BatchNorm2d norm{*this, "norm", 3};
  nn::Conv2d conv{*this, "conv", 3, 4, 3, {.padding = 1}};
  nn::BatchNorm2d second{*this, "second", 4, {.momentum = std::nullopt}};
};

constexpr std::size_t h = 4, w = 5, images = 7;

struct Result {
  std::vector<float> out, d_x;
  std::vector<std::vector<float>> parameters;  ///< gradients
  std::vector<std::vector<float>> buffers;     ///< in f32
};

std::vector<float> floats(const Tensor& t) { return {t.data<float>(), t.data<float>() + t.count()}; }

/// Images [begin, end) of the batch, twice; over the ranks of a communicator, if there is one.
Result run(std::size_t begin, std::size_t end, Communicator* c) {
  Net net;
  allocate_parameters(net);
  init_parameters(net, 1);
  if (c) functional::sync_batch_norm(net, *c);
  const Tensor x = nn::random({images, 3, h, w}, "x").view(begin * 3 * h * w, {end - begin, 3, h, w});
  const Tensor weights =
      nn::random({images, 4, h, w}, "weights").view(begin * 4 * h * w, {end - begin, 4, h, w});
  Result r;
  for (Parameter* p : net.parameters()) p->grad = Tensor::zeros(p->shape);
  Tape tape;
  for (int batch = 0; batch < 2; ++batch) {
    tape.reset();
    for (Parameter* p : net.parameters()) p->grad_is_fresh = true;
    const Var in = tape.variable(x);
    const Var out = net.second(tape, nn::relu(tape, net.conv(tape, net.norm(tape, in))));
    r.out = floats(tape.value(out));
    tape.backward(nn::sum(tape, nn::mul(tape, out, tape.constant(weights))));
    r.d_x = floats(tape.grad(in));
  }
  for (Parameter* p : net.parameters()) {
    if (c) c->all_reduce(p->grad.buffer()).wait();
    r.parameters.push_back(floats(p->grad));
  }
  for (const auto& [name, b] : persistent_buffers(net))
    r.buffers.push_back(b->dtype == DType::f32
                            ? floats(b->value)
                            : std::vector<float>{static_cast<float>(*b->value.data<std::int64_t>())});
  return r;
}

void expect_close(const std::vector<float>& got, std::span<const float> expected, const char* what) {
  ASSERT_EQ(got.size(), expected.size()) << what;
  for (std::size_t i = 0; i < got.size(); ++i)
    ASSERT_NEAR(got[i], expected[i], 2e-5 * (1 + std::abs(expected[i]))) << what << " " << i;
}

void expect_whole_batch(const std::vector<std::size_t>& images_of_rank) {
  const Result whole = run(0, images, nullptr);
  const int ranks = static_cast<int>(images_of_rank.size());
  test::run_ranks(ranks, [&](int rank, std::shared_ptr<Store> store) {
    Communicator c = Communicator::connect(rank, ranks, std::move(store));
    std::size_t begin = 0;
    for (int r = 0; r < rank; ++r) begin += images_of_rank[static_cast<std::size_t>(r)];
    const std::size_t count = images_of_rank[static_cast<std::size_t>(rank)];
    const Result part = run(begin, begin + count, &c);
    expect_close(part.out, std::span(whole.out).subspan(begin * 4 * h * w, count * 4 * h * w), "output");
    expect_close(part.d_x, std::span(whole.d_x).subspan(begin * 3 * h * w, count * 3 * h * w), "d_x");
    for (std::size_t i = 0; i < whole.parameters.size(); ++i)
      expect_close(part.parameters[i], whole.parameters[i], "parameter");
    for (std::size_t i = 0; i < whole.buffers.size(); ++i)
      expect_close(part.buffers[i], whole.buffers[i], "buffer");
  });
}

TEST(SyncBatchNorm, TwoRanksAreOneWithTheWholeBatch) { expect_whole_batch({4, 3}); }
TEST(SyncBatchNorm, ThreeRanksWithUnequalBatches) { expect_whole_batch({1, 4, 2}); }

/// Without it the statistics are those of each rank.
TEST(SyncBatchNorm, IsOffUnlessItIsSet) {
  const Result whole = run(0, images, nullptr), part = run(0, 3, nullptr);
  EXPECT_GT(std::abs(part.out[0] - whole.out[0]), 1e-3f);
}

}  // namespace
}  // namespace rz
