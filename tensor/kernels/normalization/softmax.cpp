// Softmax and cross entropy over the last dimension: first the maximum, then sums of e^(x - maximum) in
// blocks of f32 vectors, which are added in double.

#include "tensor/ops.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "tensor/kernels/normalization/softmax.cpp"
#include <hwy/foreach_target.h>
#include <hwy/highway.h>

#include <algorithm>
#include <cmath>

#include "tensor/kernels/check.h"
#include "tensor/kernels/device_ops.h"
#include "tensor/kernels/normalization/parts_of_row.h"
#include "tensor/kernels/ordered_sum.h"
#include "tensor/kernels/vector-inl.h"

#ifndef RZ_TENSOR_NO_TARGET
#define RZ_TENSOR_NO_TARGET
namespace rz::ops {
/// In place of a target's index: it is no logit of the row.
constexpr std::size_t no_target = ~std::size_t{0};
}  // namespace rz::ops
#endif

HWY_BEFORE_NAMESPACE();
namespace rz {
namespace HWY_NAMESPACE {

template <class T>
T* row_of(const Tensor& t, std::size_t row) {
  return elements<T>(t) + row * t.row_stride();
}

/// Σ e^(in - shift)
template <class T>
double sum_of_shifted(const T* in, std::size_t n, float shift) {
  return sum_of_exponentials(in, n, [&](auto x) HWY_ATTR { return hn::Sub(x, hn::Set(Floats(), shift)); });
}

/// log Σ e^in of a row, in double; NaN if any element is NaN.
double log_sum_of(const Tensor& in, std::size_t row) {
  double log_sum = 0;
  ops::dispatch_dtype(in.dtype(), [&](auto t) HWY_ATTR {
    const std::size_t n = ops::last(in);
    const auto* const x = row_of<decltype(t)>(in, row);
    const float row_max = largest(x, n);
    log_sum = row_max + std::log(sum_of_shifted(x, n, row_max));
  });
  return log_sum;
}

/// e^(x - shift) · factor
HWY_INLINE FloatVector shifted_exponential(FloatVector x, float shift, float factor) {
  const Floats d;
  return hn::Mul(exponential(hn::Sub(x, hn::Set(d, shift))), hn::Set(d, factor));
}

/// out = e^(in - shift) · factor
template <class T>
void exponentials_of(T* out, const T* in, std::size_t n, float shift, float factor) {
  map(
      out, n, [&](auto x) HWY_ATTR { return shifted_exponential(x, shift, factor); }, in);
}

void softmax_row(const Tensor& out, const Tensor& in, std::size_t row) {
  ops::dispatch_dtype(in.dtype(), [&](auto t) HWY_ATTR {
    using T = decltype(t);
    const std::size_t n = ops::last(in);
    const T* const x = row_of<T>(in, row);
    const float row_max = largest(x, n);
    const auto factor = static_cast<float>(1 / sum_of_shifted(x, n, row_max));
    exponentials_of(row_of<T>(out, row), x, n, row_max, factor);
  });
}

void softmax_row_backward(const Tensor& d_in, const Tensor& d_out, const Tensor& out, std::size_t row,
                          bool accumulate) {
  ops::dispatch_dtype(out.dtype(), [&](auto t) HWY_ATTR {
    using T = decltype(t);
    const std::size_t n = ops::last(out);
    const T *const dy = row_of<T>(d_out, row), *const y = row_of<T>(out, row);
    const auto mean = static_cast<float>(sum(
        n, [](auto a, auto b) HWY_ATTR { return hn::Mul(a, b); }, dy, y));
    const auto gradient = [&](auto g, auto p)
                              HWY_ATTR { return hn::Mul(p, hn::Sub(g, hn::Set(Floats(), mean))); };
    map_into(accumulate, row_of<T>(d_in, row), n, gradient, dy, y);
  });
}

/// The largest element is subtracted first, so that large elements keep their differences.
void log_softmax_row(const Tensor& out, const Tensor& in, std::size_t row) {
  ops::dispatch_dtype(in.dtype(), [&](auto t) HWY_ATTR {
    using T = decltype(t);
    const std::size_t n = ops::last(in);
    const T* const x = row_of<T>(in, row);
    const float row_max = largest(x, n);
    const auto log_sum = static_cast<float>(std::log(sum_of_shifted(x, n, row_max)));
    const auto f = [&](auto v) HWY_ATTR {
      return hn::Sub(hn::Sub(v, hn::Set(Floats(), row_max)), hn::Set(Floats(), log_sum));
    };
    map(row_of<T>(out, row), n, f, x);
  });
}

/// d_in = d_out - e^out · Σ d_out
void log_softmax_row_backward(const Tensor& d_in, const Tensor& d_out, const Tensor& out, std::size_t row,
                              bool accumulate) {
  ops::dispatch_dtype(out.dtype(), [&](auto t) HWY_ATTR {
    using T = decltype(t);
    const std::size_t n = ops::last(out);
    const T *const dy = row_of<T>(d_out, row), *const y = row_of<T>(out, row);
    const auto total = static_cast<float>(sum(
        n, [](auto a) HWY_ATTR { return a; }, dy));
    const auto gradient = [&](auto g, auto v)
                              HWY_ATTR { return hn::NegMulAdd(exponential(v), hn::Set(Floats(), total), g); };
    map_into(accumulate, row_of<T>(d_in, row), n, gradient, dy, y);
  });
}

/// A row of (e^(logits - log_sum) - onehot(target)) · factor; d_logits may be logits. The target's element is
/// rounded once, like the others.
void cross_entropy_row_backward(const Tensor& d_logits, const Tensor& logits, std::size_t row,
                                std::size_t target, float log_sum, float factor) {
  ops::dispatch_dtype(logits.dtype(), [&](auto t) HWY_ATTR {
    using T = decltype(t);
    const std::size_t n = ops::last(logits);
    const T* const x = row_of<T>(logits, row);
    T* const d = row_of<T>(d_logits, row);
    if (target == ops::no_target) return exponentials_of(d, x, n, log_sum, factor);
    const FloatVector at_target = hn::Set(Floats(), to_f32(x[target]));
    exponentials_of(d, x, n, log_sum, factor);
    const float probability = hn::GetLane(shifted_exponential(at_target, log_sum, factor));
    d[target] = from_f32<T>(probability - factor);
  });
}

}  // namespace HWY_NAMESPACE
}  // namespace rz
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace rz {

HWY_EXPORT(log_sum_of);
HWY_EXPORT(softmax_row);
HWY_EXPORT(softmax_row_backward);
HWY_EXPORT(log_softmax_row);
HWY_EXPORT(log_softmax_row_backward);
HWY_EXPORT(cross_entropy_row_backward);

namespace ops {

namespace {

constexpr std::int32_t ignored = -100;

/// Minimum number of rows per thread.
std::size_t grain(std::size_t columns) {
  return std::max<std::size_t>(1, 2048 / std::max<std::size_t>(columns, 1));
}

double element(const Tensor& t, std::size_t i) {
  double value = 0;
  dispatch_dtype(t.dtype(), [&](auto type) { value = to_f32(t.data<decltype(type)>()[i]); });
  return value;
}

void check_sums(const char* op, const Tensor& sums, const Tensor& logits) {
  require(
      sums.defined() && sums.dtype() == DType::f64 && sums.count() == 2 && sums.device() == logits.device(),
      Errc::invalid_argument, op, ": 'sums' must be 2 f64 on ", name(logits.device()));
}

}  // namespace

void softmax(const Tensor& out, const Tensor& in, const Stream& stream) {
  check("softmax", {{"out", out}, {"in", in}}, same_rows(out, in), Rows::any_stride);
  if (const auto* d = on_device("softmax", out, stream)) return d->softmax(out, in, stream);
  check_dtype("softmax", in.dtype(), {{"out", out}});
  stream.parallel_for(rows(in), grain(last(in)), [&](std::size_t begin, std::size_t end) {
    for (std::size_t i = begin; i < end; ++i) HWY_DYNAMIC_DISPATCH(softmax_row)(out, in, i);
  });
}

void softmax_backward(const Tensor& d_in, const Tensor& d_out, const Tensor& out, Into into,
                      const Stream& stream) {
  check("softmax_backward", {{"d_in", d_in}, {"d_out", d_out}, {"out", out}},
        same_rows(d_in, out) && same_rows(d_out, out), Rows::any_stride);
  if (const auto* d = on_device("softmax_backward", d_in, stream))
    return d->softmax_backward(d_in, d_out, out, into, stream);
  check_dtype("softmax_backward", out.dtype(), {{"d_in", d_in}, {"d_out", d_out}});
  stream.parallel_for(rows(out), grain(last(out)), [&](std::size_t begin, std::size_t end) {
    for (std::size_t i = begin; i < end; ++i)
      HWY_DYNAMIC_DISPATCH(softmax_row_backward)(d_in, d_out, out, i, into == Into::accumulate);
  });
}

void log_softmax(const Tensor& out, const Tensor& in, const Stream& stream) {
  check("log_softmax", {{"out", out}, {"in", in}}, same_rows(out, in), Rows::any_stride);
  if (const auto* d = on_device("log_softmax", out, stream)) return d->log_softmax(out, in, stream);
  check_dtype("log_softmax", in.dtype(), {{"out", out}});
  stream.parallel_for(rows(in), grain(last(in)), [&](std::size_t begin, std::size_t end) {
    for (std::size_t i = begin; i < end; ++i) HWY_DYNAMIC_DISPATCH(log_softmax_row)(out, in, i);
  });
}

void log_softmax_backward(const Tensor& d_in, const Tensor& d_out, const Tensor& out, Into into,
                          const Stream& stream) {
  check("log_softmax_backward", {{"d_in", d_in}, {"d_out", d_out}, {"out", out}},
        same_rows(d_in, out) && same_rows(d_out, out), Rows::any_stride);
  if (const auto* d = on_device("log_softmax_backward", d_in, stream))
    return d->log_softmax_backward(d_in, d_out, out, into, stream);
  check_dtype("log_softmax_backward", out.dtype(), {{"d_in", d_in}, {"d_out", d_out}});
  stream.parallel_for(rows(out), grain(last(out)), [&](std::size_t begin, std::size_t end) {
    for (std::size_t i = begin; i < end; ++i)
      HWY_DYNAMIC_DISPATCH(log_softmax_row_backward)(d_in, d_out, out, i, into == Into::accumulate);
  });
}

void cross_entropy(const Tensor& loss, const Tensor& sums, const Tensor& losses, const Tensor& log_sum,
                   const Tensor& logits, const Tensor& targets, const Stream& stream) {
  const std::size_t n = rows(logits), v = last(logits);
  check("cross_entropy", {{"loss", loss}, {"losses", losses}, {"log_sum", log_sum}, {"logits", logits}},
        loss.count() == 1 && losses.count() == n && log_sum.count() == n, Rows::any_stride);
  check_sums("cross_entropy", sums, logits);
  check_indices("cross_entropy", {"targets", targets}, n, v, {ignored});
  if (const auto* d = on_device("cross_entropy", logits, stream))
    return d->cross_entropy(loss, sums, losses, log_sum, logits, targets, stream);
  float *each = losses.data<float>(), *l = log_sum.data<float>();
  const std::int32_t* target = targets.data<std::int32_t>();
  const double sum = ordered_sum(n, stream, [&](std::size_t begin, std::size_t end) {
    double part = 0;
    for (std::size_t i = begin; i < end; ++i) {
      const double log_total = HWY_DYNAMIC_DISPATCH(log_sum_of)(logits, i);
      const double here =
          target[i] == ignored
              ? 0
              : log_total - element(logits, i * logits.row_stride() + static_cast<std::size_t>(target[i]));
      l[i] = static_cast<float>(log_total);
      each[i] = static_cast<float>(here);
      part += here;
    }
    return part;
  });
  const auto count =
      static_cast<double>(n - static_cast<std::size_t>(std::count(target, target + n, ignored)));
  sums.data<double>()[0] = sum;
  sums.data<double>()[1] = count;
  *loss.data<float>() = static_cast<float>(sum);
}

void cross_entropy_backward(const Tensor& d_logits, const Tensor& logits, const Tensor& log_sum,
                            const Tensor& targets, const Tensor& d_loss, const Stream& stream) {
  const std::size_t n = rows(logits), v = last(logits);
  check("cross_entropy_backward",
        {{"d_logits", d_logits}, {"logits", logits}, {"log_sum", log_sum}, {"d_loss", d_loss}},
        same_rows(d_logits, logits) && log_sum.count() == n && d_loss.count() == 1, Rows::any_stride);
  check_indices("cross_entropy_backward", {"targets", targets}, n, v, {ignored, elsewhere});
  if (const auto* d = on_device("cross_entropy_backward", logits, stream))
    return d->cross_entropy_backward(d_logits, logits, log_sum, targets, d_loss, stream);
  check_dtype("cross_entropy_backward", logits.dtype(), {{"d_logits", d_logits}});
  const float factor = *d_loss.data<float>();
  const float* l = log_sum.data<float>();
  const std::int32_t* target = targets.data<std::int32_t>();
  const std::size_t row_bytes = v * size_of(logits.dtype()),
                    step = d_logits.row_stride() * size_of(logits.dtype());
  stream.parallel_for(n, grain(v), [&](std::size_t begin, std::size_t end) {
    for (std::size_t i = begin; i < end; ++i)
      if (target[i] == ignored)
        std::fill_n(d_logits.raw() + i * step, row_bytes, std::byte{0});
      else
        HWY_DYNAMIC_DISPATCH(cross_entropy_row_backward)
    (d_logits, logits, i, target[i] == elsewhere ? no_target : static_cast<std::size_t>(target[i]), l[i],
     factor);
  });
}

void cross_entropy_part(const Tensor& statistics, const Tensor& logits, const Tensor& targets,
                        const Stream& stream) {
  const std::size_t n = rows(logits), v = last(logits);
  check("cross_entropy_part", {{"statistics", statistics}, {"logits", logits}},
        statistics.count() == 2 * n && v > 0, Rows::any_stride);
  check_indices("cross_entropy_part", {"targets", targets}, n, v, {ignored, elsewhere});
  if (const auto* d = on_device("cross_entropy_part", logits, stream))
    return d->cross_entropy_part(statistics, logits, targets, stream);
  float* const out = statistics.data<float>();
  const std::int32_t* const target = targets.data<std::int32_t>();
  stream.parallel_for(n, grain(v), [&](std::size_t begin, std::size_t end) {
    for (std::size_t i = begin; i < end; ++i) {
      out[2 * i] = static_cast<float>(HWY_DYNAMIC_DISPATCH(log_sum_of)(logits, i));
      out[2 * i + 1] = target[i] < 0
                           ? 0
                           : static_cast<float>(element(
                                 logits, i * logits.row_stride() + static_cast<std::size_t>(target[i])));
    }
  });
}

void cross_entropy_of_parts(const Tensor& loss, const Tensor& sums, const Tensor& losses,
                            const Tensor& log_sum, const Tensor& statistics, const Tensor& targets,
                            const Stream& stream) {
  const std::size_t n = losses.count(), parts = n ? statistics.count() / (2 * n) : 0;
  check("cross_entropy_of_parts",
        {{"loss", loss}, {"losses", losses}, {"log_sum", log_sum}, {"statistics", statistics}},
        loss.count() == 1 && log_sum.count() == n && targets.count() == n &&
            statistics.count() == parts * 2 * n);
  check_sums("cross_entropy_of_parts", sums, losses);
  if (const auto* d = on_device("cross_entropy_of_parts", losses, stream))
    return d->cross_entropy_of_parts(loss, sums, losses, log_sum, statistics, targets, stream);
  float *const each = losses.data<float>(), *const l = log_sum.data<float>();
  const float* const of = statistics.data<float>();
  const std::int32_t* const target = targets.data<std::int32_t>();
  const double sum = ordered_sum(n, stream, [&](std::size_t begin, std::size_t end) {
    double part = 0;
    for (std::size_t i = begin; i < end; ++i) {
      const PartsOfRow row = parts_of_row(of, i, n, parts);
      const double here = target[i] == ignored ? 0 : row.log_sum - row.target;
      l[i] = static_cast<float>(row.log_sum), each[i] = static_cast<float>(here);
      part += here;
    }
    return part;
  });
  sums.data<double>()[0] = sum;
  sums.data<double>()[1] =
      static_cast<double>(n - static_cast<std::size_t>(std::count(target, target + n, ignored)));
  *loss.data<float>() = static_cast<float>(sum);
}

}  // namespace ops
}  // namespace rz
#endif
