/// Autocast: which operator computes in which dtype; gradients; casts of parameters, once per pass, where
/// memory is released, and in checkpoints.
#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <optional>
#include <vector>

#include "autograd_lite/models/gpt2.h"
#include "autograd_lite/nn/init.h"
#include "autograd_lite/nn/layers.h"
#include "tests/support/error_of.h"
#include "tests/support/reference.h"

namespace rz {
namespace {

using test::Values;

constexpr auto out_in = nn::WeightLayout::out_in;
constexpr DType low_types[] = {DType::bf16, DType::f16};

/// Maximum error of rounding to nearest, relative to the value.
double unit(DType t) { return t == DType::bf16 ? 0x1p-8 : 0x1p-11; }

Tensor random(const Shape& shape, unsigned seed) {
  return test::tensor_of(test::random_values(shape.count(), seed), shape);
}

Parameter parameter(const char* name, const Shape& shape, unsigned seed) {
  Parameter p;
  p.name = name, p.shape = shape, p.value = random(shape, seed);
  return p;
}

std::vector<float> floats(const Tensor& t) {
  const Tensor wide = Tensor::empty(t.shape());
  ops::copy(wide, t, Stream());
  return {wide.data<float>(), wide.data<float>() + wide.count()};
}

// The gradient of logits takes their memory where nobody needs them any more.
TEST(Autocast, ALossDoesNotOverwriteTheCastOfAParameter) {
  Parameter table = parameter("table", {3, 4}, 1);
  Tape tape;
  const Var logits = nn::cast(tape, tape.parameter(table), DType::bf16);
  const Tensor held = tape.value(logits);
  const std::vector<float> before = floats(held);
  const Tensor targets = Tensor::empty({3}, DType::i32);
  for (std::int32_t i = 0; i < 3; ++i) targets.data<std::int32_t>()[i] = i;
  tape.backward(nn::cross_entropy(tape, logits, targets).sum);
  EXPECT_EQ(floats(held), before);
}

TEST(Autocast, CastConvertsValueAndGradient) {
  for (const DType low : low_types) {
    Tape tape;
    const Tensor x = random({5, 7}, 1);
    const Var v = tape.variable(x), narrow = nn::cast(tape, v, low);
    EXPECT_EQ(tape.value(narrow).dtype(), low);
    const Tensor rounded = Tensor::empty({5, 7}, low);
    ops::copy(rounded, x, Stream());
    EXPECT_EQ(floats(tape.value(narrow)), floats(rounded));
    EXPECT_EQ(nn::cast(tape, narrow, low).index, narrow.index) << "nothing to do";
    // sum of squares of the rounded values, in f32: the gradient is twice them, rounded to 16 bits exactly
    const Var wide = nn::cast(tape, narrow, DType::f32);
    const Var row = nn::reshape(tape, wide, {1, 35});
    tape.backward(nn::matmul(tape, row, false, row, true));
    std::vector<float> twice = floats(rounded);
    for (float& e : twice) e *= 2;
    EXPECT_EQ(tape.grad(v).dtype(), DType::f32);
    EXPECT_EQ(floats(tape.grad(v)), twice);
  }
}

/// The gradient of a parameter that is used in f32 and cast is the sum.
TEST(Autocast, GradientsOfACastAreAdded) {
  Tape tape;
  Parameter p = parameter("p", {1, 3}, 2);
  const Var v = tape.parameter(p), ones = tape.constant(test::tensor_of({1, 1, 1}, {3, 1}));
  const Var wide = nn::matmul(tape, v, false, ones, false);
  const Var low = nn::cast(tape, nn::cast(tape, v, DType::bf16), DType::f32);
  tape.backward(nn::add(tape, wide, nn::matmul(tape, low, false, ones, false)));
  EXPECT_EQ(floats(p.grad), (std::vector<float>{2, 2, 2}));
}

TEST(Autocast, OnlyDtypesOf16BitsAreAccepted) {
  Tape tape;
  EXPECT_EQ(test::error_of([&] { tape.set_autocast(DType::f32); }).code(), Errc::invalid_argument);
  EXPECT_EQ(test::error_of([&] { tape.set_autocast(DType::i32); }).code(), Errc::invalid_argument);
  EXPECT_EQ(tape.autocast(), std::nullopt);
}

TEST(Autocast, EndsWithItsGuard) {
  Tape tape;
  tape.set_autocast(DType::f16);
  {
    const Tape::Autocast inner(tape, DType::bf16);
    EXPECT_EQ(tape.autocast(), DType::bf16);
    const Tape::Autocast off(tape, std::nullopt);
    EXPECT_EQ(tape.autocast(), std::nullopt);
  }
  EXPECT_EQ(tape.autocast(), DType::f16);
  tape.reset();
  EXPECT_EQ(tape.autocast(), DType::f16) << "a setting of the tape, not of a pass";
}

/// Products compute in 16 bits; norms, softmax and losses in f32; the rest in the dtype of their inputs.
TEST(Autocast, EachOperatorHasTheDtypeOfTorch) {
  for (const DType low : low_types) {
    Tape tape;
    tape.set_autocast(low);
    const auto dtype = [&](Var v) { return tape.value(v).dtype(); };
    const Var x = tape.constant(random({4, 6}, 1)), w = tape.constant(random({6, 6}, 2)),
              v = tape.constant(random({6}, 3));
    const Var narrow = nn::linear(tape, x, w, v, out_in);
    EXPECT_EQ(dtype(narrow), low);
    EXPECT_EQ(dtype(nn::matmul(tape, x, false, w, false)), low);
    const nn::Activation act = nn::linear_gelu(tape, x, w, v, out_in);
    EXPECT_EQ(act.value.dtype(), low);
    EXPECT_EQ(dtype(nn::linear(tape, act, w, v, out_in)), low);
    const Var qkv = nn::reshape(tape, x, {1, 4, 6});
    EXPECT_EQ(dtype(nn::causal_attention(tape, qkv, 1)), low);
    EXPECT_EQ(dtype(nn::attention(tape, qkv, qkv, nn::cast(tape, qkv, low), {.heads = 2})), low);
    EXPECT_EQ(dtype(nn::rotary(tape, qkv, 1, ops::rotary_tables(6, 4))), DType::f32);
    EXPECT_EQ(dtype(nn::rotary(tape, nn::cast(tape, qkv, low), 1, ops::rotary_tables(6, 4))), low);
    for (const Var same : {nn::gelu(tape, narrow), nn::relu(tape, narrow), nn::tanh(tape, narrow),
                           nn::mul(tape, narrow, 2), nn::add(tape, narrow, narrow)})
      EXPECT_EQ(dtype(same), low);
    EXPECT_EQ(dtype(nn::gelu(tape, x)), DType::f32);
    EXPECT_EQ(dtype(nn::add(tape, narrow, x)), DType::f32) << "the wider of both";
    EXPECT_EQ(dtype(nn::mul(tape, x, narrow)), DType::f32);
    EXPECT_EQ(dtype(nn::softmax(tape, narrow)), DType::f32);
    EXPECT_EQ(dtype(nn::layer_norm(tape, narrow, v, v, 1e-5f)), DType::f32);
    const nn::SumAndNorm both = nn::add_layer_norm(tape, x, narrow, v, v, 1e-5f);
    EXPECT_EQ(dtype(both.sum), DType::f32);
    EXPECT_EQ(dtype(both.norm), DType::f32);
    EXPECT_EQ(dtype(nn::rms_norm(tape, narrow, v, 1e-5f)), DType::f32);
    const nn::SumAndNorm rms = nn::add_rms_norm(tape, x, narrow, v, 1e-5f);
    EXPECT_EQ(dtype(rms.sum), DType::f32);
    EXPECT_EQ(dtype(rms.norm), DType::f32);
    EXPECT_EQ(dtype(nn::mse(tape, narrow, random({4, 6}, 4))), DType::f32);
  }
}

/// An activation that was made in f32 is cast, too.
TEST(Autocast, AnActivationFromOutsideIsCast) {
  Tape tape;
  const Var x = tape.variable(random({4, 6}, 1)), w = tape.constant(random({6, 6}, 2));
  const nn::Activation act = nn::linear_gelu(tape, x, w, {}, out_in);
  const Var expected = [&] {
    const Var g = nn::cast(tape, nn::gelu(tape, act.pre), DType::bf16);
    return nn::linear(tape, g, nn::cast(tape, w, DType::bf16), {}, out_in);
  }();
  const Tape::Autocast on(tape, DType::bf16);
  EXPECT_EQ(floats(tape.value(nn::linear(tape, act, w, {}, out_in))), floats(tape.value(expected)));
}

/// y = W2 · relu(W1 · x + b1) against float64. With |x|, |W| ≤ 1 each rounding changes a value v by at most
/// u |v|; sums over k terms are in f32, whose own error (k 2^-24) is far below u. Rounding x, W1, b1 changes
/// each term of h by 2u (1 + u) of its magnitude at most, storing h by u: 3u of A1 = Σ|terms| to first order;
/// the second layer adds 2u for its factors and u for its result: 6u of A2 = Σ|W2| A1. 10% cover higher
/// orders.
TEST(Autocast, LayersAreWithinTheErrorOfRounding) {
  constexpr std::size_t rows = 9, in = 20, hidden = 33, out = 5;
  const Values x = test::random_values(rows * in, 1), w1 = test::random_values(in * hidden, 2),
               b1 = test::random_values(hidden, 3), w2 = test::random_values(hidden * out, 4);
  const auto absolute = [](Values v) {
    for (double& e : v) e = std::abs(e);
    return v;
  };
  const auto exact = [&](const auto& f, bool relu) {
    const Values h = test::reference::linear(f(x), f(w1), f(b1), rows, in, hidden);
    return test::reference::linear(relu ? test::reference::relu(h) : h, f(w2), {}, rows, hidden, out);
  };
  const Values expected = exact([](const Values&v) { return v; }, true), magnitude = exact(absolute, false);
  for (const DType low : low_types) {
    Tape tape;
    tape.set_autocast(low);
    constexpr auto in_out = nn::WeightLayout::in_out;
    const auto constant = [&](const Values& v, const Shape& s) {
      return tape.constant(test::tensor_of(v, s));
    };
    const Var h =
        nn::linear(tape, constant(x, {rows, in}), constant(w1, {in, hidden}), constant(b1, {hidden}), in_out);
    const Var y = nn::linear(tape, nn::relu(tape, h), constant(w2, {hidden, out}), {}, in_out);
    const std::vector<float> got = floats(tape.value(y));
    double error = 0;
    for (std::size_t i = 0; i < got.size(); ++i) {
      EXPECT_NEAR(got[i], expected[i], 1.1 * 6 * unit(low) * magnitude[i]) << name(low) << " " << i;
      error = std::max(error, std::abs(got[i] - expected[i]));
    }
    EXPECT_GT(error, 0.01 * unit(low)) << "computed in f32";
  }
}

/// A block of a network: norms, products with and without a GELU, attention and two sums.
struct Net final : Module {
  static constexpr std::size_t channels = 8;
  nn::LayerNorm norm1{*this, "norm1", channels}, norm2{*this, "norm2", channels};
  nn::Linear qkv{*this, "qkv", channels, 3 * channels}, proj{*this, "proj", channels, channels};
  nn::Linear wide{*this, "wide", channels, 32}, back{*this, "back", 32, channels};
  nn::Linear head{*this, "head", channels, 11};

