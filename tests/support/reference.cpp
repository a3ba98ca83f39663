#include "tests/support/reference.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <numbers>
#include <random>

namespace rz::test {

Values random_values(std::size_t n, unsigned seed, double range) {
  std::mt19937_64 engine(seed);
  std::uniform_real_distribution<float> draw(static_cast<float>(-range), static_cast<float>(range));
  Values v(n);
  for (double& x : v) x = draw(engine);
  return v;
}

Tensor tensor_of(const Values& v, Shape shape) {
  const Tensor t = Tensor::empty(shape);
  std::copy(v.begin(), v.end(), t.data<float>());
  return t;
}

Tensor tokens_of(const std::vector<std::int32_t>& v, Shape shape) {
  const Tensor t = Tensor::empty(shape, DType::i32);
  std::copy(v.begin(), v.end(), t.data<std::int32_t>());
  return t;
}

Values values_of(const Tensor& t) { return Values(t.data<float>(), t.data<float>() + t.count()); }

void expect_close(const Tensor& got, const Values& expected, double tolerance, const char* what) {
  ASSERT_EQ(got.count(), expected.size()) << what;
  double max = 1e-30, worst = 0;
  std::size_t at = 0;
  for (const double e : expected) max = std::max(max, std::abs(e));
  for (std::size_t i = 0; i < expected.size(); ++i) {
    const double error = std::abs(got.data<float>()[i] - expected[i]);
    if (!(error <= worst)) worst = error, at = i;
  }
  EXPECT_LE(worst, tolerance * max) << what << ": element " << at << " is " << got.data<float>()[at]
                                    << ", expected " << expected[at];
}

Values numeric_gradient(const Function& f, const Values& x, const Values& d_out) {
  const auto value = [&](const Values& at) {
    const Values y = f(at);
    double sum = 0;
    for (std::size_t i = 0; i < y.size(); ++i) sum += y[i] * d_out[i];
    return sum;
  };
  Values gradient(x.size()), moved = x;
  for (std::size_t i = 0; i < x.size(); ++i) {
    const double step = 1e-5;
    moved[i] = x[i] + step;
    const double above = value(moved);
    moved[i] = x[i] - step;
    gradient[i] = (above - value(moved)) / (2 * step);
    moved[i] = x[i];
  }
  return gradient;
}

namespace reference {

namespace {
Values each(Values v, double (*f)(double)) {
  std::transform(v.begin(), v.end(), v.begin(), f);
  return v;
}
}  // namespace

Values gelu(const Values& v) {
  return each(v, [](double x) {
    return 0.5 * x * (1 + std::tanh(std::sqrt(2 / std::numbers::pi) * (x + 0.044715 * x * x * x)));
  });
}
Values relu(const Values& v) {
  return each(v, [](double x) { return std::max(x, 0.0); });
}
Values tanh(const Values& v) {
  return each(v, [](double x) { return std::tanh(x); });
}

Values matmul(const Values& a, const Values& b, std::size_t m, std::size_t n, std::size_t k) {
  Values out(m * n);
  for (std::size_t i = 0; i < m; ++i)
    for (std::size_t l = 0; l < k; ++l)
      for (std::size_t j = 0; j < n; ++j) out[i * n + j] += a[i * k + l] * b[l * n + j];
  return out;
}

Values transpose(const Values& a, std::size_t rows, std::size_t columns) {
  Values out(a.size());
  for (std::size_t i = 0; i < rows; ++i)
    for (std::size_t j = 0; j < columns; ++j) out[j * rows + i] = a[i * columns + j];
  return out;
}

Values linear(const Values& x, const Values& weight, const Values& bias, std::size_t rows, std::size_t in,
              std::size_t out) {
  Values y = matmul(x, weight, rows, out, in);
  for (std::size_t i = 0; i < y.size() && !bias.empty(); ++i) y[i] += bias[i % out];
  return y;
}

Values layer_norm(const Values& x, const Values& weight, const Values& bias, double epsilon) {
  const std::size_t c = weight.size();
  Values out(x.size());
  for (std::size_t first = 0; first < x.size(); first += c) {
    double mean = 0, variance = 0;
    for (std::size_t j = 0; j < c; ++j) mean += x[first + j] / static_cast<double>(c);
    for (std::size_t j = 0; j < c; ++j) variance += std::pow(x[first + j] - mean, 2) / static_cast<double>(c);
    for (std::size_t j = 0; j < c; ++j)
      out[first + j] = (x[first + j] - mean) / std::sqrt(variance + epsilon) * weight[j] + bias[j];
  }
  return out;
}

Values rms_norm(const Values& x, const Values& weight, double epsilon) {
  const std::size_t c = weight.size();
  Values out(x.size());
  for (std::size_t first = 0; first < x.size(); first += c) {
    double squares = 0;
    for (std::size_t j = 0; j < c; ++j) squares += std::pow(x[first + j], 2);
    for (std::size_t j = 0; j < c; ++j)
      out[first + j] = x[first + j] / std::sqrt(squares / static_cast<double>(c) + epsilon) * weight[j];
  }
  return out;
}

Values softmax(const Values& x, std::size_t columns) {
  Values out(x.size());
  for (std::size_t first = 0; first < x.size(); first += columns) {
    const double max = *std::max_element(&x[first], &x[first] + columns);
    double total = 0;
    for (std::size_t j = 0; j < columns; ++j) total += out[first + j] = std::exp(x[first + j] - max);
    for (std::size_t j = 0; j < columns; ++j) out[first + j] /= total;
  }
  return out;
}

Values causal_attention(const Values& qkv, std::size_t batch, std::size_t tokens, std::size_t channels,
                        std::size_t heads, const Values& factors) {
  const std::size_t size = channels / heads;
  Values out(batch * tokens * channels);
  for (std::size_t b = 0; b < batch; ++b)
    for (std::size_t h = 0; h < heads; ++h)
      for (std::size_t t = 0; t < tokens; ++t) {
        const auto part = [&](std::size_t token, std::size_t which) {
          return &qkv[((b * tokens + token) * 3 + which) * channels + h * size];
        };
        Values scores(t + 1);
        for (std::size_t s = 0; s <= t; ++s)
          for (std::size_t j = 0; j < size; ++j)
            scores[s] += part(t, 0)[j] * part(s, 1)[j] / std::sqrt(static_cast<double>(size));
        scores = softmax(scores, t + 1);
        if (!factors.empty())
          for (std::size_t s = 0; s <= t; ++s)
            scores[s] *= factors[((b * heads + h) * tokens + t) * tokens + s];
        for (std::size_t s = 0; s <= t; ++s)
          for (std::size_t j = 0; j < size; ++j)
            out[(b * tokens + t) * channels + h * size + j] += scores[s] * part(s, 2)[j];
      }
  return out;
}

Values cross_entropy(const Values& logits, std::span<const std::int32_t> targets) {
  const std::size_t v = logits.size() / targets.size();
  Values losses(targets.size());
  for (std::size_t i = 0; i < targets.size(); ++i) {
    if (targets[i] == -100) continue;
    const double* row = &logits[i * v];
    const double max = *std::max_element(row, row + v);
    double total = 0;
    for (std::size_t j = 0; j < v; ++j) total += std::exp(row[j] - max);
    losses[i] = std::log(total) + max - row[targets[i]];
  }
  return losses;
}

}  // namespace reference
}  // namespace rz::test
