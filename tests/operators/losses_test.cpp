// Runs: ci host operators

// Losses in f32, f16 and bf16, on the host, there with the vectors of every target of its CPU, and on a
// device: against definitions in double, gradients against finite differences, with row strides, in place,
// and through a tape.

#include "autograd_lite/losses.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

#include "tests/operators/operator.h"
#include "tests/support/error_of.h"

namespace rz::test {
namespace {

using ops::ElementLoss;
using ops::Into;
using ops::LabelLoss;
using ops::SoftLoss;

constexpr double inf = std::numeric_limits<double>::infinity(), u = 0x1p-24;
using Ids = std::vector<std::int32_t>;

/// The share of each class of the target, in each row; nothing in ignored rows.
Values label_shares(const Ids& ids, std::size_t v, const LabelLoss& how) {
  Values q(ids.size() * v);
  const double s = static_cast<double>(how.label_smoothing);
  for (std::size_t i = 0; i < q.size(); ++i)
    if (const std::int32_t id = ids[i / v]; id != how.ignore_index)
      q[i] = s / static_cast<double>(v) + (static_cast<std::int32_t>(i % v) == id ? 1 - s : 0);
  return q;
}
Values soft_shares(const Values& y, std::size_t v, const SoftLoss& how) {
  if (how.targets == SoftLoss::probabilities) return y;
  Values q = y;
  for (double& e : q) e /= static_cast<double>(how.temperature);
  return reference::softmax(q, v);
}

double sum(const Values& v) { return std::accumulate(v.begin(), v.end(), 0.0); }
double label_reference(const Values& x, const Ids& ids, std::size_t v, const LabelLoss& how) {
  return sum(reference::soft_losses(x, label_shares(ids, v, how), v));
}
double soft_reference(const Values& x, const Values& y, std::size_t v, const SoftLoss& how) {
  return sum(reference::soft_losses(x, soft_shares(y, v, how), v, how));
}
double element_reference(const Values& x, const Values& y, ElementLoss how) {
  return sum(reference::element_losses(x, y, how));
}

class Losses : public Operators {
 protected:
  Tensor factor() const { return to_device({0.5}, {}, DType::f32, stream); }
  /// A matrix in rows that are three elements longer.
  Tensor strided(const Values& values, std::size_t rows, std::size_t columns) const {
    Values all(rows * (columns + 3), NAN);
    for (std::size_t i = 0; i < values.size(); ++i)
      all[i / columns * (columns + 3) + i % columns] = values[i];
    return place(all, {rows, columns + 3}).columns(0, columns);
  }

