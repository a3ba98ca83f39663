// Operators of images on a tape: autocast, and layers.
#include "autograd_lite/image_ops.h"

#include <gtest/gtest.h>

#include "autograd_lite/nn/containers.h"
#include "autograd_lite/nn/image_layers.h"
#include "tests/autograd/gradients.h"
#include "tests/support/error_of.h"

namespace rz::nn {
namespace {

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
