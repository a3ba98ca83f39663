#include "tests/support/reference_optimizers.h"

#include <algorithm>
#include <cmath>

namespace rz::test {
namespace {

using Values = std::vector<double>;

/// Calls f(p, g, first, second) for each element.
template <class F>
void each(ReferenceState& r, const Values& g, const F& f) {
  for (std::size_t i = 0; i < g.size(); ++i) f(r.p[i], g[i], r.first[i], r.second[i]);
}

/// The gradient of what is minimised.
double minimised(double gradient, bool maximize) { return maximize ? -gradient : gradient; }

double norm_of(const Values& x) {
  double sum = 0;
  for (const double v : x) sum += v * v;
  return std::sqrt(sum);
}

/// a[n, k] · b[k, m]
Values product(const Values& a, const Values& b, std::size_t n, std::size_t k, std::size_t m) {
  Values out(n * m);
  for (std::size_t i = 0; i < n; ++i)
    for (std::size_t j = 0; j < k; ++j)
      for (std::size_t l = 0; l < m; ++l) out[i * m + l] += a[i * k + j] * b[j * m + l];
  return out;
}

Values transposed(const Values& a, std::size_t rows, std::size_t columns) {
  Values out(a.size());
  for (std::size_t i = 0; i < rows; ++i)
    for (std::size_t j = 0; j < columns; ++j) out[j * rows + i] = a[i * columns + j];
  return out;
}

Values orthogonalized(Values x, std::size_t rows, std::size_t columns, int steps) {
  const double norm = norm_of(x) + 1e-7;
  for (double& v : x) v /= norm;
  for (int step = 0; step < steps; ++step) {
    const Values a = product(x, transposed(x, rows, columns), rows, columns, rows);
    Values b = product(a, a, rows, rows, rows);
    for (std::size_t i = 0; i < b.size(); ++i) b[i] = -4.7750 * a[i] + 2.0315 * b[i];
    const Values bx = product(b, x, rows, rows, columns);
    for (std::size_t i = 0; i < x.size(); ++i) x[i] = 3.4445 * x[i] + bx[i];
  }
  return x;
}

}  // namespace

void sgd_rule(ReferenceState& r, const Values& g, const SgdOptions& o, double rate, int t) {
  each(r, g, [&](double& p, double x, double& buf, double&) {
    x = minimised(x, o.maximize) + o.weight_decay * p;
    buf = t == 1 ? x : o.momentum * buf + (1 - o.dampening) * x;
    p -= rate * (o.nesterov ? x + o.momentum * buf : buf);
  });
}

void adam_rule(ReferenceState& r, const Values& g, const AdamOptions& o, bool decoupled, double rate, int t) {
  r.third.resize(g.size());
  auto largest = r.third.begin();
  each(r, g, [&](double& p, double x, double& m, double& v) {
    x = minimised(x, o.maximize);
    if (decoupled)
      p *= 1 - rate * o.weight_decay;
    else
      x += o.weight_decay * p;
    m = o.beta1 * m + (1 - o.beta1) * x;
    v = o.beta2 * v + (1 - o.beta2) * x * x;
    *largest = std::max(*largest, v);
    const double second = (o.amsgrad ? *largest : v) / (1 - std::pow(o.beta2, t));
    ++largest;
    p -= rate * (m / (1 - std::pow(o.beta1, t))) / (std::sqrt(second) + o.epsilon);
  });
}

void lion_rule(ReferenceState& r, const Values& g, const LionOptions& o, double rate) {
  each(r, g, [&](double& p, double x, double& m, double&) {
    const double c = o.beta1 * m + (1 - o.beta1) * x;
    p = p * (1 - rate * o.weight_decay) - rate * (c > 0 ? 1 : c < 0 ? -1 : 0);
    m = o.beta2 * m + (1 - o.beta2) * x;
  });
}

void adagrad_rule(ReferenceState& r, const Values& g, const AdagradOptions& o, double rate, int t) {
  if (t == 1) r.first.assign(g.size(), o.initial_accumulator);
  each(r, g, [&](double& p, double x, double& sum, double&) {
    x = minimised(x, o.maximize) + o.weight_decay * p;
    sum += x * x;
    p -= rate / (1 + (t - 1) * o.lr_decay) * x / (std::sqrt(sum) + o.epsilon);
  });
}

void rmsprop_rule(ReferenceState& r, const Values& g, const RmspropOptions& o, double rate) {
  r.third.resize(g.size());
  auto mean = r.third.begin();
  each(r, g, [&](double& p, double x, double& square, double& buf) {
    x = minimised(x, o.maximize) + o.weight_decay * p;
    square = o.alpha * square + (1 - o.alpha) * x * x;
    *mean = o.alpha * *mean + (1 - o.alpha) * x;
    const double variance = o.centered ? square - *mean * *mean : square;
    ++mean;
    const double u = x / (std::sqrt(variance) + o.epsilon);
    buf = o.momentum * buf + u;
    p -= rate * buf;
  });
}

void lamb_rule(ReferenceState& r, const Values& g, const LambOptions& o, double rate, int t) {
  Values u;
  each(r, g, [&](double& p, double x, double& m, double& v) {
    m = o.beta1 * m + (1 - o.beta1) * x;
    v = o.beta2 * v + (1 - o.beta2) * x * x;
    u.push_back(m / (o.eps_inside_sqrt ? std::sqrt(v + o.epsilon) : std::sqrt(v) + o.epsilon) +
                o.weight_decay * p);
  });
  const double of_values = norm_of(r.p), of_update = norm_of(u);
  double trust = 1;
  if (of_values != 0 && of_update != 0) trust = std::clamp(of_values / of_update, o.min_coeff, o.max_coeff);
  const double correction = std::sqrt(1 - std::pow(o.beta2, t)) / (1 - std::pow(o.beta1, t));
  const double step = rate * (o.bias_correction ? correction : 1);
  for (std::size_t i = 0; i < u.size(); ++i) r.p[i] -= step * trust * u[i];
}

void muon_rule(ReferenceState& r, const Values& g, const MuonOptions& o, double rate) {
  Values d;
  each(r, g, [&](double&, double x, double& m, double&) {
    m = o.momentum * m + (1 - o.momentum) * x;
    d.push_back(o.nesterov ? (1 - o.momentum) * x + o.momentum * m : m);
  });
  const Values turned =
      r.rows > r.columns
          ? transposed(orthogonalized(transposed(d, r.rows, r.columns), r.columns, r.rows, o.ns_steps),
                       r.columns, r.rows)
          : orthogonalized(d, r.rows, r.columns, o.ns_steps);
  const double scale = std::sqrt(std::max(1.0, static_cast<double>(r.rows) / static_cast<double>(r.columns)));
  for (std::size_t i = 0; i < turned.size(); ++i)
    r.p[i] = r.p[i] * (1 - rate * o.weight_decay) - rate * scale * turned[i];
}

}  // namespace rz::test
