#include "autograd_lite/ops.h"

#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <vector>

#include "autograd_lite/image_ops.h"
#include "autograd_lite/losses.h"
#include "tests/autograd/gradients.h"

/// What the tape adds to operators; their gradients are in recorded_ops_test.cpp.
namespace rz::nn {
namespace {

TEST(Ops, ALinearLayerWithALowRankUpdate) {
  const Tensor x = random({2, 3, 5}, "x"), bias = random({4}, "bias"), other = random({2, 3, 5}, "other"),
               a = random({2, 5}, "a"), b = random({4, 2}, "b");
  for (const auto layout : {WeightLayout::in_out, WeightLayout::out_in}) {
    const Tensor w = random(layout == WeightLayout::in_out ? Shape{5, 4} : Shape{4, 5}, "w");
    Tape tape;
    const auto constant = [&](const Tensor& t) { return tape.constant(t); };
    const Tensor all = tape.value(linear_low_rank(tape, constant(x), constant(w), constant(bias), layout,
                                                  {constant(other), constant(a), constant(b), 0.75f}));
    const Tensor base = tape.value(linear(tape, constant(x), constant(w), constant(bias), layout));
    for (std::size_t row = 0; row < 6; ++row)
      for (std::size_t o = 0; o < 4; ++o) {
        double sum = 0;
        for (std::size_t k = 0; k < 2; ++k)
          for (std::size_t i = 0; i < 5; ++i)
            sum += double{b.data<float>()[o * 2 + k]} * a.data<float>()[k * 5 + i] *
                   other.data<float>()[row * 5 + i];
        EXPECT_NEAR(all.data<float>()[row * 4 + o], base.data<float>()[row * 4 + o] + 0.75 * sum, 2e-6);
      }
  }
}

Var two_layers(Tape& t, const std::vector<Var>& v, WeightLayout layout) {
  return linear(t, linear_gelu(t, v[0], v[1], v[2], layout), v[3], v[4], layout);
}

TEST(Ops, FusedGeluHasTheBitsOfSeparateLayers) {
  const std::vector<Tensor> inputs{random({6, 5}, "x"), random({5, 4}, "w1"), random({4}, "b1"),
                                   random({4, 3}, "w2"), random({3}, "b2")};
  const auto gradients = [&](bool fused) {
    Tape tape;
    std::vector<Var> v;
    for (const Tensor& t : inputs) v.push_back(tape.variable(t));
    constexpr auto layout = WeightLayout::in_out;
    Var loss;
    weighed(tape,
            fused ? two_layers(tape, v, layout)
                  : linear(tape, gelu(tape, linear(tape, v[0], v[1], v[2], layout)), v[3], v[4], layout),
            &loss);
    std::vector<float> all{*tape.value(loss).data<float>()};
    tape.backward(loss);
    for (const Var input : v) {
      const Tensor g = tape.grad(input);
      all.insert(all.end(), g.data<float>(), g.data<float>() + g.count());
    }
    return all;
  };
  EXPECT_EQ(gradients(true), gradients(false));
}

TEST(Ops, DropoutFollowsASeedThatIsReadLate) {
  const auto run = [](const auto& set_seed) {
    Tape tape;
    set_seed(tape);
    const Tensor ones = Tensor::empty({2, 8, 3 * 16});
    std::fill_n(ones.data<float>(), ones.count(), 1.0f);
    const Tensor x = tape.value(dropout(tape, causal_attention(tape, tape.variable(ones), 2, 0.3f), 0.3f));
    return std::vector<float>(x.data<float>(), x.data<float>() + x.count());
  };
  std::uint64_t word = 5;
  const auto there = [&](Tape& tape) { tape.seed_at(&word); };
  const auto five = run(there);
  EXPECT_EQ(five, run([](Tape& tape) { tape.seed(5); }));
  word = 6;
  EXPECT_EQ(run(there), run([](Tape& tape) { tape.seed(6); }));
  EXPECT_NE(five, run(there));
}

TEST(Ops, DropoutKeepsAndDropsTheSameElementsInBackward) {
  Tape tape;
  tape.seed(3);
  Tensor ones = Tensor::empty({64, 64});
  std::fill_n(ones.data<float>(), ones.count(), 1.0f);
  const Var x = tape.variable(ones);
  const Var first = dropout(tape, x, 0.25f), second = dropout(tape, x, 0.25f);
  const Tensor a = tape.value(first), b = tape.value(second);
  std::size_t kept = 0, same = 0;
  for (std::size_t i = 0; i < a.count(); ++i) {
    kept += a.data<float>()[i] != 0;
    same += a.data<float>()[i] == b.data<float>()[i];
  }
  EXPECT_NEAR(static_cast<double>(kept) / static_cast<double>(a.count()), 0.75, 0.03);
  EXPECT_LT(same, a.count() * 3 / 4);  // each dropout of a pass has its own range
  tape.backward(mse(tape, first, Tensor::zeros({64, 64})));
  // The loss is mean(f²) with f = m·x, so that df = 2 f m / n = 2 m² / n.
  const Tensor d = tape.grad(x);
  for (std::size_t i = 0; i < a.count(); ++i) {
    const float m = a.data<float>()[i];
    EXPECT_FLOAT_EQ(d.data<float>()[i], 2 * m * m / 4096) << i;
  }
  tape.reset();
  EXPECT_THROW(dropout(tape, tape.constant(ones), 1.0f), Error);
}

/// The range that dropout consumes is that of the probabilities, so that the next dropout has other numbers.
TEST(Ops, DropoutOfAttentionHasItsOwnRange) {
  Tape tape;
  const Tensor q = random({2, 3, 4}, "q"), k = random({2, 7, 2}, "k");
  const AttentionOptions options{.heads = 2, .kv_heads = 1, .keys = 5};
  const std::uint64_t before = tape.next_random_range(1);
  attention(tape, tape.constant(q), tape.constant(k), tape.constant(k), options, 0.5f);
  EXPECT_GE(tape.next_random_range(1) - before, 1 + 2 * 2 * 3 * 5u);
}

TEST(Ops, CrossEntropyCountsWhatIsNotIgnored) {
  const Tensor logits = random({5, 7}, "logits"), targets = integers({5}, {3, -100, 0, 6, -100});
  Tape tape;
  const auto out = cross_entropy(tape, tape.constant(logits), targets);
  double sum = 0;
  for (const std::size_t row : {0, 2, 3}) {
    double total = 0;
    for (std::size_t i = 0; i < 7; ++i) total += std::exp(double{logits.data<float>()[row * 7 + i]});
    const auto target = static_cast<std::size_t>(targets.data<std::int32_t>()[row]);
    sum += std::log(total) - logits.data<float>()[row * 7 + target];
  }
  EXPECT_EQ(out.read(tape.stream()).count, 3u);
  EXPECT_NEAR(out.read(tape.stream()).sum, sum, 1e-6);
  EXPECT_FLOAT_EQ(tape.value(out.sum).data<float>()[0], static_cast<float>(sum));
}

TEST(Ops, CrossEntropyOfNothingIsZero) {
  Tape tape;
  const Var logits = tape.variable(random({2, 3}, "logits"));
  const auto out = cross_entropy(tape, logits, integers({2}, {-100, -100}));
  tape.backward(out.sum);
  EXPECT_EQ(tape.value(out.sum).data<float>()[0], 0);
  for (int i = 0; i < 6; ++i) EXPECT_EQ(tape.grad(logits).data<float>()[i], 0);
}

TEST(Ops, WhatDoesNotFitIsRefused) {
  Tape tape;
  EXPECT_THROW(mse(tape, tape.variable(random({4}, "y")), random({3, 4}, "target")), Error);
  EXPECT_THROW(causal_attention(tape, tape.constant(random({2, 4, 18}, "qkv")), 2, 1.0f), Error);
}

}  // namespace
}  // namespace rz::nn
