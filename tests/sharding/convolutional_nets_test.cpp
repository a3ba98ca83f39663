/// Nets of convolutions on several ranks: batch norms over ranks have the results of the whole batch on one
/// rank, and every strategy trains with the same bits.
#include <gtest/gtest.h>

#include "autograd_lite/nn/image_layers.h"
#include "autograd_lite/nn/init.h"
#include "autograd_lite/nn/layers.h"
#include "sharding/optim/optimizers.h"
#include "sharding/parallel/collectives.h"
#include "sharding/strategy/strategy.h"
#include "tests/autograd/gradients.h"
#include "tests/lab/group.h"

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
  lab::group(ranks, [&](Communicator& c) {
    std::size_t begin = 0;
    for (int r = 0; r < c.rank(); ++r) begin += images_of_rank[static_cast<std::size_t>(r)];
    const std::size_t count = images_of_rank[static_cast<std::size_t>(c.rank())];
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

// ---- training

struct Classifier : Module {
  nn::Conv2d stem{*this, "stem", 2, 8, 3, {.padding = 1}};
  nn::BatchNorm2d norm{*this, "norm", 8};
  nn::Conv2d depthwise{*this, "depthwise", 8, 8, 3, {.stride = 2, .padding = 1, .groups = 8}, false};
  nn::GroupNorm groups{*this, "groups", 2, 8};
  nn::Conv2d point{*this, "point", 8, 12, 1};
  nn::Linear head{*this, "head", 12, 3};

  Var logits(Tape& t, Var x) {
    x = nn::max_pool2d(t, nn::relu(t, norm(t, stem(t, x))), {.kernel = 3, .stride = 2, .padding = 1});
    x = nn::relu(t, point(t, groups(t, depthwise(t, x))));
    return head(t, nn::reshape(t, nn::adaptive_avg_pool2d(t, x, 1), {t.value(x).shape()[0], 12}));
  }
};

struct Trained {
  std::vector<double> losses;
  std::vector<float> values;
  bool operator==(const Trained&) const = default;
};

/// Images whose class is where they are bright.
Trained train(StrategyKind kind, Communicator& c) {
  Classifier net;
  const auto strategy = make_strategy(kind, net, c);
  functional::sync_batch_norm(net, c);
  strategy->values().fill([](const Parameter& p, Range elements, float* out) {
    init_slice(p, {out, elements.count()}, elements.begin, 1);
  });
  constexpr std::size_t batch = 6, size = 9;
  const Tensor x = nn::random({batch, 2, size, size}, "images" + std::to_string(c.rank()));
  const Tensor classes = Tensor::empty({batch}, DType::i32);
  for (std::size_t i = 0; i < batch; ++i) {
    const std::size_t k = (i + static_cast<std::size_t>(c.rank())) % 3;
    classes.data<std::int32_t>()[i] = static_cast<std::int32_t>(k);
    for (std::size_t j = 0; j < 2 * size * size; ++j)
      if (j % size / 3 == k) x.data<float>()[i * 2 * size * size + j] += 1;
  }
  Tape tape;
  strategy->attach(tape);
  strategy->settings().set_expected_terms(static_cast<double>(batch) * c.size());
  const auto adamw = make_adamw({.learning_rate = 0.02});
  Trained out;
  for (int update = 0; update < 20; ++update) {
    strategy->zero_grad();
    const nn::Loss loss = nn::cross_entropy(tape, net.logits(tape, tape.constant(x)), classes);
    strategy->backward(tape, loss);
    out.losses.push_back(loss.read({}).sum);
    tape.reset();
    strategy->finish_gradients();
    strategy->clip_and_step(*adamw, {.max_norm = 1});
  }
  for (const Parameter* p : net.parameters()) {
    const auto values = floats(strategy->values().whole(*p));
    out.values.insert(out.values.end(), values.begin(), values.end());
  }
  for (const Tensor& t : {net.norm.running_mean.value, net.norm.running_var.value})
    for (const float v : floats(t)) out.values.push_back(v);
  return out;
}

TEST(ConvolutionalNets, TrainWithTheSameBitsInEveryStrategy) {
  lab::group(2, [](Communicator& c) {
    const Trained expected = train(StrategyKind::ddp, c);
    EXPECT_LT(expected.losses.back(), expected.losses.front() / 2);
    for (const StrategyKind kind : {StrategyKind::zero1, StrategyKind::zero2, StrategyKind::zero3})
      EXPECT_TRUE(train(kind, c) == expected) << name(kind) << " on rank " << c.rank();
  });
}

}  // namespace
}  // namespace rz