  Net() {
    allocate_parameters(*this);
    init_parameters(*this, 5);
  }

  Var hidden(Tape& t, Var x) {
    const Var a = nn::causal_attention(t, qkv(t, norm1(t, x)), 2);
    const auto [sum, norm] = norm2.add_and_norm(t, x, proj(t, a));
    return nn::add(t, sum, back(t, wide.gelu(t, norm)));
  }
  nn::Loss automatic(Tape& t, Var x, const Tensor& targets) {
    return nn::cross_entropy(t, head(t, hidden(t, x)), targets);
  }
  /// The same with a cast wherever torch's autocast has one.
  nn::Loss explicit_casts(Tape& t, Var x, const Tensor& targets, DType low) {
    const auto to_low = [&](Var v) { return nn::cast(t, v, low); };
    const auto to_wide = [&](Var v) { return nn::cast(t, v, DType::f32); };
    const auto weight = [&](nn::Linear& l) { return to_low(t.parameter(l.weight)); };
    const auto bias = [&](nn::Linear& l) { return to_low(t.parameter(l.bias)); };
    const Var in = to_low(norm1(t, x)), q = weight(qkv);
    const Var a = nn::causal_attention(t, nn::linear(t, in, q, bias(qkv), out_in), 2), p = weight(proj);
    const Var projected = nn::linear(t, a, p, bias(proj), out_in);
    const auto [sum, norm] = norm2.add_and_norm(t, x, to_wide(projected));
    const Var low_norm = to_low(norm), w = weight(wide);
    const nn::Activation h = nn::linear_gelu(t, low_norm, w, bias(wide), out_in);
    const Var b = weight(back), out = nn::linear(t, h, b, bias(back), out_in);
    const Var last = to_low(nn::add(t, sum, to_wide(out))), hw = weight(head);
    return nn::cross_entropy(t, to_wide(nn::linear(t, last, hw, bias(head), out_in)), targets);
  }
};

struct Result {
  float loss;
  std::vector<std::vector<float>> gradients;  // of the input, then of the parameters
  bool operator==(const Result&) const = default;
};

using Forward = std::function<nn::Loss(Tape&, Var)>;

Result run(Net& net, Tape& tape, const Forward& forward) {
  tape.reset();
  for (Parameter* p : net.parameters()) p->grad = {}, p->grad_is_fresh = true;
  const Var x = tape.variable(random({2, 3, Net::channels}, 6));
  const Var loss = forward(tape, x).sum;
  Result r{*tape.value(loss).data<float>(), {}};
  tape.backward(loss);
  r.gradients.push_back(floats(tape.grad(x)));
  for (const Parameter* p : net.parameters()) {
    EXPECT_EQ(p->grad.dtype(), DType::f32);
    r.gradients.push_back(floats(p->grad));
  }
  return r;
}

const Tensor targets = test::tokens_of({1, 10, 4, -100, 0, 7}, {2, 3});

TEST(Autocast, HasTheBitsOfExplicitCasts) {
  Net net;
  Tape tape;
  for (const DType low : low_types) {
    const Result expected =
        run(net, tape, [&](Tape& t, Var x) { return net.explicit_casts(t, x, targets, low); });
    const Result got = run(net, tape, [&](Tape& t, Var x) {
      const Tape::Autocast on(t, low);
      return net.automatic(t, x, targets);
    });
    EXPECT_EQ(got, expected) << name(low);
    const Result full = run(net, tape, [&](Tape& t, Var x) { return net.automatic(t, x, targets); });
    EXPECT_NE(got, full);
  }
}

/// Counts what is done to parameters in forward and backward: a scope gets its memory when it is entered and
/// loses it when it is left, as in ZeRO-3, at a new place each time.
struct Releasing {
  explicit Releasing(Net& net) {
    for (Parameter* p : net.parameters()) {
      stored.push_back(p->value);
      p->hooks = &hooks;
    }
    const auto all = net.parameters();
    hooks.enter = [this, all](const Scope& scope, Pass) {
      for (std::size_t i = 0; i < all.size(); ++i)
        if (contains(scope, all[i])) {
          all[i]->value = Tensor::empty(all[i]->shape);
          ops::copy(all[i]->value, stored[i], Stream());
        }
    };
    hooks.leave = [all](const Scope& scope, Pass) {
      for (Parameter* p : all)
        if (contains(scope, p)) {
          EXPECT_EQ(p->value.use_count(), 1) << p->name << " is kept";
          std::fill_n(p->value.data<float>(), p->count(), NAN);
          p->value = {};
        }
    };
    for (Parameter* p : all) p->value = {};
  }
  static bool contains(const Scope& scope, Parameter* p) {
    return std::ranges::find(scope.parameters, p) != scope.parameters.end();
  }
  std::vector<Tensor> stored;
  ParameterHooks hooks;
};

TEST(Autocast, ReadsReleasedParametersAgain) {
  Net net;
  Tape tape;
  tape.set_autocast(DType::bf16);
  const Forward forward = [&](Tape& t, Var x) { return net.automatic(t, x, targets); };
  const Result expected = run(net, tape, forward);
  const Releasing releasing(net);
  EXPECT_EQ(run(net, tape, forward), expected);
}

/// The copies in 16 bits are released with the parameters.
TEST(Autocast, HoldsNoCastOfAReleasedParameter) {
  Net net;
  const auto held = [&] {
    Tape tape;
    const Tape::Autocast on(tape, DType::bf16);
    const Var x = tape.variable(random({2, 3, Net::channels}, 6));
    net.automatic(tape, x, targets);
    return tape.pool().statistics().in_use;
  };
  const std::size_t with_casts = held();
  const Releasing releasing(net);
  std::size_t casts = 0;
  for (const nn::Linear* l : {&net.qkv, &net.proj, &net.wide, &net.back, &net.head})
    casts += (l->weight.count() + l->bias.count()) * size_of(DType::bf16);
  EXPECT_LE(held() + casts, with_casts);
}

TEST(Autocast, CastsAParameterOnceInAScope) {
  Net net;
  Tape tape;
  tape.set_autocast(DType::bf16);
  const auto cast_of_weight = [&] { return tape.cached_cast(tape.parameter(net.head.weight), DType::bf16); };
  const Var x = tape.constant(random({3, Net::channels}, 6));
  const Var first = net.head.in_scope(tape, [&] {
    net.head(tape, x);
    const Var cast = cast_of_weight();
    EXPECT_TRUE(cast.defined());
    net.head(tape, x);
    EXPECT_EQ(cast_of_weight().index, cast.index);
    tape.set_autocast(DType::bf16);
    EXPECT_FALSE(cast_of_weight().defined());
    return cast;
  });
  const std::vector<float> before = floats(tape.value(first));
  ops::fill(net.head.weight.value, 0, Stream());
  EXPECT_EQ(floats(tape.value(first)), before) << "the parameter kept its memory, and so did the copy";
  net.head.in_scope(tape, [&] {
    EXPECT_FALSE(cast_of_weight().defined()) << "of another scope";
    return Var();
  });
  net.head(tape, x);
  tape.reset();
  EXPECT_FALSE(cast_of_weight().defined()) << "an update may have changed the parameter";
}

TEST(Autocast, ACastWithoutAGradientServesNoOtherPass) {
  Net net;
  Tape tape;
  tape.set_autocast(DType::bf16);
  const Forward forward = [&](Tape& t, Var x) { return net.automatic(t, x, targets); };
  const Result expected = run(net, tape, forward);
  EXPECT_EQ(run(net, tape,
                [&](Tape& t, Var x) {
                  {
                    const Tape::NoGrad no_grad(t);
                    net.automatic(t, x, targets);
                  }
                  return net.automatic(t, x, targets);
                }),
            expected);
}

/// Autocast is over before backward, where the checkpoint runs again.
TEST(Autocast, CheckpointsComputeTheSameAgain) {
  Net net;
  Tape tape;
  const auto forward = [&](bool checkpoint) -> Forward {
    return [&net, checkpoint](Tape& t, Var x) {
      const Tape::Autocast on(t, DType::bf16);
      const auto body = [&net, &t](Var in) { return net.head(t, net.hidden(t, in)); };
      return nn::cross_entropy(t, checkpoint ? t.checkpoint(net.norm1.scope(), x, body) : body(x), targets);
    };
  };
  const Result plain = run(net, tape, forward(false));
  EXPECT_EQ(run(net, tape, forward(true)), plain);
  EXPECT_EQ(tape.autocast(), std::nullopt);
  const Releasing releasing(net);
  EXPECT_EQ(run(net, tape, forward(true)), plain);
}

/// A parameter that is used before, in and after a checkpoint, with whole numbers: the gradient is exact.
TEST(Autocast, ACheckpointHasItsOwnCasts) {
  Tape tape;
  Parameter w;
  w.name = "w", w.shape = {2, 1}, w.value = test::tensor_of({3, 5}, {2, 1});
  const Scope scope{"scope", {&w}};
  tape.set_autocast(DType::bf16);
  const auto use = [&](Var in) { return nn::matmul(tape, in, false, tape.parameter(w), false); };
  const auto row = [&](Values v) { return tape.variable(test::tensor_of(v, {1, 2})); };
  Var sum = use(row({1, 2}));
  sum = nn::add(tape, sum, tape.checkpoint(scope, row({10, 20}), use));
  sum = nn::add(tape, sum, use(row({4, 8})));
  tape.backward(nn::cast(tape, sum, DType::f32));
  EXPECT_EQ(floats(w.grad), (std::vector<float>{15, 30}));

  tape.reset();  // only in and after the checkpoint
  w.grad_is_fresh = true;
  sum = tape.checkpoint(scope, row({10, 20}), use);
  sum = nn::add(tape, sum, use(row({4, 8})));
  tape.backward(nn::cast(tape, sum, DType::f32));
  EXPECT_EQ(floats(w.grad), (std::vector<float>{14, 28}));
}

}  // namespace
}  // namespace rz
