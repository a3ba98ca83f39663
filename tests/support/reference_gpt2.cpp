#include "tests/support/reference_gpt2.h"

#include <algorithm>
#include <cmath>

namespace rz::test {
namespace {

using Matrix = std::vector<double>;

/// c[m, n] += a[m, k] · b[k, n]
void multiply(Matrix& c, const double* a, const double* b, int m, int k, int n) {
  for (int i = 0; i < m; ++i)
    for (int l = 0; l < k; ++l) {
      const double factor = a[i * k + l];
      for (int j = 0; j < n; ++j) c[i * n + j] += factor * b[l * n + j];
    }
}

Matrix transposed(const Matrix& a, int rows, int columns) {
  Matrix t(a.size());
  for (int i = 0; i < rows; ++i)
    for (int j = 0; j < columns; ++j) t[j * rows + i] = a[i * columns + j];
  return t;
}

void add(Matrix& to, const Matrix& what) {
  for (std::size_t i = 0; i < to.size(); ++i) to[i] += what[i];
}

constexpr double root = 0.7978845608028653558798921198687637;  // sqrt(2 / pi)
double gelu(double x) { return 0.5 * x * (1 + std::tanh(root * (x + 0.044715 * x * x * x))); }
double gelu_slope(double x) {
  const double t = std::tanh(root * (x + 0.044715 * x * x * x));
  return 0.5 * (1 + t) + 0.5 * x * (1 - t * t) * root * (1 + 3 * 0.044715 * x * x);
}

std::string layer_name(int layer, const char* rest) {
  return "transformer.h." + std::to_string(layer) + "." + rest;
}

}  // namespace

ReferenceGpt2::ReferenceGpt2(ReferenceConfig config, ReferenceParameters values)
    : config_(config), values_(std::move(values)) {
  for (const auto& [name, value] : values_)
    gradients_[name] = first_[name] = second_[name] = Matrix(value.size());
}

Matrix ReferenceGpt2::norm(const Matrix& x, const std::string& name, Norm& kept) const {
  const int c = config_.channels;
  const Matrix &weight = values_.at(name + ".weight"), &bias = values_.at(name + ".bias");
  Matrix out(x.size());
  kept.normal.resize(x.size());
  kept.inverse_deviation.resize(tokens_);
  for (int t = 0; t < tokens_; ++t) {
    const double* row = &x[t * c];
    double mean = 0, variance = 0;
    for (int i = 0; i < c; ++i) mean += row[i] / c;
    for (int i = 0; i < c; ++i) variance += (row[i] - mean) * (row[i] - mean) / c;
    const double inverse = kept.inverse_deviation[t] = 1 / std::sqrt(variance + config_.epsilon);
    for (int i = 0; i < c; ++i) {
      kept.normal[t * c + i] = (row[i] - mean) * inverse;
      out[t * c + i] = kept.normal[t * c + i] * weight[i] + bias[i];
    }
  }
  return out;
}

Matrix ReferenceGpt2::norm_backward(const Matrix& d_out, const std::string& name, const Norm& kept) {
  const int c = config_.channels;
  const Matrix& weight = values_.at(name + ".weight");
  Matrix &d_weight = gradients_.at(name + ".weight"), &d_bias = gradients_.at(name + ".bias");
  Matrix d_x(d_out.size());
  for (int t = 0; t < tokens_; ++t) {
    double sum = 0, product = 0;
    for (int i = 0; i < c; ++i) {
      const double d = d_out[t * c + i], normal = kept.normal[t * c + i];
      d_weight[i] += d * normal;
      d_bias[i] += d;
      sum += d * weight[i] / c;
      product += d * weight[i] * normal / c;
    }
    for (int i = 0; i < c; ++i)
      d_x[t * c + i] =
          (d_out[t * c + i] * weight[i] - sum - kept.normal[t * c + i] * product) * kept.inverse_deviation[t];
  }
  return d_x;
}

Matrix ReferenceGpt2::linear(const Matrix& x, const std::string& name, int in, int out) const {
  const Matrix& bias = values_.at(name + ".bias");
  Matrix y(static_cast<std::size_t>(tokens_) * out);
  for (int t = 0; t < tokens_; ++t) std::copy(bias.begin(), bias.end(), y.begin() + t * out);
  multiply(y, x.data(), values_.at(name + ".weight").data(), tokens_, in, out);
  return y;
}

Matrix ReferenceGpt2::linear_backward(const Matrix& d_out, const Matrix& x, const std::string& name, int in,
                                      int out) {
  multiply(gradients_.at(name + ".weight"), transposed(x, tokens_, in).data(), d_out.data(), in, tokens_,
           out);
  Matrix& d_bias = gradients_.at(name + ".bias");
  for (int t = 0; t < tokens_; ++t)
    for (int j = 0; j < out; ++j) d_bias[j] += d_out[t * out + j];
  Matrix d_x(x.size());
  multiply(d_x, d_out.data(), transposed(values_.at(name + ".weight"), in, out).data(), tokens_, out, in);
  return d_x;
}

Matrix ReferenceGpt2::attend(const Matrix& qkv, Matrix& probabilities) const {
  const int c = config_.channels, width = c / config_.heads;
  probabilities.assign(static_cast<std::size_t>(config_.heads) * tokens_ * tokens_, 0);
  Matrix mixed(static_cast<std::size_t>(tokens_) * c);
  for (int h = 0; h < config_.heads; ++h)
    for (int t = 0; t < tokens_; ++t) {
      double* p = &probabilities[(h * tokens_ + t) * tokens_];
      const double* q = &qkv[t * 3 * c + h * width];
      double max = -INFINITY, sum = 0;
      for (int s = 0; s <= t; ++s) {
        const double* k = &qkv[s * 3 * c + c + h * width];
        for (int i = 0; i < width; ++i) p[s] += q[i] * k[i];
        max = std::max(max, p[s] /= std::sqrt(double(width)));
      }
      for (int s = 0; s <= t; ++s) sum += p[s] = std::exp(p[s] - max);
      for (int s = 0; s <= t; ++s) {
        p[s] /= sum;
        for (int i = 0; i < width; ++i)
          mixed[t * c + h * width + i] += p[s] * qkv[s * 3 * c + 2 * c + h * width + i];
      }
    }
  return mixed;
}

Matrix ReferenceGpt2::attend_backward(const Matrix& d_mixed, const Matrix& qkv,
                                      const Matrix& probabilities) const {
  const int c = config_.channels, width = c / config_.heads;
  Matrix d_qkv(qkv.size()), d_p(tokens_);
  for (int h = 0; h < config_.heads; ++h)
    for (int t = 0; t < tokens_; ++t) {
      const double* p = &probabilities[(h * tokens_ + t) * tokens_];
      const double* d = &d_mixed[t * c + h * width];
      double dot = 0;
      for (int s = 0; s <= t; ++s) {
        const int v = s * 3 * c + 2 * c + h * width;
        d_p[s] = 0;
        for (int i = 0; i < width; ++i) d_p[s] += d[i] * qkv[v + i], d_qkv[v + i] += p[s] * d[i];
        dot += p[s] * d_p[s];
      }
      for (int s = 0; s <= t; ++s) {
        const double d_score = p[s] * (d_p[s] - dot) / std::sqrt(double(width));
        const int q = t * 3 * c + h * width, k = s * 3 * c + c + h * width;
        for (int i = 0; i < width; ++i)
          d_qkv[q + i] += d_score * qkv[k + i], d_qkv[k + i] += d_score * qkv[q + i];
      }
    }
  return d_qkv;
}

Matrix ReferenceGpt2::block(const Matrix& x, int layer, Block& k) const {
  const int c = config_.channels;
  k.a = norm(x, layer_name(layer, "ln_1"), k.ln_1);
  k.qkv = linear(k.a, layer_name(layer, "attn.c_attn"), c, 3 * c);
  k.mixed = attend(k.qkv, k.probabilities);
  Matrix out = linear(k.mixed, layer_name(layer, "attn.c_proj"), c, c);
  add(out, x);
  k.b = norm(out, layer_name(layer, "ln_2"), k.ln_2);
  k.hidden = k.activated = linear(k.b, layer_name(layer, "mlp.c_fc"), c, 4 * c);
  for (double& value : k.activated) value = gelu(value);
  add(out, linear(k.activated, layer_name(layer, "mlp.c_proj"), 4 * c, c));
  return out;
}

Matrix ReferenceGpt2::block_backward(Matrix d_x, int layer, const Block& k) {
  const int c = config_.channels;
  Matrix d = linear_backward(d_x, k.activated, layer_name(layer, "mlp.c_proj"), 4 * c, c);
  for (std::size_t i = 0; i < d.size(); ++i) d[i] *= gelu_slope(k.hidden[i]);
  d = linear_backward(d, k.b, layer_name(layer, "mlp.c_fc"), c, 4 * c);
  add(d_x, norm_backward(d, layer_name(layer, "ln_2"), k.ln_2));
  d = linear_backward(d_x, k.mixed, layer_name(layer, "attn.c_proj"), c, c);
  d = linear_backward(attend_backward(d, k.qkv, k.probabilities), k.a, layer_name(layer, "attn.c_attn"), c,
                      3 * c);
  add(d_x, norm_backward(d, layer_name(layer, "ln_1"), k.ln_1));
  return d_x;
}

double ReferenceGpt2::sample(const std::vector<int>& tokens, double factor) {
  const int c = config_.channels, v = config_.vocabulary;
  tokens_ = static_cast<int>(tokens.size()) - 1;
  const Matrix &wte = values_.at("transformer.wte.weight"), &wpe = values_.at("transformer.wpe.weight");
  Matrix &d_wte = gradients_.at("transformer.wte.weight"), &d_wpe = gradients_.at("transformer.wpe.weight");
  Matrix x(static_cast<std::size_t>(tokens_) * c);
  for (int t = 0; t < tokens_; ++t)
    for (int i = 0; i < c; ++i) x[t * c + i] = wte[tokens[t] * c + i] + wpe[t * c + i];
  std::vector<Block> blocks(config_.layers);
  for (int l = 0; l < config_.layers; ++l) x = block(x, l, blocks[l]);
  Norm last;
  const Matrix out = norm(x, "transformer.ln_f", last);
  Matrix logits(static_cast<std::size_t>(tokens_) * v);
  multiply(logits, out.data(), transposed(wte, v, c).data(), tokens_, c, v);

  double loss = 0;
  for (int t = 0; t < tokens_; ++t) {
    double* row = &logits[t * v];
    const double max = *std::max_element(row, row + v), target = row[tokens[t + 1]];
    double sum = 0;
    for (int j = 0; j < v; ++j) sum += row[j] = std::exp(row[j] - max);
    loss += std::log(sum) + max - target;
    for (int j = 0; j < v; ++j) row[j] *= factor / sum;
    row[tokens[t + 1]] -= factor;
  }
  multiply(d_wte, transposed(logits, tokens_, v).data(), out.data(), v, tokens_, c);
  Matrix d(out.size());
  multiply(d, logits.data(), wte.data(), tokens_, v, c);
  d = norm_backward(d, "transformer.ln_f", last);
  for (int l = config_.layers; l-- > 0;) d = block_backward(std::move(d), l, blocks[l]);
  for (int t = 0; t < tokens_; ++t)
    for (int i = 0; i < c; ++i) d_wte[tokens[t] * c + i] += d[t * c + i], d_wpe[t * c + i] += d[t * c + i];
  return loss;
}

double ReferenceGpt2::forward_backward(std::span<const std::vector<int>> samples) {
  for (auto& [name, gradient] : gradients_) std::fill(gradient.begin(), gradient.end(), 0);
  double count = 0, sum = 0;
  for (const auto& s : samples) count += static_cast<double>(s.size() - 1);
  for (const auto& s : samples) sum += sample(s, 1 / count);
  return sum / count;
}

void ReferenceGpt2::adamw(const std::string& name, Matrix& value, const Matrix& gradient) {
  const double correction1 = 1 - std::pow(config_.beta1, updates_),
               correction2 = 1 - std::pow(config_.beta2, updates_);
  const bool decays = name.ends_with(".weight") && name.find("ln_") == std::string::npos;
  Matrix &m = first_[name], &v = second_[name];
  for (std::size_t i = 0; i < value.size(); ++i) {
    const double g = gradient[i];
    if (decays) value[i] *= 1 - config_.lr * config_.weight_decay;
    m[i] = config_.beta1 * m[i] + (1 - config_.beta1) * g;
    v[i] = config_.beta2 * v[i] + (1 - config_.beta2) * g * g;
    value[i] -= config_.lr / correction1 * m[i] / (std::sqrt(v[i] / correction2) + config_.adam_epsilon);
  }
}

ReferenceGpt2::Update ReferenceGpt2::update(std::span<const std::vector<int>> samples) {
  return update(samples, [this](const std::string& name, Matrix& value, const Matrix& gradient) {
    adamw(name, value, gradient);
  });
}

ReferenceGpt2::Update ReferenceGpt2::update(std::span<const std::vector<int>> samples, const Rule& rule) {
  const double loss = forward_backward(samples);
  double squares = 0;
  for (const auto& [name, gradient] : gradients_)
    for (const double g : gradient) squares += g * g;
  const double norm = std::sqrt(squares);
  const double factor = config_.clip > 0 ? std::min(1.0, config_.clip / (norm + 1e-6)) : 1;
  ++updates_;
  for (auto& [name, value] : values_) {
    Matrix& gradient = gradients_[name];
    for (double& g : gradient) g *= factor;
    rule(name, value, gradient);
  }
  return {loss, norm};
}

}  // namespace rz::test
