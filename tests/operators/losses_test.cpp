// Runs: ci host operators

// Losses of distillation and of users' models, in f32, f16 and bf16: against definitions in double, gradients
// against finite differences, with row strides, in place, and through a tape.

#include "autograd_lite/losses.h"

#include <cmath>
#include <limits>

#include "tests/gpu/on_device.h"
#include "tests/support/error_of.h"
#include "tests/support/reference.h"

namespace rz::test {
namespace {

using ops::ElementLoss;
using ops::Into;
using ops::LabelLoss;
using ops::SoftLoss;

double log_sum_exp(const double* x, std::size_t n) {
  double sum = 0;
  for (std::size_t i = 0; i < n; ++i) sum += std::exp(x[i]);
  return std::log(sum);
}

/// One value: the sum over rows.
double soft_reference(const Values& x, const Values& y, std::size_t v, const SoftLoss& how) {
  double total = 0;
  const double t = static_cast<double>(how.temperature);
  for (std::size_t r = 0; r < x.size() / v; ++r) {
    Values p(v), q(v);
    for (std::size_t i = 0; i < v; ++i) p[i] = x[r * v + i] / t, q[i] = y[r * v + i];
    if (how.targets == SoftLoss::logits)
      for (double& e : q) e /= t;
    const double of_p = log_sum_exp(p.data(), v), of_q = log_sum_exp(q.data(), v);
    for (std::size_t i = 0; i < v; ++i) {
      const double share = how.targets == SoftLoss::logits ? std::exp(q[i] - of_q) : q[i];
      if (share == 0) continue;
      total += share * ((how.divergence ? std::log(share) : 0) - (p[i] - of_p));
    }
  }
  return total * static_cast<double>(how.weight);
}

double label_reference(const Values& x, const std::vector<std::int32_t>& ids, std::size_t v,
                       const LabelLoss& how) {
  double total = 0;
  const double s = static_cast<double>(how.label_smoothing);
  for (std::size_t r = 0; r < ids.size(); ++r) {
    if (ids[r] == how.ignore_index) continue;
    const double log_total = log_sum_exp(&x[r * v], v);
    for (std::size_t i = 0; i < v; ++i) {
      const double q = s / static_cast<double>(v) + (static_cast<std::int32_t>(i) == ids[r] ? 1 - s : 0);
      total -= q * (x[r * v + i] - log_total);
    }
  }
  return total;
}

double element_reference(const Values& x, const Values& y, ElementLoss how) {
  double total = 0;
  for (std::size_t i = 0; i < x.size(); ++i) {
    const double p = 1 / (1 + std::exp(-x[i]));
    total += how == ElementLoss::squared_error
                 ? std::pow(x[i] - y[i], 2)
                 : -y[i] * std::log(p) - (1 - y[i]) * std::log(1 / (1 + std::exp(x[i])));
  }
  return total;
}

class Losses : public OnDevice, public testing::WithParamInterface<DType> {
 protected:
  const DType dtype = GetParam();
  Values rounded(const Values& v) const {
    return from_device(to_device(v, {v.size()}, dtype, stream), stream);
  }
  Values random(std::size_t n, unsigned seed, double range) const {
    return rounded(random_values(n, seed, range));
  }
  Tensor statistics(const Shape& s, DType t = DType::f32) const { return empty_on(stream, s, t); }
  /// A matrix in rows that are three elements longer.
  Tensor strided(const Values& values, std::size_t rows, std::size_t columns, DType t) const {
    Values all(rows * (columns + 3), NAN);
    for (std::size_t i = 0; i < values.size(); ++i)
      all[i / columns * (columns + 3) + i % columns] = values[i];
    return to_device(all, {rows, columns + 3}, t, stream).columns(0, columns);
  }
  Tensor factor() const { return to_device({0.5}, {}, DType::f32, stream); }

