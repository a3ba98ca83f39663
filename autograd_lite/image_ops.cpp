#include "autograd_lite/image_ops.h"

#include <utility>

#include "autograd_lite/element_ops.h"
#include "autograd_lite/saved_variable.h"

namespace rz::nn {
namespace {

Tensor tensor_or_none(Tape& tape, Var v) { return v.defined() ? tape.value(v) : Tensor(); }

/// Calls backward(d_weight, d_bias, Into): once, or twice if one of them is overwritten and the other is
/// accumulated.
template <class F>
void each_parameter(Tape& tape, Var weight, Var bias, F&& backward) {
  const auto d_weight = tape.grad_target(weight), d_bias = tape.grad_target(bias);
  const Tensor &w = d_weight.tensor, &b = d_bias.tensor;
  if (!w.defined() || !b.defined() || d_weight.accumulate == d_bias.accumulate)
    return backward(w, b, w.defined() ? into(d_weight) : into(d_bias));
  backward(w, Tensor(), into(d_weight));
  backward(Tensor(), b, into(d_bias));
}

}  // namespace

Var conv2d(Tape& tape, Var x_var, Var weight, Var bias, const ops::Conv2d& options) {
  x_var = autocast_low(tape, x_var);
  weight = autocast_low(tape, weight), bias = autocast_low(tape, bias);
  const Tensor x = tape.value(x_var);
  const Tensor out = tape.empty(ops::conv2d_shape(x.shape(), tape.value(weight).shape(), options), x.dtype());
  const Shape window = tape.value(weight).shape();  // [out, channels of a group, h, w]
  const std::uint64_t macs = out.count() * window[1] * window[2] * window[3];
  tape.count_macs(macs, weight);
  ops::conv2d(out, x, tape.value(weight), tensor_or_none(tape, bias), options, tape.stream());
  return tape.record(
      out, {x_var, weight, bias}, [=, kept = SavedVariable(tape, x_var)](Tape& tape, const Tensor& d_out) {
        const Tensor x = kept(tape);
        with_grad_target(tape, x_var, x.dtype(), [&](Tape::GradTarget d_x) {
          tape.count_macs(macs * (std::uint64_t{d_x.tensor.defined()} + tape.needs_grad(weight)), weight);
          each_parameter(tape, weight, bias, [&](const Tensor& d_w, const Tensor& d_b, ops::Into of_both) {
            ops::conv2d_backward(std::exchange(d_x.tensor, {}), d_w, d_b, d_out, x, tape.value(weight),
                                 options, into(d_x), of_both, tape.stream());
          });
        });
      });
}

// ---- pooling

Var max_pool2d(Tape& tape, Var x_var, const ops::Pool2d& pool) {
  const Tensor x = tape.value(x_var);
  const Tensor out = tape.empty(ops::pool2d_shape("max_pool2d", x.shape(), pool), x.dtype()),
               indices = tape.empty(out.shape(), DType::i32);
  ops::max_pool2d(out, indices, x, pool, tape.stream());
  return tape.record(out, {x_var}, [x_var, indices, pool](Tape& tape, const Tensor& d_out) {
    with_grad_target(tape, x_var, d_out.dtype(), [&](const Tape::GradTarget& d_x) {
      ops::max_pool2d_backward(d_x.tensor, d_out, indices, pool, into(d_x), tape.stream());
    });
  });
}

Var avg_pool2d(Tape& tape, Var x_var, const ops::Pool2d& pool) {
  const Tensor x = tape.value(x_var);
  const Tensor out = tape.empty(ops::pool2d_shape("avg_pool2d", x.shape(), pool), x.dtype());
  ops::avg_pool2d(out, x, pool, tape.stream());
  return tape.record(out, {x_var}, [x_var, pool](Tape& tape, const Tensor& d_out) {
    with_grad_target(tape, x_var, d_out.dtype(), [&](const Tape::GradTarget& d_x) {
      ops::avg_pool2d_backward(d_x.tensor, d_out, pool, into(d_x), tape.stream());
    });
  });
}

Var adaptive_avg_pool2d(Tape& tape, Var x_var, ops::Size2 size) {
  const Tensor x = tape.value(x_var);
  const Shape& s = x.shape();
  require(s.dims() == 4, Errc::invalid_argument, "adaptive_avg_pool2d: images have four extents: x ",
          name(s));
  const Tensor out = tape.empty({s[0], s[1], size.h, size.w}, x.dtype());
  ops::adaptive_avg_pool2d(out, x, tape.stream());
  return tape.record(out, {x_var}, [x_var](Tape& tape, const Tensor& d_out) {
    with_grad_target(tape, x_var, d_out.dtype(), [&](const Tape::GradTarget& d_x) {
      ops::adaptive_avg_pool2d_backward(d_x.tensor, d_out, into(d_x), tape.stream());
    });
  });
}

// ---- norms

namespace {

void cast_norm(Tape& tape, Var& x, Var& weight, Var& bias) {
  x = autocast_wide(tape, x), weight = autocast_wide(tape, weight), bias = autocast_wide(tape, bias);
}

std::size_t channels_of(const char* op, const Shape& x) {
  require(x.dims() >= 2, Errc::invalid_argument, op, ": x ", name(x),
          " has no channels: they are the second of two to four extents");
  return x[1];
}

/// What backward of a batch norm reads.
struct BatchStatistics {
  Tensor mean, inverse_deviation;
  Tensor sums;  ///< of all ranks; undefined in evaluation
};

BatchStatistics batch_statistics(Tape& tape, const Tensor& x, const BatchNorm& options) {
  constexpr const char* op = "batch_norm";
  const std::size_t channels = channels_of(op, x.shape());
  BatchStatistics s{tape.empty({channels}), tape.empty({channels}), {}};
  if (!options.training) {
    ops::batch_norm_running(s.mean, s.inverse_deviation, options.running, options.epsilon, tape.stream());
    return s;
  }
  require(x.count() > channels || options.sum_over_ranks, Errc::invalid_argument, op,
          ": more than one value per channel is needed in training: x ", name(x.shape()));
  s.sums = tape.empty({2 * channels + 1}, DType::f64);
  ops::batch_norm_sums(s.sums, x, tape.stream());
  if (options.sum_over_ranks) options.sum_over_ranks(s.sums, tape.stream());
  ops::batch_norm_statistics(s.mean, s.inverse_deviation, options.running, s.sums, options.epsilon,
                             tape.stream());
  return s;
}

}  // namespace

Var batch_norm(Tape& tape, Var x_var, Var weight, Var bias, const BatchNorm& options) {
  cast_norm(tape, x_var, weight, bias);
  const Tensor x = tape.value(x_var);
  const BatchStatistics s = batch_statistics(tape, x, options);
  const Tensor out = empty_like(tape, x);
  ops::batch_norm(out, x, s.mean, s.inverse_deviation, tape.value(weight), tape.value(bias), tape.stream());
  return tape.record(
      out, {x_var, weight, bias},
      [x_var, weight, bias, s, kept = SavedVariable(tape, x_var), sum_over_ranks = options.sum_over_ranks](
          Tape& tape, const Tensor& d_out) {
        const Tensor x = kept(tape);
        const Tensor sums = tape.empty({2 * s.mean.count()}, DType::f64);
        ops::batch_norm_backward_sums(sums, d_out, x, s.mean, s.inverse_deviation, tape.stream());
        each_parameter(tape, weight, bias, [&](const Tensor& d_w, const Tensor& d_b, ops::Into of_both) {
          ops::batch_norm_parameters_backward(d_w, d_b, sums, of_both, tape.stream());
        });
        const bool training = s.sums.defined();
        if (training && sum_over_ranks) sum_over_ranks(sums, tape.stream());
        with_grad_target(tape, x_var, x.dtype(), [&](const Tape::GradTarget& d_x) {
          if (!d_x.tensor.defined()) return;
          ops::batch_norm_backward(d_x.tensor, d_out, x, tape.value(weight), s.mean, s.inverse_deviation,
                                   s.sums, training ? sums : Tensor(), into(d_x), tape.stream());
        });
      });
}

Var group_norm(Tape& tape, Var x_var, std::size_t groups, Var weight, Var bias, float epsilon) {
  cast_norm(tape, x_var, weight, bias);
  const Tensor x = tape.value(x_var);
  const std::size_t channels = channels_of("group_norm", x.shape());
  require(groups > 0 && channels % groups == 0, Errc::invalid_argument, "group_norm: the channels of x ",
          name(x.shape()), " do not divide into ", groups, " groups");
  const Tensor out = empty_like(tape, x), mean = tape.empty({x.shape()[0], groups}),
               inverse_deviation = tape.empty(mean.shape());
  ops::group_norm(out, mean, inverse_deviation, x, tape.value(weight), tape.value(bias), epsilon,
                  tape.stream());
  return tape.record(
      out, {x_var, weight, bias}, [=, kept = SavedVariable(tape, x_var)](Tape& tape, const Tensor& d_out) {
        const Tensor x = kept(tape);
        with_grad_target(tape, x_var, x.dtype(), [&](Tape::GradTarget d_x) {
          if (!d_x.tensor.defined()) d_x.tensor = empty_like(tape, x);
          each_parameter(tape, weight, bias,
                         [&, first = true](const Tensor& d_w, const Tensor& d_b, ops::Into of_both) mutable {
                           const Tensor to = std::exchange(first, false) ? d_x.tensor : empty_like(tape, x);
                           ops::group_norm_backward(to, d_w, d_b, d_out, x, tape.value(weight), mean,
                                                    inverse_deviation, into(d_x), of_both, tape.stream());
                         });
        });
      });
}

}  // namespace rz::nn
