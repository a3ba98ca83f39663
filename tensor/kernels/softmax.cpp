// Softmax and cross entropy over the last dimension: first the maximum, then sums of e^(x - maximum) in
// blocks of f32 vectors, which are added in double.

#include "tensor/ops.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "tensor/kernels/softmax.cpp"
#include "tensor/kernels/targets.h"
// after the targets
#include <hwy/foreach_target.h>
#include <hwy/highway.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include "tensor/kernels/check.h"
#include "tensor/kernels/device_ops.h"
#include "tensor/kernels/ordered_sum.h"
#include "tensor/kernels/vector-inl.h"

HWY_BEFORE_NAMESPACE();
namespace rz {
namespace HWY_NAMESPACE {

double sum_of_exponentials(const float* in, std::size_t n, float row_max) {
  constexpr std::size_t block = 1024;
  const Floats d;
  const std::size_t lanes = hn::Lanes(d);
  const auto shift = hn::Set(d, row_max);
  double total = 0;
  for (std::size_t first = 0; first < n; first += block) {
    const std::size_t end = std::min(n, first + block);
    FloatVector a = hn::Zero(d), b = a;
    std::size_t i = first;
    for (; i + 2 * lanes <= end; i += 2 * lanes) {
      a = hn::Add(a, exponential(hn::Sub(hn::LoadU(d, in + i), shift)));
      b = hn::Add(b, exponential(hn::Sub(hn::LoadU(d, in + i + lanes), shift)));
    }
    for (; i < end; i += lanes) {
      const float lowest = -std::numeric_limits<float>::infinity();
      const auto x = end - i < lanes ? load_part(d, in + i, end - i, lowest) : hn::LoadU(d, in + i);
      a = hn::Add(a, exponential(hn::Sub(x, shift)));
    }
    total += hn::GetLane(hn::SumOfLanes(d, hn::Add(a, b)));
  }
  return total;
}

/// log Σ e^in, in double; NaN if any element is NaN.
double log_sum_of(const float* in, std::size_t n) {
  const float row_max = largest(in, n);
  return row_max + std::log(sum_of_exponentials(in, n, row_max));
}

/// out = e^(in - shift) · factor
void exponentials_of(float* out, const float* in, std::size_t n, float shift, float factor) {
  const auto f = [&](auto x) HWY_ATTR {
    const Floats d;
    return hn::Mul(exponential(hn::Sub(x, hn::Set(d, shift))), hn::Set(d, factor));
  };
  map(out, n, f, in);
}

void softmax_row(float* out, const float* in, std::size_t n) {
  const float row_max = largest(in, n);
  exponentials_of(out, in, n, row_max, static_cast<float>(1 / sum_of_exponentials(in, n, row_max)));
}

void softmax_row_backward(float* d_in, const float* d_out, const float* out, std::size_t n, bool accumulate) {
  const auto mean = static_cast<float>(sum(
      n, [](auto dy, auto y) HWY_ATTR { return hn::Mul(dy, y); }, d_out, out));
  if (accumulate)
    RZ_EACH(i, 0, n) d_in[i] += out[i] * (d_out[i] - mean);
  else
    RZ_EACH(i, 0, n) d_in[i] = out[i] * (d_out[i] - mean);
}

}  // namespace HWY_NAMESPACE
}  // namespace rz
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace rz {

HWY_EXPORT(log_sum_of);
HWY_EXPORT(exponentials_of);
HWY_EXPORT(softmax_row);
HWY_EXPORT(softmax_row_backward);

namespace ops {

namespace {

constexpr std::int32_t ignored = -100;

/// Minimum number of rows per thread.
std::size_t grain(std::size_t columns) {
  return std::max<std::size_t>(1, 2048 / std::max<std::size_t>(columns, 1));
}

void check_sums(const char* op, const Tensor& sums, const Tensor& logits) {
  require(
      sums.defined() && sums.dtype() == DType::f64 && sums.count() == 2 && sums.device() == logits.device(),
      Errc::invalid_argument, op, ": 'sums' must be 2 f64 on ", name(logits.device()));
}

}  // namespace

void softmax(const Tensor& out, const Tensor& in, const Stream& stream) {
  check("softmax", {{"out", out}, {"in", in}}, out.count() == in.count());
  if (const auto* d = on_device("softmax", out, stream)) return d->softmax(out, in, stream);
  const std::size_t n = last(in);
  float* y = out.data<float>();
  const float* x = in.data<float>();
  stream.parallel_for(rows(in), grain(n), [&](std::size_t begin, std::size_t end) {
    for (std::size_t i = begin; i < end; ++i) HWY_DYNAMIC_DISPATCH(softmax_row)(y + i * n, x + i * n, n);
  });
}

void softmax_backward(const Tensor& d_in, const Tensor& d_out, const Tensor& out, Into into,
                      const Stream& stream) {
  check("softmax_backward", {{"d_in", d_in}, {"d_out", d_out}, {"out", out}},
        d_in.count() == out.count() && d_out.count() == out.count());
  if (const auto* d = on_device("softmax_backward", d_in, stream))
    return d->softmax_backward(d_in, d_out, out, into, stream);
  const std::size_t n = last(out);
  float* dx = d_in.data<float>();
  const float *dy = d_out.data<float>(), *y = out.data<float>();
  stream.parallel_for(rows(out), grain(n), [&](std::size_t begin, std::size_t end) {
    for (std::size_t i = begin; i < end; ++i) HWY_DYNAMIC_DISPATCH(softmax_row_backward)
    (dx + i * n, dy + i * n, y + i * n, n, into == Into::accumulate);
  });
}

void cross_entropy(const Tensor& loss, const Tensor& sums, const Tensor& losses, const Tensor& log_sum,
                   const Tensor& logits, const Tensor& targets, const Stream& stream) {
  const std::size_t n = rows(logits), v = last(logits);
  check("cross_entropy", {{"loss", loss}, {"losses", losses}, {"log_sum", log_sum}, {"logits", logits}},
        loss.count() == 1 && losses.count() == n && log_sum.count() == n);
  check_sums("cross_entropy", sums, logits);
  check_indices("cross_entropy", {"targets", targets}, n, v, ignored);
  if (const auto* d = on_device("cross_entropy", logits, stream))
    return d->cross_entropy(loss, sums, losses, log_sum, logits, targets, stream);
  float *each = losses.data<float>(), *l = log_sum.data<float>();
  const float* x = logits.data<float>();
  const std::int32_t* target = targets.data<std::int32_t>();
  const double sum = ordered_sum(n, stream, [&](std::size_t begin, std::size_t end) {
    double part = 0;
    for (std::size_t i = begin; i < end; ++i) {
      const double log_total = HWY_DYNAMIC_DISPATCH(log_sum_of)(x + i * v, v);
      const double here =
          target[i] == ignored ? 0 : log_total - x[i * v + static_cast<std::size_t>(target[i])];
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
  *loss.data<float>() = count > 0 ? static_cast<float>(sum / count) : 0;
}

void cross_entropy_backward(const Tensor& d_logits, const Tensor& logits, const Tensor& log_sum,
                            const Tensor& targets, const Tensor& d_loss, const Tensor& sums,
                            const Stream& stream) {
  const std::size_t n = rows(logits), v = last(logits);
  check("cross_entropy_backward",
        {{"d_logits", d_logits}, {"logits", logits}, {"log_sum", log_sum}, {"d_loss", d_loss}},
        d_logits.count() == logits.count() && log_sum.count() == n && d_loss.count() == 1);
  check_sums("cross_entropy_backward", sums, logits);
  check_indices("cross_entropy_backward", {"targets", targets}, n, v, ignored);
  if (const auto* d = on_device("cross_entropy_backward", logits, stream))
    return d->cross_entropy_backward(d_logits, logits, log_sum, targets, d_loss, sums, stream);
  const double count = sums.data<double>()[1];
  const auto factor = static_cast<float>(*d_loss.data<float>() * (count > 0 ? 1 / count : 0));
  float* d = d_logits.data<float>();
  const float *x = logits.data<float>(), *l = log_sum.data<float>();
  const std::int32_t* target = targets.data<std::int32_t>();
  stream.parallel_for(n, grain(v), [&](std::size_t begin, std::size_t end) {
    for (std::size_t i = begin; i < end; ++i) {
      float* row = d + i * v;
      if (target[i] == ignored) {
        std::fill(row, row + v, 0.0f);
        continue;
      }
      HWY_DYNAMIC_DISPATCH(exponentials_of)(row, x + i * v, v, l[i], factor);
      row[target[i]] -= factor;
    }
  });
}

}  // namespace ops
}  // namespace rz
#endif
