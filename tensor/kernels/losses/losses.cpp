// Rows are divided over the stream's threads. A row's sums are in double and in one order.

#include <algorithm>

#include "tensor/kernels/check.h"
#include "tensor/kernels/device_ops.h"
#include "tensor/kernels/dtype_dispatch.h"
#include "tensor/kernels/losses/row_losses.h"
#include "tensor/kernels/ordered_sum.h"

namespace rz::ops {

namespace {

using losses::Matrix;

/// One thread.
struct Alone {
  std::size_t first() const { return 0; }
  std::size_t step() const { return 1; }
  double sum(double x) const { return x; }
  float max(float x) const { return x; }
};

template <class T>
Matrix<T> matrix_of(const Tensor& t) {
  return {t.data<std::remove_const_t<T>>(), t.row_stride()};
}

void check_pair(const char* op, const char* what, const Tensor& t, const Tensor& logits) {
  require(t.defined() && t.dtype() == DType::f64 && t.count() == 2 && t.device() == logits.device(),
          Errc::invalid_argument, op, ": '", what, "' must be 2 f64 on ", name(logits.device()));
}

void check_statistics(const char* op, std::initializer_list<Argument> arguments) {
  check_dtype(op, DType::f32, arguments);
}

void check_soft(const char* op, const SoftLoss& how, const Tensor& logits, const Tensor& targets) {
  require(how.temperature > 0, Errc::invalid_argument, op, ": temperature is ", how.temperature,
          ", expected more than 0");
  if (targets.dtype() != DType::f32) check_dtype(op, logits.dtype(), {{"targets", targets}});
}

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

void write_sums(const Tensor& loss, const Tensor& sums, double sum, std::size_t count) {
  sums.data<double>()[0] = sum;
  sums.data<double>()[1] = static_cast<double>(count);
  *loss.data<float>() = static_cast<float>(sum);
}

/// Σ f(row), which it also writes to losses[row].
template <class F>
double sum_rows(const Tensor& losses, const Stream& stream, const F& f) {
  return ordered_sum(losses.count(), stream, [&](std::size_t begin, std::size_t end) {
    double sum = 0;
    for (std::size_t r = begin; r < end; ++r) {
      const double here = f(r);
      losses.data<float>()[r] = static_cast<float>(here);
      sum += here;
    }
    return sum;
  });
}

template <class F>
void each_row(const Tensor& t, const Stream& stream, const F& f) {
  stream.parallel_for(rows(t), 1, [&](std::size_t begin, std::size_t end) {
    for (std::size_t r = begin; r < end; ++r) f(r);
  });
}

std::size_t terms(const Tensor& targets, std::int32_t ignored) {
  const auto* const t = targets.data<std::int32_t>();
  return targets.count() - static_cast<std::size_t>(std::count(t, t + targets.count(), ignored));
}

/// Calls f(X{}, Y{}) for logits of X and targets of Y, which is X or float.
template <class F>
void dispatch_both(const Tensor& logits, const Tensor& targets, const F& f) {
  dispatch_dtype(logits.dtype(), [&](auto x) {
    if (targets.dtype() == DType::f32)
      f(x, float{});
    else
      f(x, x);
  });
}

}  // namespace

void soft_loss(const Tensor& loss, const Tensor& sums, const Tensor& each, const Tensor& statistics,
               const Tensor& logits, const Tensor& targets, const SoftLoss& how, const Stream& stream) {
  constexpr const char* op = "soft_loss";
  const std::size_t n = rows(logits), v = last(logits);
  check(op,
        {{"loss", loss},
         {"losses", each},
         {"statistics", statistics},
         {"logits", logits},
         {"targets", targets}},
        loss.count() == 1 && each.count() == n && statistics.count() == 2 * n && same_rows(targets, logits),
        Rows::any_stride);
  check_pair(op, "sums", sums, logits);
  check_soft(op, how, logits, targets);
  check_statistics(op, {{"loss", loss}, {"losses", each}, {"statistics", statistics}});
  if (const auto* d = on_device(op, logits, stream))
    return d->soft_loss(loss, sums, each, statistics, logits, targets, how, stream);
  dispatch_both(logits, targets, [&](auto x_type, auto y_type) {
    const auto x = matrix_of<const decltype(x_type)>(logits);
    const auto y = matrix_of<const decltype(y_type)>(targets);
    const double sum = sum_rows(each, stream, [&](std::size_t r) {
      losses::SoftRow row{};
      const double here = losses::soft_row(Alone(), x.row(r), y.row(r), v, how, row);
      statistics.data<float>()[2 * r] = static_cast<float>(row.logits);
      statistics.data<float>()[2 * r + 1] = static_cast<float>(row.targets);
      return here;
    });
    write_sums(loss, sums, sum, n);
  });
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
  const float factor = *d_loss.data<float>();
  const float* const kept = statistics.data<float>();
  dispatch_both(logits, targets, [&](auto x_type, auto y_type) {
    using X = decltype(x_type);
    const auto x = matrix_of<const X>(logits);
    const auto y = matrix_of<const decltype(y_type)>(targets);
    const auto d = matrix_of<X>(d_logits);
    each_row(logits, stream, [&](std::size_t r) {
      losses::soft_row_backward(Alone(), d.row(r), x.row(r), y.row(r), last(logits), how,
                                {kept[2 * r], kept[2 * r + 1]}, factor);
    });
  });
}

void label_loss(const Tensor& loss, const Tensor& sums, const Tensor& each, const Tensor& log_sum,
                const Tensor& logits, const Tensor& targets, const LabelLoss& how, const Stream& stream) {
  constexpr const char* op = "label_loss";
  const std::size_t n = rows(logits);
  check(op, {{"loss", loss}, {"losses", each}, {"log_sum", log_sum}, {"logits", logits}},
        loss.count() == 1 && each.count() == n && log_sum.count() == n, Rows::any_stride);
  check_pair(op, "sums", sums, logits);
  check_label(op, how);
  check_targets(op, targets, logits, how.ignore_index);
  if (const auto* d = on_device(op, logits, stream))
    return d->label_loss(loss, sums, each, log_sum, logits, targets, how, stream);
  dispatch_dtype(logits.dtype(), [&](auto type) {
    const auto x = matrix_of<const decltype(type)>(logits);
    const double sum = sum_rows(each, stream, [&](std::size_t r) {
      double total = 0;
      const double here =
          losses::label_row(Alone(), x.row(r), last(logits), targets.data<std::int32_t>()[r], how, total);
      log_sum.data<float>()[r] = static_cast<float>(total);
      return here;
    });
    write_sums(loss, sums, sum, terms(targets, how.ignore_index));
  });
}

void label_loss_backward(const Tensor& d_logits, const Tensor& logits, const Tensor& log_sum,
                         const Tensor& targets, const Tensor& d_loss, const LabelLoss& how,
                         const Stream& stream) {
  constexpr const char* op = "label_loss_backward";
  check(op, {{"d_logits", d_logits}, {"logits", logits}, {"log_sum", log_sum}, {"d_loss", d_loss}},
        same_rows(d_logits, logits) && log_sum.count() == rows(logits) && d_loss.count() == 1,
        Rows::any_stride);
  check_dtype(op, logits.dtype(), {{"d_logits", d_logits}});
  check_label(op, how);
  check_targets(op, targets, logits, how.ignore_index);
  if (const auto* d = on_device(op, logits, stream))
    return d->label_loss_backward(d_logits, logits, log_sum, targets, d_loss, how, stream);
  dispatch_dtype(logits.dtype(), [&](auto type) {
    using T = decltype(type);
    const auto x = matrix_of<const T>(logits);
    const auto d = matrix_of<T>(d_logits);
    each_row(logits, stream, [&](std::size_t r) {
      losses::label_row_backward(Alone(), d.row(r), x.row(r), last(logits), targets.data<std::int32_t>()[r],
                                 how, log_sum.data<float>()[r], *d_loss.data<float>());
    });
  });
}

void accuracy(const Tensor& counts, const Tensor& logits, const Tensor& targets, std::int32_t ignore_index,
              const Stream& stream) {
  constexpr const char* op = "accuracy";
  check(op, {{"logits", logits}}, true, Rows::any_stride);
  check_pair(op, "counts", counts, logits);
  check_targets(op, targets, logits, ignore_index);
  if (const auto* d = on_device(op, logits, stream))
    return d->accuracy(counts, logits, targets, ignore_index, stream);
  dispatch_dtype(logits.dtype(), [&](auto type) {
    const auto x = matrix_of<const decltype(type)>(logits);
    counts.data<double>()[0] = ordered_sum(rows(logits), stream, [&](std::size_t begin, std::size_t end) {
      double right = 0;
      for (std::size_t r = begin; r < end; ++r) {
        const std::int32_t t = targets.data<std::int32_t>()[r];
        right += t != ignore_index && losses::is_largest(Alone(), x.row(r), last(logits), t);
      }
      return right;
    });
  });
  counts.data<double>()[1] = static_cast<double>(terms(targets, ignore_index));
}

void element_loss(const Tensor& loss, const Tensor& sums, const Tensor& x, const Tensor& y, ElementLoss how,
                  const Stream& stream) {
  constexpr const char* op = "element_loss";
  check(op, {{"loss", loss}, {"x", x}, {"y", y}}, loss.count() == 1 && x.count() == y.count());
  check_pair(op, "sums", sums, x);
  check_dtype(op, x.dtype(), {{"y", y}});
  if (const auto* d = on_device(op, x, stream)) return d->element_loss(loss, sums, x, y, how, stream);
  dispatch_dtype(x.dtype(), [&](auto type) {
    using T = decltype(type);
    const T *const a = x.data<T>(), *const b = y.data<T>();
    const double sum = ordered_sum(x.count(), stream, [&](std::size_t begin, std::size_t end) {
      double part = 0;
      for (std::size_t i = begin; i < end; ++i)
        part += losses::element_of(how, double{to_f32(a[i])}, double{to_f32(b[i])});
      return part;
    });
    write_sums(loss, sums, sum, x.count());
  });
}

void element_loss_backward(const Tensor& d_x, const Tensor& d_loss, const Tensor& x, const Tensor& y,
                           ElementLoss how, Into into, const Stream& stream) {
  constexpr const char* op = "element_loss_backward";
  check(op, {{"d_x", d_x}, {"d_loss", d_loss}, {"x", x}, {"y", y}},
        d_x.count() == x.count() && x.count() == y.count() && d_loss.count() == 1);
  check_dtype(op, x.dtype(), {{"d_x", d_x}, {"y", y}});
  if (const auto* d = on_device(op, x, stream))
    return d->element_loss_backward(d_x, d_loss, x, y, how, into, stream);
  const float factor = *d_loss.data<float>();
  dispatch_dtype(x.dtype(), [&](auto type) {
    using T = decltype(type);
    stream.parallel_for(x.count(), 1024, [&](std::size_t begin, std::size_t end) {
      for (std::size_t i = begin; i < end; ++i) {
        const float here =
            losses::element_gradient(how, to_f32(x.data<T>()[i]), to_f32(y.data<T>()[i])) * factor;
        T& d = d_x.data<T>()[i];
        d = from_f32<T>(into == Into::accumulate ? to_f32(d) + here : here);
      }
    });
  });
}

}  // namespace rz::ops
