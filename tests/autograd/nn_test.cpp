#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <vector>

#include "autograd_lite/nn/image_layers.h"
#include "autograd_lite/nn/init.h"
#include "autograd_lite/nn/layers.h"

namespace rz {
namespace {

enum class Activation { relu, tanh };

/// Two layers.
struct Mlp : Module {
  Mlp(std::size_t in, std::size_t hidden, std::size_t out, Activation activation)
      : first(*this, "first", in, hidden), second(*this, "second", hidden, out), activation(activation) {}

  Var operator()(Tape& tape, const Tensor& x) {
    const Var y = first(tape, x);
    return second(tape, activation == Activation::relu ? nn::relu(tape, y) : nn::tanh(tape, y));
  }

  nn::Linear first, second;
  Activation activation;
};

/// Two layers with the same name.
struct Namesakes final : Module {
  nn::Linear first{*this, "layer", 2, 3}, second{*this, "layer", 3, 2};
};

TEST(Module, TwoParametersOfOneNameAreRefusedBeforeTheyHaveValues) {
  Namesakes module;
  for (const auto& build : std::initializer_list<std::function<void()>>{[&] { allocate_parameters(module); },
                                                                        [&] { init_parameters(module, 1); }})
    try {
      build();
      FAIL() << "accepted";
    } catch (const Error& e) {
      EXPECT_EQ(e.code(), Errc::invalid_argument);
      EXPECT_NE(std::string(e.what()).find("two parameters are called layer.weight"), std::string::npos)
          << e.what();
    }
  EXPECT_FALSE(module.first.weight.value.defined());
}

struct Normed final : Module {
  nn::RmsNorm norm{*this, "norm", 2, 0};
};

TEST(Layers, RmsNormScalesRowsByItsWeight) {
  Normed module;
  allocate_parameters(module);
  init_parameters(module, 1);
  ASSERT_EQ(module.parameters().size(), 1u);
  EXPECT_EQ(module.parameters()[0]->name, "norm.weight");
  EXPECT_EQ(module.norm.weight.value.data<float>()[1], 1);
  module.norm.weight.value.data<float>()[1] = 3;
  Tape tape;
  const auto constant = [&](float a, float b) {
    const Tensor t = Tensor::empty({1, 2});
    t.data<float>()[0] = a, t.data<float>()[1] = b;
    return tape.constant(t);
  };
  const auto expect = [&](Var v, float a, float b) {
    EXPECT_EQ(tape.value(v).data<float>()[0], a);
    EXPECT_EQ(tape.value(v).data<float>()[1], b);
  };
  expect(module.norm(tape, constant(4, -4)), 1, -3);
  const auto [sum, norm] = module.norm.add_and_norm(tape, constant(1, 1), constant(7, -9));
  expect(sum, 8, -8);
  expect(norm, 1, -3);
}

struct Attending final : Module {
  explicit Attending(double dropout = 0) : attention(*this, "attention", 6, 2, dropout) {}
  nn::MultiheadAttention attention;
};

TEST(Layers, MultiheadAttentionOfOneValueIsThatOfThreeEqualOnes) {
  Attending module;
  allocate_parameters(module);
  init_parameters(module, 1);
  std::vector<std::string> names;
  for (Parameter* p : module.parameters()) {
    names.push_back(p->name);
    p->grad = Tensor::zeros(p->shape);
  }
  EXPECT_EQ(names, (std::vector<std::string>{"attention.in_proj_weight", "attention.in_proj_bias",
                                             "attention.out_proj.weight", "attention.out_proj.bias"}));
  const float bound = std::sqrt(1.5f / 6);
  for (std::size_t i = 0; i < module.attention.in_proj_weight.count(); ++i)
    EXPECT_LE(std::abs(module.attention.in_proj_weight.value.data<float>()[i]), bound);
  for (std::size_t i = 0; i < 18; ++i)
    module.attention.in_proj_bias.value.data<float>()[i] = 0.1f * static_cast<float>(i);

  Tensor lengths = Tensor::empty({2}, DType::i32), x = Tensor::empty({2, 3, 6});
  lengths.data<std::int32_t>()[0] = 3, lengths.data<std::int32_t>()[1] = 2;
  for (std::size_t i = 0; i < x.count(); ++i)
    x.data<float>()[i] = static_cast<float>(2 * random_uniform(1, "x", i) - 1);
  using Floats = std::vector<float>;
  const auto run = [&](bool one) {
    Tape tape;
    for (Parameter* p : module.parameters()) p->grad_is_fresh = true;
    const Var q = tape.constant(x), k = one ? q : tape.constant(x), v = one ? q : tape.constant(x);
    const Var y = module.attention(tape, q, k, v, {.key_counts = lengths});
    const Tensor value = tape.value(y);
    Floats out(value.data<float>(), value.data<float>() + value.count());
    tape.backward(nn::sum(tape, y * y));
    for (Parameter* p : module.parameters())
      out.insert(out.end(), p->grad.data<float>(), p->grad.data<float>() + p->count());
    return out;
  };
  const Floats one = run(true), three = run(false);
  for (std::size_t i = 0; i < one.size(); ++i) EXPECT_NEAR(one[i], three[i], 1e-5f) << i;
  // The third token of the second sequence is padding.
  const auto first_token = [](const Floats& out) { return Floats(out.begin() + 18, out.begin() + 24); };
  x.data<float>()[2 * 3 * 6 - 1] = 9;
  EXPECT_EQ(first_token(run(true)), first_token(one));
  lengths.data<std::int32_t>()[1] = 3;
  EXPECT_NE(first_token(run(true)), first_token(one));
}

TEST(Layers, MultiheadAttentionChecksItsHeadsAndDropsInTrainingOnly) {
  Module root;
  try {
    nn::MultiheadAttention attention(root, "attention", 6, 4);
    FAIL() << "accepted";
  } catch (const Error& e) {
    EXPECT_STREQ(e.what(), "attention: 6 channels do not divide into 4 heads");
  }
  Attending module(0.5);
  allocate_parameters(module);
  init_parameters(module, 1);
  Tape tape;
  tape.seed(1);
  const Tensor ones = Tensor::empty({1, 8, 6});
  std::fill_n(ones.data<float>(), ones.count(), 1.0f);
  const auto first = [&] {
    const Var x = tape.constant(ones);
    return tape.value(module.attention(tape, x, x, x)).data<float>()[0];
  };
  const float dropped = first();
  module.eval();
  const float kept = first();
  EXPECT_NE(dropped, kept);
  EXPECT_EQ(first(), kept);
}

TEST(Layers, AConvolutionReadsDataInTheDtypeOfItsWeight) {
  Module root;
  nn::Conv2d conv(root, "conv", 1, 2, 2);
  conv.weight.value = Tensor::zeros(conv.weight.shape, DType::bf16);
  conv.bias.value = Tensor::zeros(conv.bias.shape, DType::bf16);
  Tape tape;
  EXPECT_EQ(tape.value(conv(tape, Tensor::zeros({1, 1, 3, 3}))).dtype(), DType::bf16);
  try {
    conv(tape, Tensor::zeros({1, 1, 3, 3}, DType::f64));
    FAIL() << "accepted";
  } catch (const Error& e) {
    EXPECT_STREQ(
        e.what(),
        "conv: its input [1, 1, 3, 3] is f64; a layer takes f32, f16 or bf16: convert the data before "
        "they are a dataset");
  }
}

/// Rows (a, b) with target sin(3a) · b.
struct Toy {
  Tensor inputs = Tensor::empty({64, 2}), targets = Tensor::empty({64, 1});
  Toy() {
    for (std::size_t i = 0; i < 64; ++i) {
      const double a = 2 * random_uniform(1, "a", i) - 1, b = 2 * random_uniform(1, "b", i) - 1;
      inputs.data<float>()[2 * i] = static_cast<float>(a);
      inputs.data<float>()[2 * i + 1] = static_cast<float>(b);
      targets.data<float>()[i] = static_cast<float>(std::sin(3 * a) * b);
    }
  }
};

/// Gradient descent with momentum; returns the last loss, and the first one.
std::pair<double, double> train(Activation activation) {
  Mlp model(2, 32, 1, activation);
  allocate_parameters(model);
  init_parameters(model, 11);
  std::vector<std::vector<float>> velocity;
  for (const Parameter* p : model.parameters()) velocity.emplace_back(p->count());
  const Toy toy;
  Tape tape;
  double first = 0, last = 0;
  for (int step = 0; step < 600; ++step) {
    const Var loss = nn::mse(tape, model(tape, toy.inputs), toy.targets);
    last = tape.value(loss).data<float>()[0];
    if (step == 0) first = last;
    tape.backward(loss);
    tape.reset();
    for (std::size_t k = 0; Parameter * p : model.parameters()) {
      for (std::size_t i = 0; i < p->count(); ++i) {
        velocity[k][i] = 0.9f * velocity[k][i] + p->grad.data<float>()[i];
        p->value.data<float>()[i] -= 0.1f * velocity[k][i];
      }
      p->grad_is_fresh = true;
      ++k;
    }
  }
  return {last, first};
}

TEST(Mlp, LearnsWithRelu) {
  const auto [last, first] = train(Activation::relu);
  EXPECT_LT(last, first / 50) << "from " << first;
}

TEST(Mlp, LearnsWithTanh) {
  const auto [last, first] = train(Activation::tanh);
  EXPECT_LT(last, first / 50) << "from " << first;
}

TEST(Layers, AreNamedAndShaped) {
  Module root;
  nn::Linear conv(root, "c", 3, 5, ops::WeightLayout::in_out), plain(root, "p", 3, 5),
      bare(root, "b", 3, 5, {}, false);
  EXPECT_EQ(conv.weight.shape, Shape({3, 5}));
  EXPECT_EQ(plain.weight.shape, Shape({5, 3}));
  EXPECT_EQ(plain.bias.name, "p.bias");
  EXPECT_EQ(bare.parameters().size(), 1u);
}

TEST(Layers, EmbeddingReturnsRows) {
  Module root;
  nn::Embedding table(root, "table", 4, 2);
  table.weight.value = Tensor::empty({4, 2});
  for (int i = 0; i < 8; ++i) table.weight.value.data<float>()[i] = static_cast<float>(i);
  const Tensor tokens = Tensor::empty({2}, DType::i32);
  tokens.data<std::int32_t>()[0] = 3;
  tokens.data<std::int32_t>()[1] = 1;
  Tape tape;
  const Tensor rows = tape.value(table(tape, tokens));
  EXPECT_EQ(rows.shape(), Shape({2, 2}));
  EXPECT_EQ(rows.data<float>()[0], 6);
  EXPECT_EQ(rows.data<float>()[3], 3);
}

}  // namespace
}  // namespace rz
