// How far softmax(x / temperature) is from a distribution q of each row. With u = 1 / temperature and
// L = log Σ e^(u x) the loss of a row is Σ q (log q - u x) + L Σ q, or -u Σ q x + L Σ q. A q from logits y is
// w / Σ w with w = e^(u (y - max y)), so that log q = u y - log Σ e^(u y), and the products are summed with
// w.

#include "tensor/loss_ops.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "tensor/kernels/losses/soft_loss.cpp"
#include <hwy/foreach_target.h>
#include <hwy/highway.h>

#include "tensor/kernels/device_ops.h"
#include "tensor/kernels/logarithm-inl.h"
#include "tensor/kernels/losses/row_access-inl.h"
#include "tensor/kernels/losses/row_sums.h"

HWY_BEFORE_NAMESPACE();
namespace rz {
namespace HWY_NAMESPACE {

/// A weight, and its logarithm (except for a constant of the row) as a + k b, with k of the row.
struct Weights {
  FloatVector weight, a, b;
};
struct WeightedSum {
  double mass = 0;  ///< Σ w
  double sum = 0;   ///< Σ w (a + k b - u x), over w that are not 0: 0 log 0 is 0
};
struct WideSum {
  DoubleVector mass, sum;
};

HWY_INLINE void add_half(WideSum& to, DoubleVector w, DoubleVector a, DoubleVector b, DoubleVector x,
                         double k, double u) {
  const Doubles d;
  const DoubleVector value = hn::NegMulAdd(hn::Set(d, u), x, hn::MulAdd(hn::Set(d, k), b, a));
  to.mass = hn::Add(to.mass, w);
  to.sum = hn::MulAdd(w, hn::IfThenElseZero(hn::Ne(w, hn::Zero(d)), value), to.sum);
}

HWY_INLINE void add_weights(WideSum& low, WideSum& high, const Weights& w, FloatVector x, double k,
                            double u) {
  add_half(low, lower_half(w.weight), lower_half(w.a), lower_half(w.b), lower_half(x), k, u);
  add_half(high, upper_half(w.weight), upper_half(w.a), upper_half(w.b), upper_half(x), k, u);
}

/// `weights`: of a vector of y. Those of `pad` must be 0.
template <class X, class Y, class F>
HWY_INLINE WeightedSum weighted_sum(const X* x, const Y* y, std::size_t n, double k, double u, float pad,
                                    const F& weights) {
  const Floats d;
  const Doubles wide;
  const std::size_t lanes = hn::Lanes(d), whole = n / lanes * lanes;
  WideSum low{hn::Zero(wide), hn::Zero(wide)}, high = low;
  for (std::size_t i = 0; i < whole; i += lanes)
    add_weights(low, high, weights(load(d, y + i)), load(d, x + i), k, u);
  if (whole < n)
    add_weights(low, high, weights(load_part(d, y + whole, n - whole, pad)),
                load_part(d, x + whole, n - whole, 0.0f), k, u);
  const auto total = [&](auto a, auto b)
                         HWY_ATTR { return hn::GetLane(hn::SumOfLanes(wide, hn::Add(a, b))); };
  return {total(low.mass, high.mass), total(low.sum, high.sum)};
}

/// What a row keeps for backward: L, and of the targets the same, or their sum.
struct SoftRow {
  double logits, targets;
};

template <class X, class Y>
double row_of_probabilities(const X* x, const Y* y, std::size_t n, bool divergence, double u, SoftRow& row) {
  constexpr double log_2 = 0.69314718055994530942;
  const FloatVector zero = hn::Zero(Floats());
  const auto plain = [&](auto q) HWY_ATTR { return Weights{q, zero, zero}; };
  const auto with_logarithm = [&](auto q) HWY_ATTR {
    const Logarithm log_q = logarithm(q);
    return Weights{q, log_q.rest, log_q.exponent};
  };
  const WeightedSum s =
      divergence ? weighted_sum(x, y, n, log_2, u, 0, with_logarithm) : weighted_sum(x, y, n, 0, u, 0, plain);
  row.targets = s.mass;
  return s.sum + row.logits * s.mass;
}

template <class X, class Y>
double row_of_logits(const X* x, const Y* y, std::size_t n, bool divergence, float u, SoftRow& row) {
  const Floats d;
  const float shift = largest(y, n);
  const auto weights = [&](auto v) HWY_ATTR {
    const FloatVector exponent = hn::Mul(hn::Sub(v, hn::Set(d, shift)), hn::Set(d, u));
    return Weights{exponential(exponent), hn::Zero(d), divergence ? v : hn::Zero(d)};
  };
  const float lowest = -std::numeric_limits<float>::infinity();
  const double wide = static_cast<double>(u);
  const WeightedSum s = weighted_sum(x, y, n, wide, wide, lowest, weights);
  row.targets = wide * static_cast<double>(shift) + std::log(s.mass);
  return s.sum / s.mass + row.logits - (divergence ? row.targets : 0);
}

template <class X, class Y>
double soft_row(const X* x, const Y* y, std::size_t n, const ops::SoftLoss& how, float* kept) {
  const float u = 1 / how.temperature;
  SoftRow row{log_sum(x, n, u), 0};
  const double loss = how.targets == ops::SoftLoss::logits
                          ? row_of_logits(x, y, n, how.divergence, u, row)
                          : row_of_probabilities(x, y, n, how.divergence, static_cast<double>(u), row);
  kept[0] = static_cast<float>(row.logits);
  kept[1] = static_cast<float>(row.targets);
  return loss * static_cast<double>(how.weight);
}

/// (mass · p - q) · factor; d may be x.
template <class X, class Y>
void soft_row_backward(X* d, const X* x, const Y* y, std::size_t n, const ops::SoftLoss& how,
                       const float* kept, float d_loss) {
  const Floats f;
  const float u = 1 / how.temperature;
  const auto factor = hn::Set(f, d_loss * how.weight * u);
  const auto softmax = [&](auto v, float log_total) HWY_ATTR {
    return exponential(hn::MulSub(v, hn::Set(f, u), hn::Set(f, log_total)));
  };
  const auto of_logits = [&](auto a, auto b) HWY_ATTR {
    return hn::Mul(hn::Sub(softmax(a, kept[0]), softmax(b, kept[1])), factor);
  };
  const auto of_probabilities = [&](auto a, auto q) HWY_ATTR {
    return hn::Mul(hn::MulSub(hn::Set(f, kept[1]), softmax(a, kept[0]), q), factor);
  };
  if (how.targets == ops::SoftLoss::logits)
    map(d, n, of_logits, x, y);
  else
    map(d, n, of_probabilities, x, y);
}

/// Calls f(X{}, Y{}) for logits of X and targets of Y, which is X or float.
template <class F>
void dispatch_both(const Tensor& logits, const Tensor& targets, const F& f) {
  ops::dispatch_dtype(logits.dtype(), [&](auto x) {
    if (targets.dtype() == DType::f32)
      f(x, float{});
    else
      f(x, x);
  });
}

/// The sum over rows [begin, end).
double soft_rows(const Tensor& each, const Tensor& statistics, const Tensor& logits, const Tensor& targets,
                 const ops::SoftLoss& how, std::size_t begin, std::size_t end) {
  double total = 0;
  dispatch_both(logits, targets, [&](auto x_type, auto y_type) HWY_ATTR {
    for (std::size_t r = begin; r < end; ++r) {
      const double here = soft_row(row_of<decltype(x_type)>(logits, r), row_of<decltype(y_type)>(targets, r),
                                   ops::last(logits), how, elements<float>(statistics) + 2 * r);
      elements<float>(each)[r] = static_cast<float>(here);
      total += here;
    }
  });
  return total;
}

void soft_rows_backward(const Tensor& d_logits, const Tensor& logits, const Tensor& targets,
                        const Tensor& statistics, float d_loss, const ops::SoftLoss& how, std::size_t begin,
                        std::size_t end) {
  dispatch_both(logits, targets, [&](auto x_type, auto y_type) HWY_ATTR {
    using X = decltype(x_type);
    for (std::size_t r = begin; r < end; ++r)
      soft_row_backward(row_of<X>(d_logits, r), row_of<const X>(logits, r),
                        row_of<const decltype(y_type)>(targets, r), ops::last(logits), how,
                        elements<float>(statistics) + 2 * r, d_loss);
  });
}

}  // namespace HWY_NAMESPACE
}  // namespace rz
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace rz {

HWY_EXPORT(soft_rows);
HWY_EXPORT(soft_rows_backward);

namespace ops {

namespace {

void check_soft(const char* op, const SoftLoss& how, const Tensor& logits, const Tensor& targets) {
  require(how.temperature > 0, Errc::invalid_argument, op, ": temperature is ", how.temperature,
          ", expected more than 0");
  if (targets.dtype() != DType::f32) check_dtype(op, logits.dtype(), {{"targets", targets}});
}

}  // namespace

void soft_loss(const Tensor& loss, const Tensor& sums, const Tensor& each, const Tensor& statistics,
               const Tensor& logits, const Tensor& targets, const SoftLoss& how, const Stream& stream) {
  constexpr const char* op = "soft_loss";
  const std::size_t n = rows(logits);
  check(op,
        {{"loss", loss},
         {"losses", each},
         {"statistics", statistics},
         {"logits", logits},
         {"targets", targets}},
        loss.count() == 1 && each.count() == n && statistics.count() == 2 * n && same_rows(targets, logits),
        Rows::any_stride);
  losses::check_pair(op, "sums", sums, logits);
  check_soft(op, how, logits, targets);
  check_dtype(op, DType::f32, {{"loss", loss}, {"losses", each}, {"statistics", statistics}});
  if (const auto* d = on_device(op, logits, stream))
    return d->soft_loss(loss, sums, each, statistics, logits, targets, how, stream);
  const double sum = ordered_sum(n, stream, [&](std::size_t begin, std::size_t end) {
    return HWY_DYNAMIC_DISPATCH(soft_rows)(each, statistics, logits, targets, how, begin, end);
  });
  losses::write_sums(loss, sums, sum, n);
}

void soft_loss_backward(const Tensor& d_logits, const Tensor& logits, const Tensor& targets,
                        const Tensor& statistics, const Tensor& d_loss, const SoftLoss& how,
                        const Stream& stream) {
  constexpr const char* op = "soft_loss_backward";
  check(op,
        {{"d_logits", d_logits},
         {"logits", logits},
         {"targets", targets},
         {"statistics", statistics},
         {"d_loss", d_loss}},
        same_rows(d_logits, logits) && same_rows(targets, logits) && statistics.count() == 2 * rows(logits) &&
            d_loss.count() == 1,
        Rows::any_stride);
  check_dtype(op, logits.dtype(), {{"d_logits", d_logits}});
  check_soft(op, how, logits, targets);
  if (const auto* d = on_device(op, logits, stream))
    return d->soft_loss_backward(d_logits, logits, targets, statistics, d_loss, how, stream);
  check_dtype(op, DType::f32, {{"statistics", statistics}});
  const float factor = *d_loss.data<float>();
  losses::ranges_of_rows(logits, stream, [&](std::size_t begin, std::size_t end) {
    HWY_DYNAMIC_DISPATCH(soft_rows_backward)
    (d_logits, logits, targets, statistics, factor, how, begin, end);
  });
}

}  // namespace ops
}  // namespace rz
#endif
