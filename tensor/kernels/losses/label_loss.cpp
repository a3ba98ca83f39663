// Cross entropy with labels, and how many of them have the largest logit.

#include "tensor/loss_ops.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "tensor/kernels/losses/label_loss.cpp"
#include <hwy/foreach_target.h>
#include <hwy/highway.h>

#include "tensor/kernels/device_ops.h"
#include "tensor/kernels/losses/row_access-inl.h"
#include "tensor/kernels/losses/row_sums.h"

HWY_BEFORE_NAMESPACE();
namespace rz {
namespace HWY_NAMESPACE {

/// log Σ e^x - (1 - s) x[target] - s mean(x)
template <class T>
double label_row(const T* x, std::size_t n, std::int32_t target, const ops::LabelLoss& how,
                 double log_total) {
  if (target == how.ignore_index) return 0;
  const double s = static_cast<double>(how.label_smoothing);
  const double loss = log_total - (1 - s) * static_cast<double>(to_f32(x[target]));
  if (s == 0) return loss;
  return loss - s *
                    sum(
                        n, [](auto v) HWY_ATTR { return v; }, x) /
                    static_cast<double>(n);
}

/// The sum over rows [begin, end).
double label_rows(const Tensor& each, const Tensor& log_sums, const Tensor& logits,
                  const std::int32_t* targets, const ops::LabelLoss& how, std::size_t begin,
                  std::size_t end) {
  double total = 0;
  ops::dispatch_dtype(logits.dtype(), [&](auto type) HWY_ATTR {
    const std::size_t n = ops::last(logits);
    for (std::size_t r = begin; r < end; ++r) {
      const auto* const x = row_of<decltype(type)>(logits, r);
      const double log_total = log_sum(x, n, 1), here = label_row(x, n, targets[r], how, log_total);
      elements<float>(log_sums)[r] = static_cast<float>(log_total);
      elements<float>(each)[r] = static_cast<float>(here);
      total += here;
    }
  });
  return total;
}

/// (e^(x - log_total) - q) · factor; d may be x. The target's element is rounded once, like the others.
template <class T>
void label_row_backward(T* d, const T* x, std::size_t n, std::size_t target, float smoothing, float log_total,
                        float factor) {
  const float low = smoothing / static_cast<float>(n);
  const auto gradient = [=](auto v, float q) HWY_ATTR {
    const FloatVector p = exponential(hn::Sub(v, hn::Set(Floats(), log_total)));
    return hn::Mul(hn::Sub(p, hn::Set(Floats(), q)), hn::Set(Floats(), factor));
  };
  const FloatVector at_target = hn::Set(Floats(), to_f32(x[target]));
  map(
      d, n, [&](auto v) HWY_ATTR { return gradient(v, low); }, x);
  d[target] = from_f32<T>(hn::GetLane(gradient(at_target, low + (1 - smoothing))));
}

void label_rows_backward(const Tensor& d_logits, const Tensor& logits, const Tensor& log_sums,
                         const std::int32_t* targets, const ops::LabelLoss& how, float factor,
                         std::size_t begin, std::size_t end) {
  ops::dispatch_dtype(logits.dtype(), [&](auto type) HWY_ATTR {
    using T = decltype(type);
    const std::size_t n = ops::last(logits);
    for (std::size_t r = begin; r < end; ++r) {
      T* const d = row_of<T>(d_logits, r);
      if (targets[r] == how.ignore_index)
        std::fill_n(d, n, T{});
      else
        label_row_backward(d, row_of<T>(logits, r), n, static_cast<std::size_t>(targets[r]),
                           how.label_smoothing, elements<float>(log_sums)[r], factor);
    }
  });
}

/// Whether better(element) holds for none of x[0 … n-1].
template <class T, class F>
HWY_INLINE bool none_is(const T* x, std::size_t n, const F& better) {
  const Floats d;
  const std::size_t lanes = hn::Lanes(d), whole = n / lanes * lanes;
  for (std::size_t i = 0; i < whole; i += lanes)
    if (!hn::AllFalse(d, better(load(d, x + i)))) return false;
  if (whole == n) return true;
  const auto inside = hn::FirstN(d, n - whole);
  return hn::AllFalse(d, hn::And(inside, better(load_part(d, x + whole, n - whole, 0.0f))));
}

/// True if element `target` is the first of the largest. NaN is better than all.
template <class T>
bool is_largest(const T* x, std::size_t n, std::size_t target) {
  const float value = to_f32(x[target]);
  if (std::isnan(value)) return false;
  const FloatVector v = hn::Set(Floats(), value);
  return none_is(x, target, [&](auto e) HWY_ATTR { return hn::Not(hn::Lt(e, v)); }) &&
         none_is(x + target + 1, n - target - 1, [&](auto e) HWY_ATTR { return hn::Not(hn::Le(e, v)); });
}

double right_rows(const Tensor& logits, const std::int32_t* targets, std::int32_t ignored, std::size_t begin,
                  std::size_t end) {
  double right = 0;
  ops::dispatch_dtype(logits.dtype(), [&](auto type) HWY_ATTR {
    for (std::size_t r = begin; r < end; ++r)
      right += targets[r] != ignored && is_largest(row_of<decltype(type)>(logits, r), ops::last(logits),
                                                   static_cast<std::size_t>(targets[r]));
  });
  return right;
}

}  // namespace HWY_NAMESPACE
}  // namespace rz
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace rz {

HWY_EXPORT(label_rows);
HWY_EXPORT(label_rows_backward);
HWY_EXPORT(right_rows);

namespace ops {

namespace {

void check_label(const char* op, const LabelLoss& how) {
  require(how.label_smoothing >= 0 && how.label_smoothing < 1, Errc::invalid_argument, op,
          ": label_smoothing is ", how.label_smoothing, ", expected 0 <= label_smoothing < 1");
}

/// On the host, targets must be classes or `ignored`.
void check_targets(const char* op, const Tensor& targets, const Tensor& logits, std::int32_t ignored) {
  const std::size_t n = rows(logits);
  if (targets.device().kind != Device::host) return check_indices(op, {"targets", targets}, n, last(logits));
  require(targets.dtype() == DType::i32 && targets.count() == n && targets.contiguous(),
          Errc::invalid_argument, op, ": needs ", n, " i32 targets");
  for (std::size_t i = 0; i < n; ++i) {
    const std::int32_t t = targets.data<std::int32_t>()[i];
    require(t == ignored || (t >= 0 && static_cast<std::size_t>(t) < last(logits)), Errc::invalid_argument,
            op, ": targets[", i, "] = ", t, " is not in [0, ", last(logits), ")");
  }
}

std::size_t terms(const Tensor& targets, std::int32_t ignored) {
  const auto* const t = targets.data<std::int32_t>();
  return targets.count() - static_cast<std::size_t>(std::count(t, t + targets.count(), ignored));
}

}  // namespace

void label_loss(const Tensor& loss, const Tensor& sums, const Tensor& each, const Tensor& log_sums,
                const Tensor& logits, const Tensor& targets, const LabelLoss& how, const Stream& stream) {
  constexpr const char* op = "label_loss";
  const std::size_t n = rows(logits);
  check(op, {{"loss", loss}, {"losses", each}, {"log_sum", log_sums}, {"logits", logits}},
        loss.count() == 1 && each.count() == n && log_sums.count() == n, Rows::any_stride);
  losses::check_pair(op, "sums", sums, logits);
  check_label(op, how);
  check_targets(op, targets, logits, how.ignore_index);
  if (const auto* d = on_device(op, logits, stream))
    return d->label_loss(loss, sums, each, log_sums, logits, targets, how, stream);
  check_dtype(op, DType::f32, {{"losses", each}, {"log_sum", log_sums}});
  const auto* const t = targets.data<std::int32_t>();
  const double sum = ordered_sum(n, stream, [&](std::size_t begin, std::size_t end) {
    return HWY_DYNAMIC_DISPATCH(label_rows)(each, log_sums, logits, t, how, begin, end);
  });
  losses::write_sums(loss, sums, sum, terms(targets, how.ignore_index));
}

void label_loss_backward(const Tensor& d_logits, const Tensor& logits, const Tensor& log_sums,
                         const Tensor& targets, const Tensor& d_loss, const LabelLoss& how,
                         const Stream& stream) {
  constexpr const char* op = "label_loss_backward";
  check(op, {{"d_logits", d_logits}, {"logits", logits}, {"log_sum", log_sums}, {"d_loss", d_loss}},
        same_rows(d_logits, logits) && log_sums.count() == rows(logits) && d_loss.count() == 1,
        Rows::any_stride);
  check_dtype(op, logits.dtype(), {{"d_logits", d_logits}});
  check_label(op, how);
  check_targets(op, targets, logits, how.ignore_index);
  if (const auto* d = on_device(op, logits, stream))
    return d->label_loss_backward(d_logits, logits, log_sums, targets, d_loss, how, stream);
  check_dtype(op, DType::f32, {{"log_sum", log_sums}});
  const auto* const t = targets.data<std::int32_t>();
  const float factor = *d_loss.data<float>();
  losses::ranges_of_rows(logits, stream, [&](std::size_t begin, std::size_t end) {
    HWY_DYNAMIC_DISPATCH(label_rows_backward)(d_logits, logits, log_sums, t, how, factor, begin, end);
  });
}

void accuracy(const Tensor& counts, const Tensor& logits, const Tensor& targets, std::int32_t ignore_index,
              const Stream& stream) {
  constexpr const char* op = "accuracy";
  check(op, {{"logits", logits}}, true, Rows::any_stride);
  losses::check_pair(op, "counts", counts, logits);
  check_targets(op, targets, logits, ignore_index);
  if (const auto* d = on_device(op, logits, stream))
    return d->accuracy(counts, logits, targets, ignore_index, stream);
  const auto* const t = targets.data<std::int32_t>();
  counts.data<double>()[0] = ordered_sum(rows(logits), stream, [&](std::size_t begin, std::size_t end) {
    return HWY_DYNAMIC_DISPATCH(right_rows)(logits, t, ignore_index, begin, end);
  });
  counts.data<double>()[1] = static_cast<double>(terms(targets, ignore_index));
}

}  // namespace ops
}  // namespace rz
#endif
