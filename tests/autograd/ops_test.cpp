#include "autograd_lite/ops.h"

#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <vector>

#include "autograd_lite/image_ops.h"
#include "autograd_lite/losses.h"
#include "tests/autograd/gradients.h"

/// Every operator's backward against finite differences of its forward, through the tape: each input once as
/// a variable and, where it may be one, as a parameter whose gradient is added to.
namespace rz::nn {
namespace {

Tensor integers(const Shape& shape, std::vector<std::int32_t> values) {
  Tensor t = Tensor::empty(shape, DType::i32);
  std::copy(values.begin(), values.end(), t.data<std::int32_t>());
  return t;
}

TEST(Ops, ElementWise) {
  const Tensor a = random({3, 5}, "a"), b = random({3, 5}, "b");
  expect_gradients([](Tape& t, const auto& v) { return add(t, v[0], v[1]); }, {a, b});
  expect_gradients([](Tape& t, const auto& v) { return mul(t, v[0], v[1]); }, {a, b});
  expect_gradients([](Tape& t, const auto& v) { return mul(t, v[0], -3); }, {a});
  expect_gradients([](Tape& t, const auto& v) { return gelu(t, v[0]); }, {a});
  expect_gradients([](Tape& t, const auto& v) { return swiglu(t, v[0], v[1]); }, {a, b});
  expect_gradients([](Tape& t, const auto& v) { return swiglu(t, v[0], v[0]); }, {a});
  expect_gradients([](Tape& t, const auto& v) { return add(t, swiglu(t, v[0], v[1]), add(t, v[0], v[1])); },
                   {a, b});
  expect_gradients([](Tape& t, const auto& v) { return tanh(t, v[0]); }, {a});
  expect_gradients([](Tape& t, const auto& v) { return softmax(t, v[0]); }, {a});
  expect_gradients([](Tape& t, const auto& v) { return reshape(t, v[0], {5, 3}); }, {a});
}

TEST(Ops, ReluAwayFromItsKink) {
  Tensor x = random({4, 4}, "x");
  for (std::size_t i = 0; i < x.count(); ++i) {
    float& e = x.data<float>()[i];
    e += e < 0 ? -0.1f : 0.1f;
  }
  expect_gradients([](Tape& t, const auto& v) { return relu(t, v[0]); }, {x});
}

TEST(Ops, LinearInBothLayoutsWithAndWithoutBias) {
  const Tensor x = random({2, 3, 5}, "x"), bias = random({4}, "bias");
  for (const auto layout : {WeightLayout::in_out, WeightLayout::out_in}) {
    const Tensor w = random(layout == WeightLayout::in_out ? Shape{5, 4} : Shape{4, 5}, "w");
    expect_gradients([=](Tape& t, const auto& v) { return linear(t, v[0], v[1], v[2], layout); },
                     {x, w, bias});
    expect_gradients([=](Tape& t, const auto& v) { return linear(t, v[0], v[1], Var(), layout); }, {x, w});
    // The weight's gradient is added to and the bias's overwritten.
    expect_gradients([=](Tape& t, const auto& v) { return linear(t, v[2], v[0], v[1], layout); },
                     {w, bias, x});
  }
}

TEST(Ops, ALinearLayerWithALowRankUpdate) {
  const Tensor x = random({2, 3, 5}, "x"), bias = random({4}, "bias"), other = random({2, 3, 5}, "other"),
               a = random({2, 5}, "a"), b = random({4, 2}, "b");
  for (const auto layout : {WeightLayout::in_out, WeightLayout::out_in}) {
    const Tensor w = random(layout == WeightLayout::in_out ? Shape{5, 4} : Shape{4, 5}, "w");
    expect_gradients(
        [=](Tape& t, const auto& v) {
          return linear_low_rank(t, v[0], v[1], v[2], layout, {v[0], v[3], v[4], 0.75f});
        },
        {x, w, bias, a, b}, 4e-3);
    // Of a dropout of x, without a bias.
    expect_gradients(
        [=](Tape& t, const auto& v) {
          return linear_low_rank(t, v[0], v[1], Var(), layout, {v[2], v[3], v[4], 3});
        },
        {x, w, other, a, b}, 4e-3);
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

TEST(Ops, AnActivationEntersTheTape) {
  const Tensor x = random({2, 5}, "x"), w = random({4, 5}, "w");
  expect_gradients(
      [](Tape& t, const auto& v) {
        return tanh(t, activated(t, linear_gelu(t, v[0], v[1], Var(), WeightLayout::out_in)));
      },
      {x, w});
}

Var two_layers(Tape& t, const std::vector<Var>& v, WeightLayout layout) {
  return linear(t, linear_gelu(t, v[0], v[1], v[2], layout), v[3], v[4], layout);
}

TEST(Ops, TwoLayersWithAGeluBetween) {
  const Tensor x = random({2, 3, 5}, "x"), b1 = random({4}, "b1"), b2 = random({2}, "b2");
  for (const auto layout : {WeightLayout::in_out, WeightLayout::out_in}) {
    const auto weight = [&](std::size_t in, std::size_t out) {
      return random(layout == WeightLayout::in_out ? Shape{in, out} : Shape{out, in}, "w");
    };
    const std::vector<Tensor> inputs{x, weight(5, 4), b1, weight(4, 2), b2};
    expect_gradients([=](Tape& t, const auto& v) { return two_layers(t, v, layout); }, inputs, 4e-3);
  }
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

TEST(Ops, MatmulInEveryTransposition) {
  for (const bool ta : {false, true}) {
    for (const bool tb : {false, true}) {
      const Tensor a = random(ta ? Shape{4, 3} : Shape{3, 4}, "a"),
                   b = random(tb ? Shape{5, 4} : Shape{4, 5}, "b");
      expect_gradients([=](Tape& t, const auto& v) { return matmul(t, v[0], ta, v[1], tb); }, {a, b});
    }
  }
}

TEST(Ops, LayerNorm) {
  const Tensor x = random({3, 8}, "x"), y = random({3, 8}, "y"), w = random({8}, "w"), b = random({8}, "b");
  expect_gradients([](Tape& t, const auto& v) { return layer_norm(t, v[0], v[1], v[2], 1e-5f); }, {x, w, b},
                   5e-3);
  expect_gradients([](Tape& t, const auto& v) { return layer_norm(t, v[2], v[0], v[1], 1e-5f); }, {w, b, x},
                   5e-3);
  const Operator both = [](Tape& t, const auto& v) {
    const auto [sum, norm] = add_layer_norm(t, v[0], v[1], v[2], v[3], 1e-5f);
    return add(t, mul(t, sum, sum), norm);
  };
  expect_gradients(both, {x, y, w, b}, 5e-3);
}

TEST(Ops, RmsNorm) {
  const Tensor x = random({3, 8}, "x"), y = random({3, 8}, "y"), w = random({8}, "w");
  expect_gradients([](Tape& t, const auto& v) { return rms_norm(t, v[0], v[1], 1e-5f); }, {x, w}, 5e-3);
  expect_gradients([](Tape& t, const auto& v) { return rms_norm(t, v[1], v[0], 1e-5f); }, {w, x}, 5e-3);
  const Operator both = [](Tape& t, const auto& v) {
    const auto [sum, norm] = add_rms_norm(t, v[0], v[1], v[2], 1e-5f);
    return add(t, mul(t, sum, sum), norm);
  };
  expect_gradients(both, {x, y, w}, 5e-3);
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

TEST(Ops, Embeddings) {
  const Tensor table = random({6, 4}, "table"), positions = random({5, 4}, "positions");
  const Tensor tokens = integers({2, 3}, {0, 5, 0, 2, 2, 2});
  expect_gradients([=](Tape& t, const auto& v) { return embedding(t, tokens, v[0]); }, {table});
  expect_gradients([=](Tape& t, const auto& v) { return embedding_with_positions(t, tokens, v[0], v[1]); },
                   {table, positions});
}

TEST(Ops, CausalAttention) {
  expect_gradients([](Tape& t, const auto& v) { return causal_attention(t, v[0], 2); },
                   {random({2, 4, 3 * 6}, "qkv")});
  expect_gradients([](Tape& t, const auto& v) { return causal_attention(t, v[0], 2, 0.5f); },
                   {random({2, 4, 3 * 6}, "qkv")});
  Tape tape;
  EXPECT_THROW(causal_attention(tape, tape.constant(random({2, 4, 18}, "qkv")), 2, 1.0f), Error);
}

TEST(Ops, Attention) {
  const Tensor q = random({2, 3, 4 * 3}, "q"), k = random({2, 5, 2 * 3}, "k"), v = random({2, 5, 2 * 3}, "v");
  AttentionOptions grouped{.heads = 4, .kv_heads = 2}, cached = grouped;
  cached.causal = true, cached.past = 1, cached.window = 2, cached.keys = 4, cached.scale = 0.7f;
  cached.key_counts = integers({2}, {4, 2});
  AttentionOptions documents = cached;
  documents.window = 0, documents.key_counts = {},
  documents.document_starts = integers({2, 3}, {0, 1, 3, 1, 2, 2});
  for (const AttentionOptions& options : {grouped, cached, documents})
    for (const float dropout : {0.0f, 0.4f})
      expect_gradients(
          [=](Tape& t, const auto& x) { return attention(t, x[0], x[1], x[2], options, dropout); },
          {q, k, v});
  // Two and three inputs of one value.
  expect_gradients([](Tape& t, const auto& x) { return attention(t, x[0], x[1], x[1], {.heads = 2}); },
                   {random({1, 3, 4}, "q"), random({1, 4, 4}, "k")});
  expect_gradients([](Tape& t, const auto& x) { return attention(t, x[0], x[0], x[0], {.heads = 2}); },
                   {random({1, 3, 4}, "q")});
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

TEST(Ops, Rotary) {
  const RotaryTables tables = ops::rotary_tables(4, 9);
  const Tensor positions = integers({2, 3}, {8, 0, 3, 1, 1, 7});
  expect_gradients([=](Tape& t, const auto& x) { return rotary(t, x[0], 2, tables, 5); },
                   {random({2, 3, 2 * 5}, "x")});
  expect_gradients([=](Tape& t, const auto& x) { return rotary(t, x[0], 2, tables, 0, positions); },
                   {random({2, 3, 2 * 4}, "x")});
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
  expect_gradients([=](Tape& t, const auto& v) { return cross_entropy(t, v[0], targets).sum; }, {logits});
}

TEST(Ops, CrossEntropyOfNothingIsZero) {
  Tape tape;
  const Var logits = tape.variable(random({2, 3}, "logits"));
  const auto out = cross_entropy(tape, logits, integers({2}, {-100, -100}));
  tape.backward(out.sum);
  EXPECT_EQ(tape.value(out.sum).data<float>()[0], 0);
  for (int i = 0; i < 6; ++i) EXPECT_EQ(tape.grad(logits).data<float>()[i], 0);
}

TEST(Ops, CrossEntropyLeavesLogitsThatOthersNeed) {
  const Tensor x = random({4, 5}, "x"), targets = integers({4}, {0, 1, 2, 3});
  // The second loss' backward runs first and must not overwrite the values that the first one's gelu saved.
  const Operator op = [=](Tape& t, const auto& v) {
    const Var logits = mul(t, v[0], 2);
    const Var side = cross_entropy(t, gelu(t, logits), targets).sum;
    return add(t, side, cross_entropy(t, logits, targets).sum);
  };
  expect_gradients(op, {x});
}

TEST(Ops, Mse) {
  const Tensor target = random({3, 4}, "target");
  expect_gradients([=](Tape& t, const auto& v) { return mse(t, v[0], target); }, {random({3, 4}, "x")});
  Tape tape;
  EXPECT_THROW(mse(tape, tape.variable(random({4}, "y")), target), Error);
}

// ---- gradients in f32 of parameters in 16 bits

/// An operator, and the shapes of its inputs, all of which may be parameters.
struct Recorder {
  const char* name;
  std::vector<Shape> inputs;
  Operator run;
};

std::vector<Recorder> element_recorders() {
  std::vector<Recorder> all;
#define RZ_UNARY(name, saved, cast) \
  all.push_back({#name, {{3, 5}}, [](Tape& t, const auto& v) { return name(t, v[0]); }});
#define RZ_PARAMETRIC(name, saved, cast, parameter) \
  all.push_back({#name, {{3, 5}}, [](Tape& t, const auto& v) { return name(t, v[0], 0.75f); }});
#include "tensor/element_ops.inc"
#define RZ_BINARY(name) \
  all.push_back({#name, {{3, 5}, {5}}, [](Tape& t, const auto& v) { return name(t, v[0], v[1]); }});
#define RZ_COMPARISON(name)
#include "tensor/element_ops.inc"
  return all;
}

Tensor few_tokens() { return integers({2, 2}, {0, 2, 2, 1}); }

std::vector<Recorder> shape_recorders() {
  const Tensor tokens = few_tokens();
  return {{"gelu", {{3, 5}}, [](Tape& t, const auto& v) { return gelu(t, v[0]); }},
          {"swiglu", {{3, 5}, {3, 5}}, [](Tape& t, const auto& v) { return swiglu(t, v[0], v[1]); }},
          {"dropout", {{3, 5}}, [](Tape& t, const auto& v) { return dropout(t, v[0], 0.4f); }},
          {"softmax", {{3, 5}}, [](Tape& t, const auto& v) { return softmax(t, v[0]); }},
          {"log_softmax", {{3, 5}}, [](Tape& t, const auto& v) { return log_softmax(t, v[0]); }},
          {"clamp", {{3, 5}}, [](Tape& t, const auto& v) { return clamp(t, v[0], 0.5f, 1); }},
          {"neg", {{3, 5}}, [](Tape& t, const auto& v) { return neg(t, v[0]); }},
          {"affine", {{3, 5}}, [](Tape& t, const auto& v) { return sub(t, 2.0f, add(t, v[0], 1.0f)); }},
          {"contiguous", {{3, 5}}, [](Tape& t, const auto& v) { return contiguous(t, v[0]); }},
          {"cast", {{3, 5}}, [](Tape& t, const auto& v) { return cast(t, v[0], DType::f32); }},
          {"where",
           {{3, 5}, {5}},
           [](Tape& t, const auto& v) { return where(t, gt(t, v[0], 0.75f), v[0], v[1]); }},
          {"masked_fill",
           {{3, 5}},
           [](Tape& t, const auto& v) { return masked_fill(t, v[0], gt(t, v[0], 1), 2); }},
          {"sum", {{3, 5}}, [](Tape& t, const auto& v) { return sum(t, v[0]); }},
          {"mean", {{3, 5}}, [](Tape& t, const auto& v) { return mean(t, v[0], 0); }},
          {"expand",
           {{1, 5}},
           [](Tape& t, const auto& v) {
             return expand(t, v[0], {3, 5});
           }},
          {"reshape",
           {{3, 5}},
           [](Tape& t, const auto& v) {
             return reshape(t, v[0], {5, 3});
           }},
          {"permute",
           {{3, 5}},
           [](Tape& t, const auto& v) {
             return permute(t, v[0], {1, 0});
           }},
          {"cat",
           {{3, 5}, {2, 5}},
           [](Tape& t, const auto& v) {
             return cat(t, {v[0], v[1], v[0]}, 0);
           }},
          {"split",
           {{3, 5}},
           [](Tape& t, const auto& v) {
             return split(t, v[0], {2, 3}, 1)[1];
           }},
          {"select", {{3, 5}}, [](Tape& t, const auto& v) { return select(t, v[0], 0, 1); }},
          {"index_select", {{3, 5}}, [=](Tape& t, const auto& v) { return index_select(t, v[0], tokens); }},
          {"gather", {{3, 5}}, [](Tape& t, const auto& v) {
             return gather(t, v[0], integers({3}, {1, 4, 0}));
           }}};
}

std::vector<Recorder> matrix_recorders() {
  constexpr auto out_in = WeightLayout::out_in, in_out = WeightLayout::in_out;
  const Tensor tokens = few_tokens();
  return {
      {"linear",
       {{2, 3, 5}, {4, 5}, {4}},
       [](Tape& t, const auto& v) { return linear(t, v[0], v[1], v[2], out_in); }},
      {"linear_aligned",
       {{3, 5}, {5, 4}},
       [](Tape& t, const auto& v) { return linear_aligned(t, v[0], v[1], in_out); }},
      {"activated",
       {{3, 5}, {4, 5}, {4}},
       [](Tape& t, const auto& v) { return activated(t, linear_gelu(t, v[0], v[1], v[2], out_in)); }},
      {"linear of an activation",
       {{3, 5}, {4, 5}, {4}, {2, 4}},
       [](Tape& t, const auto& v) {
         return linear(t, linear_gelu(t, v[0], v[1], v[2], out_in), v[3], Var(), out_in);
       }},
      {"activated of a parameter",
       {{3, 5}},
       [](Tape& t, const auto& v) {
         const Tensor out = t.empty({3, 5}, t.value(v[0]).dtype());
         ops::gelu(out, t.value(v[0]), t.stream());
         return activated(t, {v[0], out});
       }},
      {"linear_low_rank",
       {{3, 5}, {4, 5}, {4}, {2, 5}, {4, 2}},
       [](Tape& t, const auto& v) {
         return linear_low_rank(t, v[0], v[1], v[2], out_in, {v[0], v[3], v[4], 2});
       }},
      {"matmul",
       {{3, 5}, {5, 4}},
       [](Tape& t, const auto& v) { return matmul(t, v[0], false, v[1], false); }},
      {"matmul, transposed",
       {{5, 3}, {4, 5}},
       [](Tape& t, const auto& v) { return matmul(t, v[0], true, v[1], true); }},
      {"matmul, batched",
       {{2, 3, 5}, {2, 5, 4}},
       [](Tape& t, const auto& v) { return matmul(t, v[0], false, v[1], false); }},
      {"matmul, one factor",
       {{2, 3, 5}, {5, 4}},
       [](Tape& t, const auto& v) { return matmul(t, v[0], false, v[1], false); }},
      {"layer_norm",
       {{3, 5}, {5}, {5}},
       [](Tape& t, const auto& v) { return layer_norm(t, v[0], v[1], v[2], 0.1f); }},
      {"add_layer_norm",
       {{3, 5}, {3, 5}, {5}, {5}},
       [](Tape& t, const auto& v) { return add_layer_norm(t, v[0], v[1], v[2], v[3], 0.1f).norm; }},
      {"rms_norm", {{3, 5}, {5}}, [](Tape& t, const auto& v) { return rms_norm(t, v[0], v[1], 0.1f); }},
      {"add_rms_norm",
       {{3, 5}, {3, 5}, {5}},
       [](Tape& t, const auto& v) { return add_rms_norm(t, v[0], v[1], v[2], 0.1f).norm; }},
      {"embedding", {{3, 5}}, [=](Tape& t, const auto& v) { return embedding(t, tokens, v[0]); }},
      {"embedding_with_positions",
       {{3, 5}, {2, 5}},
       [=](Tape& t, const auto& v) { return embedding_with_positions(t, tokens, v[0], v[1]); }},
      {"attention",
       {{1, 3, 8}, {1, 3, 4}, {1, 3, 4}},
       [](Tape& t, const auto& v) {
         return attention(t, v[0], v[1], v[2], {.heads = 2, .kv_heads = 1, .causal = true});
       }},
      {"causal_attention", {{1, 3, 12}}, [](Tape& t, const auto& v) { return causal_attention(t, v[0], 2); }},
      {"rotary", {{1, 3, 8}}, [](Tape& t, const auto& v) {
         return rotary(t, v[0], 2, ops::rotary_tables(4, 3));
       }}};
}

/// As if another rank had the first of two parts, of which all numbers are 1/4.
const std::function<Tensor(Tape&, const Tensor&)> second_of_two = [](Tape& t, const Tensor& x) {
  const Tensor all = t.empty({2, x.shape()[0], x.shape()[1]}, x.dtype());
  ops::fill(all, 0.25f, {});
  ops::copy(all.view(x.count(), x.shape()), x, {});
  return all;
};

std::vector<Recorder> loss_recorders() {
  const Tensor targets = integers({3}, {1, 4, -100}), later = integers({3}, {6, 2, -100});
  return {{"cross_entropy of a part",
           {{3, 5}},
           [=](Tape& t, const auto& v) {
             return cross_entropy(t, v[0], later, ClassPart{5, 10, 2, second_of_two}).sum;
           }},
          {"gather_classes",
           {{3, 5}},
           [](Tape& t, const auto& v) {
             return gather_classes(t, v[0], {5, 10, 2, second_of_two});
           }},
          {"cross_entropy",
           {{3, 5}},
           [=](Tape& t, const auto& v) { return cross_entropy(t, v[0], targets).sum; }},
          {"cross_entropy, smoothed",
           {{3, 5}},
           [=](Tape& t, const auto& v) { return cross_entropy(t, v[0], targets, ops::LabelLoss{0.1f}).sum; }},
          {"kl_div",
           {{3, 5}},
           [](Tape& t, const auto& v) {
             return kl_div(t, v[0], random({3, 5}, "y"), {.targets = ops::SoftLoss::logits}).sum;
           }},
          {"squared_error",
           {{3, 5}},
           [](Tape& t, const auto& v) {
             return squared_error(t, v[0], random({3, 5}, "y")).sum;
           }},
          {"mse",
           {{3, 5}},
           [](Tape& t, const auto& v) {
             return mse(t, v[0], t.value(cast(t, t.constant(random({3, 5}, "y")), t.value(v[0]).dtype())));
           }},
          {"a loss and a scalar", {{3, 5}, {1}}, [=](Tape& t, const auto& v) {
             return (0.5 * cross_entropy(t, v[0], targets) + v[1]).sum;
           }}};
}

std::vector<Recorder> image_recorders() {
  const ops::Pool2d pool{.kernel = {2, 2}, .stride = {1, 1}};
  return {{"conv2d",
           {{1, 2, 4, 4}, {3, 2, 3, 3}, {3}},
           [](Tape& t, const auto& v) { return conv2d(t, v[0], v[1], v[2]); }},
          {"conv2d by channel",
           {{1, 2, 4, 4}, {2, 1, 3, 3}},
           [](Tape& t, const auto& v) { return conv2d(t, v[0], v[1], Var(), {.groups = 2}); }},
          {"max_pool2d", {{1, 2, 4, 4}}, [=](Tape& t, const auto& v) { return max_pool2d(t, v[0], pool); }},
          {"avg_pool2d", {{1, 2, 4, 4}}, [=](Tape& t, const auto& v) { return avg_pool2d(t, v[0], pool); }},
          {"adaptive_avg_pool2d",
           {{1, 2, 4, 4}},
           [](Tape& t, const auto& v) {
             return adaptive_avg_pool2d(t, v[0], {2, 2});
           }},
          {"batch_norm",
           {{2, 3, 4}, {3}, {3}},
           [](Tape& t, const auto& v) { return batch_norm(t, v[0], v[1], v[2], {.epsilon = 0.1f}); }},
          {"group_norm", {{2, 4, 3}, {4}, {4}}, [](Tape& t, const auto& v) {
             return group_norm(t, v[0], 2, v[1], v[2], 0.1f);
           }}};
}

/// From 1/4 to 5/4, in 16 bits.
std::vector<Tensor> inputs_of(const Recorder& of, DType dtype) {
  std::vector<Tensor> all;
  for (const Shape& shape : of.inputs) {
    const Tensor x = random(shape, concat(of.name, all.size()));
    for (float& e : std::span(x.data<float>(), x.count())) e = 0.75f + e / 2;
    all.push_back(Tensor::empty(shape, dtype));
    ops::copy(all.back(), x, {});
  }
  return all;
}

void backward_of(const Recorder& of, Tape& tape, const std::vector<Var>& inputs) {
  Var loss;
  weighed(tape, cast(tape, of.run(tape, inputs), DType::f32), &loss);
  tape.backward(loss);
}

void expect_wider(const Recorder& of, DType dtype) {
  SCOPED_TRACE(concat(of.name, " of ", name(dtype)));
  const std::vector<Tensor> inputs = inputs_of(of, dtype);
  Tape tape;
  std::vector<Var> vars;
  for (const Tensor& t : inputs) vars.push_back(tape.variable(t));
  backward_of(of, tape, vars);
  std::vector<Tensor> expected;
  for (const Var v : vars) {
    expected.push_back(Tensor::empty(tape.grad(v).shape()));
    ops::copy(expected.back(), tape.grad(v), {});
  }
  for (const bool fresh : {false, true}) {  // of the first; the others are the reverse
    tape.reset();
    std::vector<Parameter> parameters(inputs.size());
    for (std::size_t k = 0; k < inputs.size(); ++k) {
      Parameter& p = parameters[k];
      p.name = concat(of.name, k), p.shape = inputs[k].shape(), p.value = inputs[k];
      p.grad = Tensor::empty(p.shape);
      std::fill_n(p.grad.data<float>(), p.count(), 0.5f);
      p.grad_is_fresh = fresh == (k == 0);
      vars[k] = tape.parameter(p);
    }
    ASSERT_NO_THROW(backward_of(of, tape, vars));
    for (std::size_t k = 0; k < inputs.size(); ++k)
      for (std::size_t i = 0; i < inputs[k].count(); ++i) {
        const double wanted = expected[k].data<float>()[i], offset = fresh == (k == 0) ? 0 : 0.5;
        ASSERT_NEAR(parameters[k].grad.data<float>()[i] - offset, wanted, 0x1p-6 * (1 + std::abs(wanted)))
            << "input " << k << ", element " << i;
      }
  }
}

TEST(Ops, GradientsOfParametersMayBeWider) {
  for (const auto& list :
       {element_recorders(), shape_recorders(), matrix_recorders(), loss_recorders(), image_recorders()})
    for (const Recorder& recorder : list)
      for (const DType dtype : {DType::bf16, DType::f16}) expect_wider(recorder, dtype);
}

}  // namespace
}  // namespace rz::nn