  /// The gradient of half the loss. A stored value is rounded once; f32 sums add a little.
  void expect_gradient(const Tensor& got, const std::function<double(const Values&)>& loss, const Values& x) {
    const Values expected = numeric_gradient([&](const Values& v) { return Values{loss(v)}; }, x, {0.5});
    const Values values = from_device(got, stream);
    const double u = dtype == DType::bf16 ? 0x1p-8 : dtype == DType::f16 ? 0x1p-11 : 0;
    ASSERT_EQ(values.size(), expected.size());
    for (std::size_t i = 0; i < values.size(); ++i)
      ASSERT_NEAR(values[i], expected[i], u * std::abs(expected[i]) + 2e-6) << i;
  }
  void expect_sums(const Tensor& loss, const Tensor& sums, double sum, double count) {
    const Values got = from_device(sums, stream);
    EXPECT_NEAR(got[0], sum, 2e-6 * (1 + std::abs(sum)));
    EXPECT_EQ(got[1], count);
    EXPECT_EQ(from_device(loss, stream)[0], static_cast<double>(static_cast<float>(got[0])));
  }
};

INSTANTIATE_TEST_SUITE_P(Types, Losses, testing::Values(DType::f32, DType::f16, DType::bf16),
                         [](const auto& info) { return std::string(name(info.param)); });

TEST_P(Losses, SoftTargets) {
  for (const auto& [n, v] : {std::array<std::size_t, 2>{1, 1}, {3, 5}, {4, 37}})
    for (const auto kind : {SoftLoss::probabilities, SoftLoss::logits})
      for (const bool divergence : {true, false})
        for (const float temperature : {1.0f, 2.5f})
          for (const DType targets_in : {dtype, DType::f32}) {
            const SoftLoss how{kind, divergence, temperature, temperature * temperature};
            const Values x = random(n * v, 1, 4);
            Values y = random(n * v, 2, 3);
            if (kind == SoftLoss::probabilities) {
              y = rounded(reference::softmax(y, v));
              y[0] = 0;  // 0 log 0 is 0; the row does not sum to 1
            }
            const Tensor logits = strided(x, n, v, dtype), targets = strided(y, n, v, targets_in);
            const Tensor loss = statistics({}), sums = statistics({2}, DType::f64), each = statistics({n}),
                         kept = statistics({n, 2});
            ops::soft_loss(loss, sums, each, kept, logits, targets, how, stream);
            const auto expected = [&](const Values& at) { return soft_reference(at, y, v, how); };
            expect_sums(loss, sums, expected(x), static_cast<double>(n));
            const Tensor d = empty_on(stream, {n, v}, dtype);
            ops::soft_loss_backward(d, logits, targets, kept, factor(), how, stream);
            expect_gradient(d, expected, x);
            const Values stored = from_device(d, stream);
            ops::soft_loss_backward(logits, logits, targets, kept, factor(), how, stream);  // in place
            EXPECT_EQ(from_device(logits, stream), stored);
          }
}

TEST_P(Losses, ADistributionHasNoDivergenceFromItself) {
  const Values x = random(3 * 40, 1, 6);
  const Tensor logits = to_device(x, {3, 40}, dtype, stream);
  const Tensor loss = statistics({}), sums = statistics({2}, DType::f64), each = statistics({3}),
               kept = statistics({3, 2});
  const SoftLoss how{.targets = SoftLoss::logits, .temperature = 3};
  ops::soft_loss(loss, sums, each, kept, logits, logits, how, stream);
  EXPECT_NEAR(from_device(loss, stream)[0], 0, 1e-6);
  const Tensor d = empty_on(stream, {3, 40}, dtype);
  ops::soft_loss_backward(d, logits, logits, kept, factor(), how, stream);
  for (const double e : from_device(d, stream)) EXPECT_NEAR(e, 0, 1e-7);
}

TEST_P(Losses, LabelSmoothingAndIgnoredTargets) {
  for (const float smoothing : {0.0f, 0.1f})
    for (const std::int32_t ignored : {-100, 2}) {
      constexpr std::size_t n = 5, v = 37;
      const LabelLoss how{smoothing, ignored};
      const Values x = random(n * v, 1, 4);
      const std::vector<std::int32_t> ids{0, 36, ignored, 7, ignored};
      const Tensor logits = strided(x, n, v, dtype), targets = to_device(ids, {n}, stream);
      const Tensor loss = statistics({}), sums = statistics({2}, DType::f64), each = statistics({n}),
                   log_sum = statistics({n});
      ops::label_loss(loss, sums, each, log_sum, logits, targets, how, stream);
      const auto expected = [&](const Values& at) { return label_reference(at, ids, v, how); };
      expect_sums(loss, sums, expected(x), 3);
      const Tensor d = empty_on(stream, {n, v}, dtype);
      ops::label_loss_backward(d, logits, log_sum, targets, factor(), how, stream);
      expect_gradient(d, expected, x);
    }
}

TEST_P(Losses, AccuracyCountsTheFirstLargest) {
  const double inf = std::numeric_limits<double>::infinity();
  const Values x{1, 5, 2, 3, 3, 0, 3, 3, 0, NAN, 1, 9, -inf, -inf, -1, 9, 8, 7};
  const Tensor logits = strided(x, 6, 3, dtype), counts = statistics({2}, DType::f64);
  const auto count = [&](const std::vector<std::int32_t>& ids, std::int32_t ignored) {
    ops::accuracy(counts, logits, to_device(ids, {6}, stream), ignored, stream);
    return from_device(counts, stream);
  };
  EXPECT_EQ(count({1, 0, 1, 2, 2, 0}, -100), (Values{4, 6}));  // ties: the first; NaN is wrong
  EXPECT_EQ(count({1, -100, 1, 2, -100, 1}, -100), (Values{1, 4}));
  EXPECT_EQ(count({1, 0, 0, 2, 2, 0}, 0), (Values{2, 3}));
}

TEST_P(Losses, ElementWiseLosses) {
  for (const ElementLoss how : {ElementLoss::squared_error, ElementLoss::binary_cross_entropy})
    for (const std::size_t n : {std::size_t{1}, std::size_t{37}, std::size_t{1031}}) {
      const Values x = random(n, 1, 4);
      Values y = random(n, 2, 1);
      for (double& e : y) e = std::abs(e);
      const Tensor a = to_device(x, {n}, dtype, stream), b = to_device(y, {n}, dtype, stream);
      const Tensor loss = statistics({}), sums = statistics({2}, DType::f64);
      ops::element_loss(loss, sums, a, b, how, stream);
      const auto expected = [&](const Values& at) { return element_reference(at, y, how); };
      expect_sums(loss, sums, expected(x), static_cast<double>(n));
      if (n > 100) continue;
      const Tensor d = empty_on(stream, {n}, dtype);
      ops::element_loss_backward(d, factor(), a, b, how, Into::overwrite, stream);
      expect_gradient(d, expected, x);
      const Tensor added = to_device(Values(n, 1), {n}, dtype, stream);
      ops::element_loss_backward(added, factor(), a, b, how, Into::accumulate, stream);
      const Values one = from_device(d, stream), sum = from_device(added, stream);
      const double u = dtype == DType::bf16 ? 0x1p-7 : dtype == DType::f16 ? 0x1p-10 : 1e-6;
      for (std::size_t i = 0; i < n; ++i) EXPECT_NEAR(sum[i], 1 + one[i], u * (1 + std::abs(one[i]))) << i;
    }
}

TEST_P(Losses, ExtremeLogitsStayFinite) {
  const double large = dtype == DType::f16 ? 6e4 : 1e30;
  const Tensor x = to_device({large, -large, 0}, {3}, dtype, stream),
               y = to_device({1, 0, 1}, {3}, dtype, stream);
  const Tensor loss = statistics({}), sums = statistics({2}, DType::f64), d = empty_on(stream, {3}, dtype);
  ops::element_loss(loss, sums, x, y, ElementLoss::binary_cross_entropy, stream);
  EXPECT_NEAR(from_device(loss, stream)[0], std::log(2.0), 1e-6);
  ops::element_loss_backward(d, factor(), x, y, ElementLoss::binary_cross_entropy, Into::overwrite, stream);
  EXPECT_EQ(from_device(d, stream), (Values{0, 0, -0.25}));
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
  EXPECT_EQ(from_device(nn::accuracy(tape, logits, targets), stream)[1], 5);
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
    const Values sums = from_device(loss.sum_count, stream);
    EXPECT_NEAR(sums[0], expected(x), 4e-6 * (1 + std::abs(sums[0])));
    EXPECT_EQ(sums[1], 3);
    EXPECT_EQ(from_device(tape.value(loss.sum), stream)[0], static_cast<double>(static_cast<float>(sums[0])));
    tape.backward(loss.sum, 0.5f);
    // two gradients, each stored in the dtype, and their sum
    const Values got = from_device(tape.grad(logits), stream),
                 gradient = numeric_gradient([&](const Values&at) { return Values{expected(at)}; }, x, {0.5});
    const double u = dtype == DType::bf16 ? 0x1p-8 : dtype == DType::f16 ? 0x1p-11 : 1e-6;
    for (std::size_t i = 0; i < got.size(); ++i) EXPECT_NEAR(got[i], gradient[i], u * 4 + 2e-6) << i;
  }
  Tape tape(stream);
  const Var logits = tape.variable(to_device(x, {n, v}, dtype, stream));
  const nn::Loss empty = nn::cross_entropy(tape, logits, ignored, plain) + nn::squared_error(tape, logits, y);
  EXPECT_EQ(from_device(empty.sum_count, stream), (Values{0, 0}));
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
    Values all = from_device(tape.grad(logits), stream);
    for (const double e : from_device(loss.sum_count, stream)) all.push_back(e);
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
  EXPECT_EQ(from_device((2.0 * made).sum_count, stream)[0], 2 * from_device(a.sum_count, stream)[0]);
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
  refuses("label_smoothing", [&] { nn::cross_entropy(tape, l, ids, LabelLoss{1.0f}); });
  refuses("squared_error", [&] { nn::squared_error(tape, l, other); });
  refuses("label_loss", [&] { nn::cross_entropy(tape, l, to_device({0}, {1}, stream), LabelLoss{}); });
  if (on_host())
    refuses("targets[1] = 3", [&] {
      nn::cross_entropy(tape, l, to_device({0, 3}, {2}, stream), LabelLoss{});
    });
}

}  // namespace
}  // namespace rz::test
