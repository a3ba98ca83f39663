#include "tests/support/reference.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <numbers>
#include <numeric>
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

Values norm_gradient(const Values& x, const Values& weight, const Values& d_out, double epsilon, bool layer) {
  const std::size_t c = weight.size();
  const double n = static_cast<double>(c);
  Values d(x.size());
  for (std::size_t r = 0; r < x.size(); r += c) {
    double mean = 0, variance = 0, g = 0, gn = 0;
    for (std::size_t j = 0; j < c && layer; ++j) mean += x[r + j] / n;
    for (std::size_t j = 0; j < c; ++j) variance += (x[r + j] - mean) * (x[r + j] - mean) / n;
    const double inverse = 1 / std::sqrt(variance + epsilon);
    for (std::size_t j = 0; j < c; ++j) {
      g += layer ? d_out[r + j] * weight[j] / n : 0;
      gn += d_out[r + j] * weight[j] * (x[r + j] - mean) * inverse / n;
    }
    for (std::size_t j = 0; j < c; ++j)
      d[r + j] = inverse * (d_out[r + j] * weight[j] - g - (x[r + j] - mean) * inverse * gn);
  }
  return d;
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

Values soft_losses(const Values& x, const Values& q, std::size_t v, const ops::SoftLoss& how) {
  Values all;
  const double t = static_cast<double>(how.temperature);
  for (std::size_t r = 0; r < x.size(); r += v) {
    const double shift = *std::max_element(&x[r], &x[r] + v) / t;
    double sum = 0, total = 0;
    for (std::size_t i = r; i < r + v; ++i) sum += std::exp(x[i] / t - shift);
    const double log_total = shift + std::log(sum);
    for (std::size_t i = r; i < r + v; ++i)
      if (q[i] != 0) total += q[i] * ((how.divergence ? std::log(q[i]) : 0) - x[i] / t + log_total);
    all.push_back(total * static_cast<double>(how.weight));
  }
  return all;
}
Values soft_loss_gradients(const Values& x, const Values& q, std::size_t v, double slope,
                           const ops::SoftLoss& how) {
  const double t = static_cast<double>(how.temperature);
  Values scaled = x;
  for (double& e : scaled) e /= t;
  Values d = softmax(scaled, v);
  for (std::size_t r = 0; r < x.size(); r += v) {
    const double mass = std::accumulate(&q[r], &q[r] + v, 0.0);
    for (std::size_t i = r; i < r + v; ++i)
      d[i] = slope * static_cast<double>(how.weight) / t * (mass * d[i] - q[i]);
  }
  return d;
}
Values element_losses(const Values& x, const Values& y, ops::ElementLoss how) {
  Values all;
  for (std::size_t i = 0; i < x.size(); ++i)
    all.push_back(how == ops::ElementLoss::squared_error
                      ? std::pow(x[i] - y[i], 2)
                      : std::max(x[i], 0.0) - x[i] * y[i] + std::log1p(std::exp(-std::abs(x[i]))));
  return all;
}

}  // namespace reference
}  // namespace rz::test
