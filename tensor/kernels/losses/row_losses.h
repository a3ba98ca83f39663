#pragma once
/// The arithmetic of losses of one row on a device. A team is the threads that process a row: each handles
/// the elements team.first(), + team.step(), …; team.sum() and team.max() combine their results.

#include <cmath>
#include <cstddef>
#include <cstdint>

#include "comm/core/math.h"
#include "tensor/loss_ops.h"

namespace rz::ops::losses {

/// A matrix by the address of its first row.
template <class T>
struct Matrix {
  T* data;
  std::size_t stride;
  RZ_HOST_DEVICE T* row(std::size_t r) const { return data + r * stride; }
};

/// log Σ e^(x · factor); NaN if an element is NaN.
template <class Team, class T>
RZ_HOST_DEVICE double log_sum(const Team& team, const T* x, std::size_t n, float factor) {
  float largest = -INFINITY;
  for (std::size_t i = team.first(); i < n; i += team.step()) largest = fmaxf(largest, to_f32(x[i]) * factor);
  largest = team.max(largest);
  double sum = 0;
  for (std::size_t i = team.first(); i < n; i += team.step())
    sum += static_cast<double>(expf(to_f32(x[i]) * factor - largest));
  return static_cast<double>(largest) + log(team.sum(sum));
}

/// What a soft loss keeps of a row: log Σ e^(x/t), and of the targets the same, or their sum.
struct SoftRow {
  double logits, targets;
};

/// q[i] and log q[i].
template <class T>
RZ_HOST_DEVICE float target_log(const T* y, std::size_t i, const SoftLoss& how, double log_total) {
  if (how.targets == SoftLoss::probabilities) return logf(to_f32(y[i]));
  return static_cast<float>(static_cast<double>(to_f32(y[i]) / how.temperature) - log_total);
}
template <class T>
RZ_HOST_DEVICE float target(const T* y, std::size_t i, const SoftLoss& how, double log_total) {
  return how.targets == SoftLoss::probabilities ? to_f32(y[i]) : expf(target_log(y, i, how, log_total));
}

template <class Team, class X, class Y>
RZ_HOST_DEVICE double soft_row(const Team& team, const X* x, const Y* y, std::size_t n, const SoftLoss& how,
                               SoftRow& row) {
  const float factor = 1 / how.temperature;
  row.logits = log_sum(team, x, n, factor);
  row.targets = how.targets == SoftLoss::logits ? log_sum(team, y, n, factor) : 0;
  double loss = 0, mass = 0;
  for (std::size_t i = team.first(); i < n; i += team.step()) {
    const float q = target(y, i, how, row.targets);
    if (q == 0) continue;  // 0 log 0 is 0
    const double log_p = static_cast<double>(to_f32(x[i]) / how.temperature) - row.logits;
    const double log_q = how.divergence ? static_cast<double>(target_log(y, i, how, row.targets)) : 0;
    loss += static_cast<double>(q) * (log_q - log_p);
    mass += static_cast<double>(q);
  }
  mass = team.sum(mass);
  if (how.targets == SoftLoss::probabilities) row.targets = mass;
  return team.sum(loss) * static_cast<double>(how.weight);
}

template <class Team, class X, class Y>
RZ_HOST_DEVICE void soft_row_backward(const Team& team, X* d, const X* x, const Y* y, std::size_t n,
                                      const SoftLoss& how, const SoftRow& row, float d_loss) {
  const float factor = d_loss * how.weight / how.temperature;
  const bool given = how.targets == SoftLoss::probabilities;
  const float mass = given ? static_cast<float>(row.targets) : 1;
  for (std::size_t i = team.first(); i < n; i += team.step()) {
    const float p =
        expf(static_cast<float>(static_cast<double>(to_f32(x[i]) / how.temperature) - row.logits));
    d[i] = from_f32<X>((mass * p - target(y, i, how, row.targets)) * factor);
  }
}

template <class Team, class T>
RZ_HOST_DEVICE double label_row(const Team& team, const T* x, std::size_t n, std::int32_t target,
                                const LabelLoss& how, double& log_total) {
  log_total = log_sum(team, x, n, 1);
  if (target == how.ignore_index) return 0;
  if (target < 0 || static_cast<std::size_t>(target) >= n) return NAN;
  double sum = 0;
  if (how.label_smoothing > 0)
    for (std::size_t i = team.first(); i < n; i += team.step()) sum += static_cast<double>(to_f32(x[i]));
  const double s = static_cast<double>(how.label_smoothing), mean = team.sum(sum) / static_cast<double>(n);
  return log_total - (1 - s) * static_cast<double>(to_f32(x[target])) - s * mean;
}

template <class Team, class T>
RZ_HOST_DEVICE void label_row_backward(const Team& team, T* d, const T* x, std::size_t n, std::int32_t target,
                                       const LabelLoss& how, float log_total, float d_loss) {
  const bool ignored = target == how.ignore_index;
  const bool inside = target >= 0 && static_cast<std::size_t>(target) < n;
  const float s = how.label_smoothing, low = s / static_cast<float>(n);
  for (std::size_t i = team.first(); i < n; i += team.step()) {
    const float q = low + (inside && i == static_cast<std::size_t>(target) ? 1 - s : 0);
    d[i] = from_f32<T>(ignored ? 0 : inside ? (expf(to_f32(x[i]) - log_total) - q) * d_loss : NAN);
  }
}

/// True if element `target` is the first of the largest.
template <class Team, class T>
RZ_HOST_DEVICE bool is_largest(const Team& team, const T* x, std::size_t n, std::int32_t target) {
  if (target < 0 || static_cast<std::size_t>(target) >= n) return false;
  const auto chosen = static_cast<std::size_t>(target);
  const float value = to_f32(x[chosen]);
  double better = 0;
  for (std::size_t i = team.first(); i < n; i += team.step()) {
    const float other = to_f32(x[i]);
    better += !(other < value || (other == value && i >= chosen));
  }
  return team.sum(better) == 0;
}

RZ_HOST_DEVICE inline double element_of(ElementLoss how, double x, double y) {
  if (how == ElementLoss::squared_error) return (x - y) * (x - y);
  return (x > 0 ? x : 0) - x * y + log1p(exp(x > 0 ? -x : x));
}
RZ_HOST_DEVICE inline float element_gradient(ElementLoss how, float x, float y) {
  if (how == ElementLoss::squared_error) return 2 * (x - y);
  return 1 / (1 + expf(-x)) - y;
}

}  // namespace rz::ops::losses
