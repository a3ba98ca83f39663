// Operators of images on a tape: gradients against finite differences, autocast, and layers.
#include "autograd_lite/image_ops.h"

#include <gtest/gtest.h>

#include "autograd_lite/nn/containers.h"
#include "autograd_lite/nn/image_layers.h"
#include "tests/autograd/gradients.h"
#include "tests/support/error_of.h"

namespace rz::nn {
namespace {

TEST(ImageGradients, Convolutions) {
  struct Case {
    Shape x, weight;
    ops::Conv2d options;
  };
  for (const Case& c :
       std::vector<Case>{{{2, 3, 5, 6}, {4, 3, 3, 2}, {.stride = {2, 1}, .padding = {1, 0}}},
                         {{1, 4, 7, 5}, {2, 2, 3, 3}, {.padding = 1, .dilation = {2, 1}, .groups = 2}},
                         {{2, 3, 4, 4}, {6, 1, 3, 3}, {.stride = 2, .padding = 1, .groups = 3}},
                         {{2, 3, 4, 3}, {2, 3, 1, 1}, {}}}) {
    const Tensor x = random(c.x, "x"), w = random(c.weight, "w"), b = random({c.weight[0]}, "b");
    expect_gradients(
        [&](Tape& t, const std::vector<Var>& v) { return conv2d(t, v[0], v[1], v[2], c.options); },
        {x, w, b});
    expect_gradients([&](Tape& t, const std::vector<Var>& v) { return conv2d(t, v[0], v[1], {}, c.options); },
                     {x, w});
  }
}

/// Different numbers, farther from each other than a step of the differences.
Tensor distinct(const Shape& shape) {
  const Tensor t = Tensor::empty(shape);
  for (std::size_t i = 0; i < t.count(); ++i)
    t.data<float>()[i] = static_cast<float>(i * 37 % t.count()) / 8 - 3;
  return t;
}

TEST(ImageGradients, Pools) {
  const ops::Pool2d pool{.kernel = {3, 2}, .stride = {2, 1}, .padding = {1, 1}};
  expect_gradients([&](Tape& t, const std::vector<Var>& v) { return max_pool2d(t, v[0], pool); },
                   {distinct({2, 2, 5, 4})});
  expect_gradients([&](Tape& t, const std::vector<Var>& v) { return avg_pool2d(t, v[0], pool); },
                   {random({2, 2, 5, 4}, "x")});
  expect_gradients(
      [&](Tape& t, const std::vector<Var>& v) {
        return adaptive_avg_pool2d(t, v[0], {2, 3});
      },
      {random({2, 2, 5, 4}, "x")});
}

TEST(ImageGradients, Norms) {
  for (const Shape& shape : {Shape{3, 4, 3, 2}, Shape{6, 4}, Shape{2, 4, 5}}) {
    const std::vector<Tensor> inputs{random(shape, "x"), random({4}, "w"), random({4}, "b")};
    expect_gradients(
        [](Tape& t, const std::vector<Var>& v) { return batch_norm(t, v[0], v[1], v[2], {.epsilon = 0.1f}); },
        inputs, 4e-3);
    const ops::RunningStatistics running{random({4}, "mean"), Tensor::empty({4}), {}};
    std::fill_n(running.variance.data<float>(), 4, 0.5f);
    expect_gradients(
        [&](Tape& t, const std::vector<Var>& v) {
          return batch_norm(t, v[0], v[1], v[2], {.running = running, .training = false});
        },
        inputs);
    for (const std::size_t groups : {1, 2})
      expect_gradients(
          [&](Tape& t, const std::vector<Var>& v) { return group_norm(t, v[0], groups, v[1], v[2], 0.1f); },
          inputs, 4e-3);
  }
}

TEST(ImageAutocast, IsThatOfTorch) {
  Tape tape;
  tape.set_autocast(DType::bf16);
  const Var x = tape.variable(random({2, 4, 6, 6}, "x")), w = tape.variable(random({4, 4, 3, 3}, "w")),
            c = tape.variable(random({4}, "c"));
  const Var y = conv2d(tape, x, w, c);
  EXPECT_EQ(tape.value(y).dtype(), DType::bf16);
  EXPECT_EQ(tape.value(max_pool2d(tape, y, {})).dtype(), DType::bf16);
  EXPECT_EQ(tape.value(avg_pool2d(tape, y, {})).dtype(), DType::bf16);
  EXPECT_EQ(tape.value(adaptive_avg_pool2d(tape, x, 1)).dtype(), DType::f32);
  EXPECT_EQ(tape.value(batch_norm(tape, y, c, c, {})).dtype(), DType::f32);
  const Var z = group_norm(tape, y, 2, c, c, 1e-5f);
  EXPECT_EQ(tape.value(z).dtype(), DType::f32);
  tape.backward(sum(tape, z));
  EXPECT_EQ(tape.grad(w).dtype(), DType::f32);
}

struct Net : Module {
  Net() {
    layers.append<Conv2d>(4u, 6u, ops::Size2(3, 5), ops::Conv2d{.padding = 1, .groups = 2})
        .append<BatchNorm2d>(6u)
        .append<MaxPool2d>(ops::Pool2d{.kernel = 2})
        .append<GroupNorm>(3u, 6u)
        .append<AvgPool2d>(ops::Pool2d{.kernel = 2})
        .append<AdaptiveAvgPool2d>(1);
  }
  Sequential layers{*this, "layers"};
};

TEST(ImageLayers, HaveNamesAndInitialValuesOfPyTorch) {
  Net net;
  std::vector<std::string> names;
  for (const auto& [name, p] : net.named_parameters()) names.push_back(name + rz::name(p->shape));
  EXPECT_EQ(names,
            (std::vector<std::string>{"layers.0.weight[6, 2, 3, 5]", "layers.0.bias[6]", "layers.1.weight[6]",
                                      "layers.1.bias[6]", "layers.3.weight[6]", "layers.3.bias[6]"}));
  names.clear();
  for (const auto& [name, b] : persistent_buffers(net)) names.push_back(name + rz::name(b->shape));
  EXPECT_EQ(names, (std::vector<std::string>{"layers.1.running_mean[6]", "layers.1.running_var[6]",
                                             "layers.1.num_batches_tracked[]"}));
  allocate_parameters(net);
  init_parameters(net, 1);
  const float bound = 1 / std::sqrt(30.0f);
  for (const char* name : {"layers.0.weight", "layers.0.bias"}) {
    float max = 0;
    const Tensor& t = net.find(name)->value;
    for (std::size_t i = 0; i < t.count(); ++i) max = std::max(max, std::abs(t.data<float>()[i]));
    EXPECT_LE(max, bound);
    EXPECT_GT(max, bound / 2);
  }
  EXPECT_EQ(net.find("layers.1.weight")->value.data<float>()[5], 1);
  EXPECT_EQ(net.find("layers.1.bias")->value.data<float>()[5], 0);
  EXPECT_EQ(net.find("layers.3.weight")->value.data<float>()[5], 1);
  for (const auto& [name, b] : persistent_buffers(net)) {
    if (b->dtype == DType::f32) {
      EXPECT_EQ(b->value.data<float>()[0], name == "layers.1.running_var" ? 1 : 0);
    }
  }

  Tape tape;
  const Var out = net.layers(tape, tape.constant(random({2, 4, 9, 11}, "x")));
  EXPECT_EQ(tape.value(out).shape(), (Shape{2, 6, 1, 1}));
  EXPECT_THROW(GroupNorm(net, "norm", 4, 6), Error);
  EXPECT_THROW(Conv2d(net, "conv", 4, 6, 3, {.groups = 4}), Error);
}

struct Norm : Module {
  BatchNorm2d norm{*this, "norm", 1};
  BatchNorm1d rows{*this, "rows", 1, {.epsilon = 0, .momentum = std::nullopt}};
};

/// A batch {0, 2}: mean 1, unbiased variance 2.
TEST(ImageLayers, BatchNormsFollowTheMode) {
  Norm m;
  allocate_parameters(m);
  init_parameters(m, 1);
  Tape tape;
  const Tensor x = Tensor::empty({2, 1});
  x.data<float>()[0] = 0, x.data<float>()[1] = 2;
  const auto run = [&] {
    tape.reset();
    const Tensor out = tape.value(m.rows(tape, tape.constant(x)));
    return std::pair(out.data<float>()[0], out.data<float>()[1]);
  };
  EXPECT_EQ(run(), (std::pair(-1.0f, 1.0f)));
  EXPECT_EQ(*m.rows.running_mean.value.data<float>(), 1);
  EXPECT_EQ(*m.rows.running_var.value.data<float>(), 2);
  EXPECT_EQ(*m.rows.num_batches_tracked.value.data<std::int64_t>(), 1);
  m.eval();
  *m.rows.running_mean.value.data<float>() = 4;
  *m.rows.running_var.value.data<float>() = 4;
  EXPECT_EQ(run(), (std::pair(-2.0f, -1.0f)));
  EXPECT_EQ(*m.rows.num_batches_tracked.value.data<std::int64_t>(), 1);
  m.train();
  run();
  EXPECT_EQ(*m.rows.running_mean.value.data<float>(), 2.5f);
  EXPECT_EQ(*m.rows.running_var.value.data<float>(), 3);

  const auto message = [&](auto& norm, const Tensor& x) {
    return std::string(test::error_of([&] { norm(tape, tape.constant(x)); }).what());
  };
  EXPECT_NE(message(m.norm, x).find("norm: its input [2, 1] has 2 extents, expected 4"), std::string::npos);
  EXPECT_NE(message(m.rows, random({1, 1}, "x")).find("more than one value"), std::string::npos);
}

}  // namespace
}  // namespace rz::nn