  /// The gradient of half the loss. A stored value is rounded once; f32 sums add a little.
  void expect_gradient(const Tensor& got, const std::function<double(const Values&)>& loss, const Values& x) {
    expect_close(got, numeric_gradient([&](const Values& v) { return Values{loss(v)}; }, x, {0.5}),
                 {0, 0, 2e-6}, "gradient");
  }
  /// The kept tensors of a loss: the loss, sums, and `more`.
  static std::vector<Kept> kept(const Shape& more) { return {{{}}, {{2}, DType::f64}, {more}}; }
  /// They are the sum of the losses and the number of terms.
  void expect_sums(const Operands& o, const Values& losses, double count, double bound) {
    const Values got = get(o.kept[1]);
    const double total = sum(losses);
    EXPECT_NEAR(got[0], total, bound * (1 + std::abs(total)));
    // A device sums the losses that it stores, the host before it rounds them to f32.
    if (o.out.count() > 1) {
      EXPECT_NEAR(got[0], sum(get(o.out)), (on_host() ? u : 1e-14) * sum(get(o.out)) + 1e-12);
    }
    EXPECT_EQ(got[1], count);
    EXPECT_EQ(get(o.kept[0])[0], static_cast<float>(got[0]));
  }
  Operator label_row(const Ids& ids, std::size_t v, double range, const LabelLoss& how, bool plain);
  Operator soft_row(std::size_t n, std::size_t v, double range, const SoftLoss& how, bool f32_targets);
};
INSTANTIATE_TEST_SUITE_P(Types, Losses, float_types, type_name);

/// `plain`: by cross_entropy().
Operator Losses::label_row(const Ids& ids, std::size_t v, double range, const LabelLoss& how, bool plain) {
  const std::size_t n = ids.size();
  const double terms =
      static_cast<double>(n) - static_cast<double>(std::count(ids.begin(), ids.end(), how.ignore_index));
  const Values q = label_shares(ids, v, how);
  const auto value = [=](const std::vector<Values>& in) { return reference::soft_losses(in[0], q, v); };
  return {.name = concat(plain ? "cross_entropy" : "label_loss", " of ", n, " x ", v, " with ",
                         how.label_smoothing),
          .in = {{random_values(n * v, 1, range), {n, v}}},
          .out = {n},
          .forward =
              [=, this](const Operands& o) {
                const Tensor targets = to_device(ids, {n}, o.stream);
                if (plain)
                  ops::cross_entropy(o.kept[0], o.kept[1], o.out, o.kept[2], o.in[0], targets, o.stream);
                else
                  ops::label_loss(o.kept[0], o.kept[1], o.out, o.kept[2], o.in[0], targets, how, o.stream);
                const Values x = get(o.in[0]);
                expect_sums(o, value({x}), terms, 2e-6);
              },
          .value = value,
          .gradients =
              {{.of = 0,
                .backward =
                    [=, this](const Operands& o, const Tensor& d, Into) {
                      const Tensor targets = to_device(ids, {n}, o.stream);
                      if (plain)
                        ops::cross_entropy_backward(d, o.in[0], o.kept[2], targets, factor(), o.stream);
                      else
                        ops::label_loss_backward(d, o.in[0], o.kept[2], targets, factor(), how, o.stream);
                    },
                .alias = Alias::input,
                .adds = false,
                .bound = plain ? Bound{0, 0, 5e-7} : Bound{0, 2e-6, 5e-7},
                .formula = [=](const std::vector<Values>& in, const Values&,
                               const Values&) { return reference::soft_loss_gradients(in[0], q, v, 0.5); }}},
          .kept = kept({n}),
          .bound = {0, 1e-6, 1e-6},
          .strides = true,
          .f32_out = true,
          .slope = 0.5,
          .bits_of_threads = true};
}

Operator Losses::soft_row(std::size_t n, std::size_t v, double range, const SoftLoss& how, bool f32_targets) {
  Values y = random_values(n * v, 2, range);
  if (how.targets == SoftLoss::probabilities) {
    y = reference::softmax(y, v);
    if (v < 100) y[0] = 0;  // 0 log 0 is 0; the row does not sum to 1
  }
  const auto value = [=](const std::vector<Values>& in) {
    return reference::soft_losses(in[0], soft_shares(in[1], v, how), v, how);
  };
  return {.name = concat("soft_loss of ", n, " x ", v, " by ", how.temperature),
          .in = {{random_values(n * v, 1, range), {n, v}}, {y, {n, v}, f32_targets}},
          .out = {n},
          .forward =
              [=, this](const Operands& o) {
                ops::soft_loss(o.kept[0], o.kept[1], o.out, o.kept[2], o.in[0], o.in[1], how, o.stream);
                expect_sums(o, value({get(o.in[0]), get(o.in[1])}), static_cast<double>(n), 2e-6);
              },
          .value = value,
          .gradients = {{.of = 0,
                         .backward =
                             [=, this](const Operands& o, const Tensor& d, Into) {
                               ops::soft_loss_backward(d, o.in[0], o.in[1], o.kept[2], factor(), how,
                                                       o.stream);
                             },
                         .alias = Alias::input,
                         .adds = false,
                         .bound = {0, 2e-6, 1e-6},
                         .formula =
                             [=](const std::vector<Values>& in, const Values&, const Values&) {
                               return reference::soft_loss_gradients(in[0], soft_shares(in[1], v, how), v,
                                                                     0.5, how);
                             }}},
          .kept = kept({n, 2}),
          .bound = {0, 2e-6, 2e-6},
          .strides = true,
          .f32_out = true,
          .slope = 0.5,
          .bits_of_threads = true};
}

TEST_P(Losses, Labels) {
  for (const auto& [n, v] : {std::array<std::size_t, 2>{1, 1}, {1, 3}, {9, 33}, {33, 40}, {4, 5003}}) {
    Ids ids(n);
    for (std::size_t i = 0; i < n; ++i)
      ids[i] = i == 2 ? -100 : static_cast<std::int32_t>((i * 31 + v - 1) % v);
    expect_right(label_row(ids, v, 8, {}, true));
  }
  for (const float smoothing : {0.0f, 0.1f})
    for (const std::int32_t ignored : {-100, 2})
      expect_right(label_row({0, 36, ignored, 7, ignored}, 37, 4, {smoothing, ignored}, false));
}

TEST_P(Losses, SoftTargets) {
  for (const auto& [n, v] : {std::array<std::size_t, 2>{1, 1}, {3, 5}, {4, 37}})
    for (const auto kind : {SoftLoss::probabilities, SoftLoss::logits})
      for (const bool divergence : {true, false})
        for (const float temperature : {1.0f, 2.5f})
          for (const bool f32_targets : {false, true})
            expect_right(
                soft_row(n, v, 4, {kind, divergence, temperature, temperature * temperature}, f32_targets));
}

/// An error of a probability is relative to it.
TEST_P(Losses, GradientsOfSmallProbabilitiesAreRelative) {
  constexpr std::size_t v = 2051;
  each_target([&] {
    const Values x = random(v, 1, 8);
    const Tensor logits = place(x, {1, v}), loss = statistics({}), sums = statistics({2}, DType::f64),
                 losses = statistics({1}), log_sum = statistics({1}),
                 d = empty_on(stream, {1, v}, DType::f32);
    const Tensor target = to_device(Ids{7}, {1}, stream);
    if (dtype != DType::f32) return;  // gradients have the type of the logits
    ops::label_loss(loss, sums, losses, log_sum, logits, target, {}, stream);
    ops::label_loss_backward(d, logits, log_sum, target, factor(), {}, stream);
    const Values got = get(d), p = reference::softmax(x, v);
    for (std::size_t i = 0; i < v; ++i)
      if (i != 7) {
        ASSERT_NEAR(got[i], 0.5 * p[i], 4e-5 * p[i]) << i;
      }
  });
}

/// By the vectors of every target of the host.
TEST_P(Losses, LongRows) {
  each_target([&] {
    for (const std::size_t v : {std::size_t{1}, std::size_t{3}, std::size_t{2051}}) {
      const auto last = static_cast<std::int32_t>(v) - 1;
      for (const float smoothing : {0.0f, 0.1f})
        expect_right(label_row({0, -100, last, last / 2, last}, v, 8, {smoothing}, false));
      for (const auto kind : {SoftLoss::probabilities, SoftLoss::logits})
        expect_right(soft_row(3, v, 8, {kind, v != 3, 2, 4}, false));
    }
    if (!on_host()) return;
    expect_right(label_row({0, -100, 50256}, 50257, 8, {0.1f}, false));
    expect_right(soft_row(2, 50257, 8, {SoftLoss::logits, true, 2, 4}, false));
  });
}

TEST_P(Losses, Elements) {
  for (const int kind : {0, 1, 2})  // 2: mean_squared_error()
    for (const std::size_t n :
         {std::size_t{1}, std::size_t{3}, std::size_t{37}, std::size_t{5001}, std::size_t{50257}}) {
      if (n == 50257 && !on_host()) continue;
      const auto how = kind == 1 ? ElementLoss::binary_cross_entropy : ElementLoss::squared_error;
      const double terms = kind == 2 ? static_cast<double>(n) : 1;
      Values y = random_values(n, 2, 1);
      for (double& e : y) e = std::abs(e);
      const auto value = [=](const std::vector<Values>& in) {
        return Values{sum(reference::element_losses(in[0], in[1], how)) / terms};
      };
      const Operator op{
          .name = concat("element loss ", kind, " of ", n),
          .in = {{random_values(n, 1, 4), {n}}, {y, {n}}},
          .out = {},
          .forward =
              [=, this](const Operands& o) {
                if (kind == 2) return ops::mean_squared_error(o.out, o.in[0], o.in[1], o.stream);
                ops::element_loss(o.out, o.kept[1], o.in[0], o.in[1], how, o.stream);
                ops::copy(o.kept[0], o.out, o.stream);
                // The host sums squares in double.
                expect_sums(o, value({get(o.in[0]), get(o.in[1])}), static_cast<double>(n),
                            kind == 0 && on_host() ? 1e-13 : 2e-6);
              },
          .value = value,
          .gradients = {{.of = 0,
                         .backward =
                             [=, this](const Operands& o, const Tensor& d, Into into) {
                               if (kind == 2)
                                 ops::mean_squared_error_backward(d, factor(), o.in[0], o.in[1], into,
                                                                  o.stream);
                               else
                                 ops::element_loss_backward(d, factor(), o.in[0], o.in[1], how, into,
                                                            o.stream);
                             },
                         .bound = kind == 2 ? Bound{2e-7} : Bound{0, 2e-6, 1e-6},  // three roundings
                         .formula =
                             [=](const std::vector<Values>& in, const Values&, const Values&) {
                               Values d;
                               for (std::size_t i = 0; i < n; ++i) {
                                 const double x = in[0][i], y = in[1][i];
                                 d.push_back(0.5 / terms *
                                             (kind == 1 ? 1 / (1 + std::exp(-x)) - y : 2 * (x - y)));
                               }
                               return d;
                             }}},
          .kept = kept({}),
          // Squares are summed in double; the logarithm is f32, with a few roundings.
          .bound = {0, kind == 1 ? 16 * u : u},
          .f32_out = true,
          .slope = 0.5,
          .bits_of_threads = true};
      n == 5001 ? each_target([&] { expect_right(op); }) : expect_right(op);
    }
}

TEST_P(Losses, ADistributionHasNoDivergenceFromItself) {
  const Values x = random(3 * 40, 1, 6);
  const Tensor logits = to_device(x, {3, 40}, dtype, stream);
  const Tensor loss = statistics({}), sums = statistics({2}, DType::f64), each = statistics({3}),
               kept = statistics({3, 2});
  const SoftLoss how{.targets = SoftLoss::logits, .temperature = 3};
  ops::soft_loss(loss, sums, each, kept, logits, logits, how, stream);
  EXPECT_NEAR(get(loss)[0], 0, 1e-6);
  const Tensor d = empty_on(stream, {3, 40}, dtype);
  ops::soft_loss_backward(d, logits, logits, kept, factor(), how, stream);
  for (const double e : get(d)) EXPECT_NEAR(e, 0, 1e-7);
}

TEST_P(Losses, AccuracyCountsTheFirstLargest) {
  const Values x{1, 5, 2, 3, 3, 0, 3, 3, 0, NAN, 1, 9, -inf, -inf, -1, 9, 8, 7};
  const Tensor logits = strided(x, 6, 3), counts = statistics({2}, DType::f64);
  const auto count = [&](const std::vector<std::int32_t>& ids, std::int32_t ignored) {
    ops::accuracy(counts, logits, to_device(ids, {6}, stream), ignored, stream);
    return get(counts);
  };
  EXPECT_EQ(count({1, 0, 1, 2, 2, 0}, -100), (Values{4, 6}));  // ties: the first; NaN is wrong
  EXPECT_EQ(count({1, -100, 1, 2, -100, 1}, -100), (Values{1, 4}));
  EXPECT_EQ(count({1, 0, 0, 2, 2, 0}, 0), (Values{2, 3}));
  ops::accuracy(counts, strided({NAN, 5}, 2, 1), to_device({0, 0}, {2}, stream), -100, stream);
  EXPECT_EQ(get(counts), (Values{1, 2})) << "NaN is wrong, if it is the only class too";
}

TEST_P(Losses, ExtremeLogitsStayFinite) {
  const double large = dtype == DType::f16 ? 6e4 : 1e30;
  const Tensor x = to_device({large, -large, 0}, {3}, dtype, stream),
               y = to_device({1, 0, 1}, {3}, dtype, stream);
  const Tensor loss = statistics({}), sums = statistics({2}, DType::f64), d = empty_on(stream, {3}, dtype);
  ops::element_loss(loss, sums, x, y, ElementLoss::binary_cross_entropy, stream);
  EXPECT_NEAR(get(loss)[0], std::log(2.0), 1e-6);
  ops::element_loss_backward(d, factor(), x, y, ElementLoss::binary_cross_entropy, Into::overwrite, stream);
  EXPECT_EQ(get(d), (Values{0, 0, -0.25}));
}

/// 37 classes as 13, 13 and 11; -100 is ignored.
TEST_P(Losses, CrossEntropyOfPartsIsThatOfTheWhole) {
  constexpr std::size_t n = 5, v = 37, parts = 3, share = 13;
  const Values x = random(n * v, 1, 4);
  const std::vector<std::int32_t> ids{0, 12, -100, 13, 36};
  const Tensor targets = to_device(ids, {n}, stream), all = statistics({parts, n, 2});
  std::vector<Tensor> logits, own;
  for (std::size_t p = 0; p < parts; ++p) {
    const std::size_t width = std::min(share, v - p * share);
    Values part;
    for (std::size_t i = 0; i < n; ++i)
      for (std::size_t j = 0; j < width; ++j) part.push_back(x[i * v + p * share + j]);
    logits.push_back(place(part, {n, width}));
    own.push_back(to_device(ids, {n}, stream));
    ops::local_indices(own[p], targets, p * share, width, v, stream);
    ops::cross_entropy_part(all.view(p * n * 2, {n, 2}), logits[p], own[p], stream);
  }
  const Tensor loss = statistics({}), sums = empty_on(stream, {2}, DType::f64), losses = statistics({n}),
               log_sum = statistics({n}), d_loss = to_device(Values{0.5}, {}, DType::f32, stream);
  ops::cross_entropy_of_parts(loss, sums, losses, log_sum, all, own[1], stream);
  Values expected_losses, d_expected(n * v);
  double sum = 0;
  for (std::size_t i = 0; i < n; ++i) {
    double total = 0;
    for (std::size_t j = 0; j < v; ++j) total += std::exp(x[i * v + j]);
    const bool counts = ids[i] != -100;
    expected_losses.push_back(counts ? std::log(total) - x[i * v + static_cast<std::size_t>(ids[i])] : 0);
    sum += expected_losses.back();
    for (std::size_t j = 0; j < v && counts; ++j)
      d_expected[i * v + j] =
          0.5 * (std::exp(x[i * v + j]) / total - (j == static_cast<std::size_t>(ids[i]) ? 1 : 0));
  }
  expect_close(losses, expected_losses, {}, "losses");
  expect_close(loss, {sum}, {}, "loss");
  EXPECT_EQ(sums.on_host(stream).data<double>()[1], 4);
  for (std::size_t p = 0; p < parts; ++p) {
    ops::cross_entropy_backward(logits[p], logits[p], log_sum, own[p], d_loss, stream);
    Values part;
    for (std::size_t i = 0; i < n; ++i)
      for (std::size_t j = 0; j < logits[p].shape()[1]; ++j)
        part.push_back(d_expected[i * v + p * share + j]);
    expect_close(logits[p], part, {}, "d_logits");
  }
}

TEST_P(Losses, NothingIsCountedWhereEveryTargetIsIgnored) {
  const Tensor logits = place(random(2 * 5, 1), {2, 5}), targets = to_device({-100, -100}, {2}, stream),
               losses = statistics({2}), log_sum = statistics({2}), loss = statistics({}),
               sums = empty_on(stream, {2}, DType::f64), d_loss = to_device({1}, {}, DType::f32, stream);
  ops::cross_entropy(loss, sums, losses, log_sum, logits, targets, stream);
  EXPECT_EQ(get(loss), Values{0});
  EXPECT_EQ(get(sums), (Values{0, 0}));
  ops::cross_entropy_backward(logits, logits, log_sum, targets, d_loss, stream);
  EXPECT_EQ(get(logits), Values(10, 0.0));
}

TEST_P(Losses, WhatIsWrongInTheLogitsOrTargetsReachesTheLoss) {
  if (on_host()) GTEST_SKIP() << "the host refuses such targets";
  Values x = random_values(4 * 40, 1);
  x[7] = NAN;
  const Tensor logits = place(x, {4, 40}), targets = to_device({1, 2, 40, -1}, {4}, stream),
               losses = statistics({4}), log_sum = statistics({4}), loss = statistics({}),
               sums = empty_on(stream, {2}, DType::f64), d_loss = to_device({1}, {}, DType::f32, stream);
  ops::cross_entropy(loss, sums, losses, log_sum, logits, targets, stream);
  EXPECT_TRUE(std::isnan(get(loss)[0]));
  EXPECT_TRUE(std::isnan(get(sums)[0]));
  EXPECT_EQ(get(sums)[1], 4);
  for (std::size_t i = 0; i < 4; ++i) EXPECT_EQ(std::isnan(get(losses)[i]), i != 1) << i;
  ops::cross_entropy_backward(logits, logits, log_sum, targets, d_loss, stream);
  const Values got = get(logits);
  for (std::size_t i = 0; i < 4; ++i) EXPECT_EQ(std::isnan(got[i * 40 + 3]), i != 1) << i;
}

/// Through a tape, with leading extents: each loss has the gradient of its operator, and half of it with half
/// the factor; twice with two uses.
TEST_P(Losses, OnATape) {
  constexpr std::size_t v = 11;
  const Values x = random(2 * 3 * v, 1, 2), teacher = random(2 * 3 * v, 2, 2);
  const Values q = rounded(reference::softmax(teacher, v));
  const std::vector<std::int32_t> ids{0, 10, -100, 4, 5, 6};
  const Shape shape{2, 3, v};
  const Tensor y = to_device(teacher, shape, dtype, stream),
               probabilities = to_device(q, shape, dtype, stream), targets = to_device(ids, {2, 3}, stream);
  const SoftLoss distill{.targets = SoftLoss::logits, .temperature = 2, .weight = 4};
  struct Case {
    std::function<nn::Loss(Tape&, Var)> loss;
    std::function<double(const Values&)> expected;
    double count;
  };
  const Case cases[] = {
      {[&](Tape& t, Var l) { return nn::kl_div(t, l, y, distill); },
       [&](const Values& at) { return soft_reference(at, teacher, v, distill); }, 6},
      {[&](Tape& t, Var l) { return nn::cross_entropy(t, l, probabilities, 1.0f); },
       [&](const Values& at) { return soft_reference(at, q, v, {.divergence = false}); }, 6},
      {[&](Tape& t, Var l) { return nn::cross_entropy(t, l, targets, LabelLoss{0.2f}); },
       [&](const Values& at) { return label_reference(at, ids, v, {0.2f}); }, 5},
      {[&](Tape& t, Var l) { return nn::squared_error(t, l, y); },
       [&](const Values& at) { return element_reference(at, teacher, ElementLoss::squared_error); }, 6 * v},
      {[&](Tape& t, Var l) { return nn::binary_cross_entropy_with_logits(t, l, probabilities); },
       [&](const Values& at) { return element_reference(at, q, ElementLoss::binary_cross_entropy); }, 6 * v},
  };
  for (const Case& c : cases) {
    Tape tape(stream);
    const Var logits = tape.variable(to_device(x, shape, dtype, stream));
    const nn::Loss loss = c.loss(tape, logits);
    const ops::LossSum read = loss.read(stream);
    EXPECT_NEAR(read.sum, c.expected(x), 2e-6 * (1 + read.sum));
    EXPECT_EQ(static_cast<double>(read.count), c.count);
    tape.backward(loss.sum, 0.5f);
    EXPECT_EQ(tape.grad(logits).shape(), shape);
    expect_gradient(tape.grad(logits), c.expected, x);
  }
  Tape tape(stream);
  const Var logits = tape.constant(to_device(q, shape, dtype, stream));
  EXPECT_EQ(get(nn::accuracy(tape, logits, targets))[1], 5);
}

/// α a + β b with as many terms, with as many times more, with others, and with none: the mean is the sum of
/// the means, a loss without terms adds 0, and the gradient is that of the mean times the terms of a.
TEST_P(Losses, SumsOfLosses) {
  constexpr std::size_t n = 4, v = 11;
  constexpr double alpha = 0.3, beta = -1.7;
  const Values x = random(n * v, 1, 2), teacher = random(n * v, 2, 2);
  const std::vector<std::int32_t> ids{0, 10, -100, 4}, none(n, -100);
  const Tensor y = to_device(teacher, {n, v}, dtype, stream), targets = to_device(ids, {n}, stream),
               ignored = to_device(none, {n}, stream);
  const LabelLoss plain{}, smooth{0.25f};
  struct Case {
    std::function<nn::Loss(Tape&, Var)> b;
    std::function<double(const Values&)> mean;
  };
  const Case cases[] = {
      {[&](Tape& t, Var l) { return nn::cross_entropy(t, l, targets, smooth); },
       [&](const Values& at) { return label_reference(at, ids, v, smooth) / 3; }},
      {[&](Tape& t, Var l) { return nn::squared_error(t, l, y); },
       [&](const Values& at) {
         return element_reference(at, teacher, ElementLoss::squared_error) / (n * v);
       }},
      {[&](Tape& t, Var l) { return nn::cross_entropy(t, l, ignored, plain); },
       [&](const Values&) { return 0.0; }},
  };
  for (const Case& c : cases) {
    Tape tape(stream);
    const Var logits = tape.variable(to_device(x, {n, v}, dtype, stream));
    const nn::Loss loss = alpha * nn::cross_entropy(tape, logits, targets, plain) + c.b(tape, logits) * beta;
    const auto expected = [&](const Values& at) {
      return alpha * label_reference(at, ids, v, plain) + 3 * beta * c.mean(at);
    };
    const Values sums = get(loss.sum_count);
    EXPECT_NEAR(sums[0], expected(x), 4e-6 * (1 + std::abs(sums[0])));
    EXPECT_EQ(sums[1], 3);
    EXPECT_EQ(get(tape.value(loss.sum))[0], static_cast<double>(static_cast<float>(sums[0])));
    tape.backward(loss.sum, 0.5f);
    // two gradients, each stored in the dtype, and their sum
    const Values got = get(tape.grad(logits)),
                 gradient = numeric_gradient([&](const Values&at) { return Values{expected(at)}; }, x, {0.5});
    const double u = dtype == DType::bf16 ? 0x1p-8 : dtype == DType::f16 ? 0x1p-11 : 1e-6;
    for (std::size_t i = 0; i < got.size(); ++i) EXPECT_NEAR(got[i], gradient[i], u * 4 + 2e-6) << i;
  }
  Tape tape(stream);
  const Var logits = tape.variable(to_device(x, {n, v}, dtype, stream));
  const nn::Loss empty = nn::cross_entropy(tape, logits, ignored, plain) + nn::squared_error(tape, logits, y);
  EXPECT_EQ(get(empty.sum_count), (Values{0, 0}));
}

/// Equal numbers of terms have the bits of the losses apart.
TEST_P(Losses, ASumOfOneLossTwiceIsTwiceTheLoss) {
  const Values x = random(3 * 7, 1, 2);
  const auto run = [&](bool sum) {
    Tape tape(stream);
    const Var logits = tape.variable(to_device(x, {3, 7}, dtype, stream));
    const nn::Loss one = nn::cross_entropy(tape, logits, to_device({0, -100, 6}, {3}, stream), LabelLoss{});
    const nn::Loss loss = sum ? one + one : 2.0 * one;
    tape.backward(loss.sum, 0.5f);
    Values all = get(tape.grad(logits));
    for (const double e : get(loss.sum_count)) all.push_back(e);
    return all;
  };
  EXPECT_EQ(run(true), run(false));
}

TEST_P(Losses, SumsOfLossesNeedOneTape) {
  Tape tape(stream), other(stream);
  const auto loss_on = [&](Tape& t) {
    const Var l = t.variable(to_device(Values(6, 1), {2, 3}, dtype, stream));
    return nn::squared_error(t, l, to_device(Values(6, 1), {2, 3}, dtype, stream));
  };
  const nn::Loss a = loss_on(tape), b = loss_on(other), made{a.sum, a.sum_count}, empty;
  EXPECT_NE(std::string(error_of([&] { a + b; }).what()).find("two tapes"), std::string::npos);
  EXPECT_EQ(get((2.0 * made).sum_count)[0], 2 * get(a.sum_count)[0]);
  EXPECT_NE(std::string(error_of([&] { 2.0 * empty; }).what()).find("nn::Loss::sum"), std::string::npos);
  EXPECT_EQ(error_of([&] { NAN* a; }).code(), Errc::invalid_argument);
}

TEST_P(Losses, WrongArgumentsAreNamed) {
  Tape tape(stream);
  const Var l = tape.variable(to_device(Values(6, 1), {2, 3}, dtype, stream));
  const Tensor other = to_device(Values(6, 1), {3, 2}, dtype, stream),
               same = to_device(Values(6, 1), {2, 3}, dtype, stream), ids = to_device({0, 1}, {2}, stream);
  const auto refuses = [&](const char* word, const std::function<void()>& call) {
    const Error e = error_of(call);
    EXPECT_EQ(e.code(), Errc::invalid_argument);
    EXPECT_NE(std::string(e.what()).find(word), std::string::npos) << e.what();
  };
  refuses("kl_div", [&] { nn::kl_div(tape, l, other); });
  refuses("temperature", [&] { nn::kl_div(tape, l, same, {.temperature = 0}); });
  refuses("divergence", [&] { nn::kl_div(tape, l, same, {.divergence = false}); });
  refuses("label_smoothing", [&] { nn::cross_entropy(tape, l, ids, LabelLoss{1.0f}); });
  refuses("squared_error", [&] { nn::squared_error(tape, l, other); });
  refuses("label_loss", [&] { nn::cross_entropy(tape, l, to_device({0}, {1}, stream), LabelLoss{}); });
  if (on_host())
    refuses("targets[1] = 3", [&] {
      nn::cross_entropy(tape, l, to_device({0, 3}, {2}, stream), LabelLoss{});
    });
}

struct Outputs {
  explicit Outputs(std::size_t rows)
      : losses(Tensor::empty({rows})), log_sum(Tensor::empty({rows})), statistics(Tensor::empty({rows, 2})) {}
  Tensor loss = Tensor::empty({}), sums = Tensor::empty({2}, DType::f64), losses, log_sum, statistics;
};

/// On the host in f32, with the vectors of every target.
class LossExtremes : public Operators {
 protected:
  void SetUp() override {
    Operators::SetUp();
    if (!on_host()) GTEST_SKIP() << "the host's vectors";
  }
};
INSTANTIATE_TEST_SUITE_P(Types, LossExtremes, testing::Values(DType::f32), type_name);

TEST_P(LossExtremes, LogitsOfMinusInfinityHaveNoProbability) {
  each_target([] {
    const Values x{-inf, 1,    -inf, 2,    -inf, -inf, 0,    -inf, -inf,
                   -inf, -inf, -inf, -inf, -inf, -inf, -inf, -inf, 3};
    const std::size_t v = x.size();
    const Tensor logits = tensor_of(x, {1, v}), targets = tokens_of({3}, {1});
    Outputs out(1);
    ops::label_loss(out.loss, out.sums, out.losses, out.log_sum, logits, targets, {}, Stream());
    const double l = std::log(std::exp(1.0) + std::exp(2.0) + 1 + std::exp(3.0));
    EXPECT_NEAR(*out.loss.data<float>(), l - 2, 1e-6);
    const Tensor d = Tensor::empty({1, v});
    ops::label_loss_backward(d, logits, out.log_sum, targets, tensor_of({1}, {}), {}, Stream());
    EXPECT_EQ(d.data<float>()[0], 0);
    EXPECT_NEAR(d.data<float>()[3], std::exp(2 - l) - 1, 1e-6);

    const SoftLoss how{.targets = SoftLoss::logits};
    ops::soft_loss(out.loss, out.sums, out.losses, out.statistics, logits, logits, how, Stream());
    EXPECT_NEAR(*out.loss.data<float>(), 0, 1e-6);  // 0 log 0 is 0
    ops::soft_loss_backward(d, logits, logits, out.statistics, tensor_of({1}, {}), how, Stream());
    for (std::size_t i = 0; i < v; ++i) EXPECT_NEAR(d.data<float>()[i], 0, 1e-6);
    ops::soft_loss(out.loss, out.sums, out.losses, out.statistics, logits, tensor_of(Values(v, 0), {1, v}),
                   how, Stream());
    EXPECT_EQ(*out.loss.data<float>(), inf);  // the teacher gives weight to what is impossible
  });
}

TEST_P(LossExtremes, LargeLogits) {
  each_target([] {
    const Values x{1e4, 1e4 - 1, -1e4, 0};
    const Tensor logits = tensor_of(x, {1, 4});
    const double l = 1e4 + std::log1p(std::exp(-1.0));
    Outputs out(1);
    ops::label_loss(out.loss, out.sums, out.losses, out.log_sum, logits, tokens_of({1}, {1}), {}, Stream());
    EXPECT_NEAR(out.sums.data<double>()[0], l - (1e4 - 1), 1e-6);
    const SoftLoss how{.targets = SoftLoss::logits};
    const Tensor teacher = tensor_of({1e4, -1e4, -1e4, 1e4}, {1, 4});
    ops::soft_loss(out.loss, out.sums, out.losses, out.statistics, logits, teacher, how, Stream());
    EXPECT_NEAR(out.sums.data<double>()[0], l - 0.5 * (1e4 + 0) - std::log(2.0), 1e-2 * u * 1e8);
  });
}

TEST_P(LossExtremes, ProbabilitiesOfEverySize) {
  each_target([] {
    const Values q{0,          0x1p-149,  0x1p-127, 1e-30, 0.25,
                   0.70710678, 0.7071068, 1,        3};  // they need not sum to 1
    const std::size_t v = q.size();
    const Tensor targets = tensor_of(q, {1, v}), logits = tensor_of(Values(v, 0), {1, v});
    Outputs out(1);
    ops::soft_loss(out.loss, out.sums, out.losses, out.statistics, logits, targets, {}, Stream());
    double expected = 0;
    for (const double e : values_of(targets))
      if (e > 0) expected += e * (std::log(e) + std::log(static_cast<double>(v)));
    EXPECT_NEAR(out.sums.data<double>()[0], expected, 8 * u * expected);
    const Tensor wrong = tensor_of({-1}, {1, 1});
    ops::soft_loss(out.loss, out.sums, out.losses, out.statistics, tensor_of({0}, {1, 1}), wrong, {},
                   Stream());
    EXPECT_TRUE(std::isnan(*out.loss.data<float>()));
  });
}

TEST_P(LossExtremes, NanIsVisible) {
  each_target([] {
    Values x(40, 1);
    x[37] = NAN;
    Outputs two(2);
    Values rows = x;
    rows.resize(80, 1);
    ops::cross_entropy(two.loss, two.sums, two.losses, two.log_sum, tensor_of(rows, {2, 40}),
                       tokens_of({1, 2}, {2}), Stream());
    EXPECT_TRUE(std::isnan(two.sums.data<double>()[0]) && std::isnan(*two.loss.data<float>()));
    EXPECT_TRUE(std::isnan(two.losses.data<float>()[0]) && !std::isnan(two.losses.data<float>()[1]));
    const Tensor logits = tensor_of(x, {1, 40}), y = tensor_of(Values(40, 0.5), {1, 40});
    Outputs out(1);
    ops::label_loss(out.loss, out.sums, out.losses, out.log_sum, logits, tokens_of({0}, {1}), {}, Stream());
    EXPECT_TRUE(std::isnan(*out.loss.data<float>()));
    ops::soft_loss(out.loss, out.sums, out.losses, out.statistics, logits, y, {}, Stream());
    EXPECT_TRUE(std::isnan(*out.loss.data<float>()));
    for (const ElementLoss how : {ElementLoss::squared_error, ElementLoss::binary_cross_entropy}) {
      ops::element_loss(out.loss, out.sums, logits, y, how, Stream());
      EXPECT_TRUE(std::isnan(*out.loss.data<float>()));
    }
  });
}

}  // namespace
}  // namespace rz::test
