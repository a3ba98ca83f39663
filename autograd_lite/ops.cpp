#include "autograd_lite/ops.h"

#include "autograd_lite/saved_variable.h"
#include "comm/core/integer_math.h"
#include "tensor/shape_ops.h"

namespace rz::nn {
namespace {

Shape with_appended(const Shape& shape, std::size_t last) {
  if (shape.dims() == 4)
    fail(Errc::invalid_argument, "embedding: tokens ", name(shape), " have no room for another extent");
  std::array<std::size_t, 4> extents{};
  for (int i = 0; i < shape.dims(); ++i) extents[static_cast<std::size_t>(i)] = shape[i];
  extents[static_cast<std::size_t>(shape.dims())] = last;
  return Shape(std::span(extents.data(), static_cast<std::size_t>(shape.dims() + 1)));
}

void require_dims(const char* op, const char* what, const Tensor& t, int at_least, int at_most) {
  if (t.shape().dims() < at_least || t.shape().dims() > at_most)
    fail(Errc::invalid_argument, op, ": ", what, " ", name(t.shape()), " has ", t.shape().dims(),
         " extents, expected ", at_least, at_least == at_most ? "" : concat(" to ", at_most));
}

/// Calls `backward` for the gradients of weight and bias: once, or twice if one of them is overwritten and
/// the other is accumulated.
template <class F>
void both_parameters(Tape& tape, Var weight, Var bias, F&& backward) {
  const auto d_weight = tape.grad_target(weight);
  const auto d_bias = tape.grad_target(bias);
  const bool alike =
      !d_weight.tensor.defined() || !d_bias.tensor.defined() || d_weight.accumulate == d_bias.accumulate;
  if (alike) {
    backward(d_weight.tensor, d_bias.tensor, d_weight.tensor.defined() ? into(d_weight) : into(d_bias));
  } else {
    backward(d_weight.tensor, Tensor(), into(d_weight));
    backward(Tensor(), d_bias.tensor, into(d_bias));
  }
}

/// Backward of a layer norm of x, with the statistics kept by forward.
auto layer_norm_backward(Var x_var, Var weight, Var bias, const SavedVariable& kept, const Tensor& mean,
                         const Tensor& inverse_deviation) {
  return [=](Tape& tape, const Tensor& d_out) {
    const Tensor x = kept(tape);
    with_grad_target(tape, x_var, x.dtype(), [&](Tape::GradTarget d_x) {
      if (!d_x.tensor.defined()) d_x.tensor = empty_like(tape, x);
      both_parameters(
          tape, weight, bias,
          [&, first = true](const Tensor& d_w, const Tensor& d_b, ops::Into into_parameters) mutable {
            const Tensor to = std::exchange(first, false) ? d_x.tensor : empty_like(tape, x);
            ops::layer_norm_backward(to, d_w, d_b, d_out, x, tape.value(weight), mean, inverse_deviation,
                                     into(d_x), into_parameters, tape.stream());
          });
    });
  };
}

/// The same of an RMS norm.
auto rms_norm_backward(Var x_var, Var weight, const SavedVariable& kept, const Tensor& inverse_rms) {
  return [=](Tape& tape, const Tensor& d_out) {
    const Tensor x = kept(tape);
    with_grad_target(tape, x_var, x.dtype(), [&](Tape::GradTarget d_x) {
      if (!d_x.tensor.defined()) d_x.tensor = empty_like(tape, x);
      const auto d_weight = tape.grad_target(weight);
      ops::rms_norm_backward(d_x.tensor, d_weight.tensor, d_out, x, tape.value(weight), inverse_rms,
                             into(d_x), into(d_weight), tape.stream());
    });
  };
}

/// The mask of a part of a tensor along a dimension, which counts from the last: the masks of all parts are
/// that of the whole, whose random numbers each of them consumes.
ops::DropoutMask mask_of(Tape& tape, const Shape& shape, float p, PartOf part, int dimension) {
  if (part.of == 0) return tape.next_dropout_mask(p, shape.count());
  std::size_t before = 1, after = 1;  // elements of the other dimensions
  for (int d = -shape.dims(); d < dimension; ++d) before *= shape[d];
  for (int d = dimension + 1; d < 0; ++d) after *= shape[d];
  ops::DropoutMask mask = tape.next_dropout_mask(p, before * part.of * after);
  mask.offset += part.own.begin * after;
  mask.run = part.own.count() * after, mask.stride = part.of * after;
  return mask;
}

/// Memory for a statistic of each row.
Tensor row_statistic(Tape& tape, const char* op, const Tensor& x) {
  require_dims(op, "the input", x, 1, 4);
  return tape.empty({x.count() / std::max<std::size_t>(1, x.shape()[-1])});
}

/// a + b that a norm reads. They are two operators in backward: the norm adds to the gradient of the sum that
/// later users have accumulated; the sum then propagates it to a and b.
Var record_residual(Tape& tape, const Tensor& sum, Var a, Var b) {
  return tape.record(sum, {a, b}, [a, b](Tape& tape, const Tensor& d_sum) {
    tape.accumulate_grad(a, d_sum);
    tape.accumulate_grad(b, d_sum);
  });
}

}  // namespace

// ---- element-wise

Var gelu(Tape& tape, Var x) {
  const Tensor out = empty_like(tape, tape.value(x));
  ops::gelu(out, tape.value(x), tape.stream());
  return tape.record(out, {x}, [x, in = SavedVariable(tape, x)](Tape& tape, const Tensor& d_out) {
    with_grad_target(tape, x, d_out.dtype(), [&](const Tape::GradTarget& d_x) {
      ops::gelu_backward(d_x.tensor, d_out, in(tape), into(d_x), tape.stream());
    });
  });
}

Var swiglu(Tape& tape, Var gate_in, Var up_in) {
  const auto operands = autocast_alike(tape, gate_in, up_in);
  const Var gate = contiguous(tape, operands.first), up = contiguous(tape, operands.second);
  if (gate.index == up.index) return mul(tape, silu(tape, gate), up);  // whose gradients are added
  const Tensor out = empty_like(tape, tape.value(gate));
  ops::swiglu(out, tape.value(gate), tape.value(up), tape.stream());
  return tape.record(out, {gate, up},
                     [gate, up, g = SavedVariable(tape, gate), u = SavedVariable(tape, up)](
                         Tape& tape, const Tensor& d_out) {
                       with_grad_target(tape, gate, d_out.dtype(), [&](const Tape::GradTarget& d_gate) {
                         with_grad_target(tape, up, d_out.dtype(), [&](const Tape::GradTarget& d_up) {
                           ops::swiglu_backward(d_gate.tensor, d_up.tensor, d_out, g(tape), u(tape),
                                                into(d_gate), into(d_up), tape.stream());
                         });
                       });
                     });
}

Var dropout(Tape& tape, Var x, float p, PartOf part, int dimension) {
  require(p >= 0 && p < 1, Errc::invalid_argument, "dropout: p is ", p, ", expected 0 <= p < 1");
  if (p == 0) return x;
  const Tensor out = empty_like(tape, tape.value(x));
  const ops::DropoutMask mask = mask_of(tape, out.shape(), p, part, dimension);
  ops::dropout(out, tape.value(x), mask, tape.stream());
  return tape.record(out, {x}, [x, mask](Tape& tape, const Tensor& d_out) {
    const Tensor d = empty_like(tape, d_out);
    ops::dropout(d, d_out, mask, tape.stream());
    tape.accumulate_grad(x, d);
  });
}

// ---- linear

namespace {

/// Shape of the output of a linear layer.
Shape layer_shape(const Tensor& x, const Tensor& weight, WeightLayout layout) {
  require_dims("linear", "the input", x, 1, 4);
  require_dims("linear", "the weight", weight, 2, 2);
  return x.shape().with_last(weight.shape()[layout == WeightLayout::in_out ? 1 : 0]);
}

/// Memory for the output of a linear layer.
Tensor layer_output(Tape& tape, const Tensor& x, const Tensor& weight, WeightLayout layout) {
  return tape.empty(layer_shape(x, weight, layout), x.dtype());
}

/// Multiply-accumulates of x · W, and as many for the gradient of either.
std::uint64_t layer_macs(const Tensor& out, const Tensor& x) { return out.count() * x.shape()[-1]; }

Tensor value_or_none(Tape& tape, Var v) { return v.defined() ? tape.value(v) : Tensor(); }

/// Backward of x · W + bias; with respect to x only if `d_x` is defined.
void layer_backward(Tape& tape, Tape::GradTarget d_x, Var weight, Var bias, const Tensor& d_out,
                    const Tensor& x, WeightLayout layout) {
  if (!d_x.tensor.defined() && !tape.needs_grad(weight) && !tape.needs_grad(bias)) return;
  tape.count_macs(layer_macs(d_out, x) * (std::uint64_t{d_x.tensor.defined()} + tape.needs_grad(weight)),
                  weight);
  both_parameters(tape, weight, bias, [&](const Tensor& d_w, const Tensor& d_b, ops::Into into_parameters) {
    ops::linear_backward(std::exchange(d_x.tensor, {}), d_w, d_b, d_out, x, tape.value(weight), layout,
                         into(d_x), into_parameters, tape.stream());
  });
}

void cast_layer(Tape& tape, Var& x, Var& weight, Var& bias) {
  x = autocast_low(tape, x), weight = autocast_low(tape, weight), bias = autocast_low(tape, bias);
}

auto linear_backward(Var x_var, Var weight, Var bias, const SavedVariable& x, WeightLayout layout) {
  return [=](Tape& tape, const Tensor& d_out) {
    with_grad_target(tape, x_var, d_out.dtype(), [&](const Tape::GradTarget& d_x) {
      const bool defers = d_x.tensor.defined() && tape.can_defer(x_var);
      if (!defers) return layer_backward(tape, d_x, weight, bias, d_out, x(tape), layout);
      tape.count_macs(layer_macs(d_out, x(tape)), weight);
      ops::linear_backward(d_x.tensor, {}, {}, d_out, x(tape), tape.value(weight), layout, into(d_x),
                           ops::Into::overwrite, tape.stream());
      tape.defer([=](Tape& later) { layer_backward(later, {}, weight, bias, d_out, x(later), layout); });
    });
  };
}

}  // namespace

Var linear(Tape& tape, Var x_var, Var weight, Var bias, WeightLayout layout) {
  cast_layer(tape, x_var, weight, bias);
  const Tensor x = tape.value(x_var);
  const Tensor out = layer_output(tape, x, tape.value(weight), layout);
  tape.count_macs(layer_macs(out, x), weight);
  ops::linear(out, x, tape.value(weight), value_or_none(tape, bias), layout, tape.stream());
  return tape.record(out, {x_var, weight, bias},
                     linear_backward(x_var, weight, bias, SavedVariable(tape, x_var), layout));
}

namespace {

/// Memory for rows of this shape that begin at multiples of 128 bytes.
Tensor aligned_rows(Tape& tape, const Shape& shape, DType dtype) {
  const std::size_t columns = shape[-1], stride = round_up(columns, 128 / size_of(dtype));
  return tape.empty(shape.with_last(stride), dtype).columns(0, columns);
}

}  // namespace

Var linear_aligned(Tape& tape, Var x_var, Var weight, WeightLayout layout) {
  if (tape.stream().device().kind == Device::host) return linear(tape, x_var, weight, Var(), layout);
  Var no_bias;
  cast_layer(tape, x_var, weight, no_bias);
  const Tensor x = tape.value(x_var);
  const Shape shape = layer_shape(x, tape.value(weight), layout);
  const Tensor out = aligned_rows(tape, shape, x.dtype());
  tape.count_macs(layer_macs(out, x), weight);
  ops::linear(out, x, tape.value(weight), {}, layout, tape.stream());
  return tape.record(out, {x_var, weight},
                     linear_backward(x_var, weight, no_bias, SavedVariable(tape, x_var), layout));
}

Activation linear_gelu(Tape& tape, Var x_var, Var weight, Var bias, WeightLayout layout) {
  cast_layer(tape, x_var, weight, bias);
  const Tensor x = tape.value(x_var);
  const Tensor pre = layer_output(tape, x, tape.value(weight), layout), out = empty_like(tape, pre);
  tape.count_macs(layer_macs(out, x), weight);
  ops::linear_gelu(out, pre, x, tape.value(weight), value_or_none(tape, bias), layout, tape.stream());
  return {tape.record(pre, {x_var, weight, bias},
                      linear_backward(x_var, weight, bias, SavedVariable(tape, x_var), layout)),
          out};
}

Var linear(Tape& tape, const Activation& in, Var weight, Var bias, WeightLayout layout) {
  if (tape.autocast() && in.value.dtype() != *tape.autocast())  // made outside: the parts cast between them
    return linear(tape, gelu(tape, in.pre), weight, bias, layout);
  weight = autocast_low(tape, weight), bias = autocast_low(tape, bias);
  const Tensor pre = tape.value(in.pre);
  const Tensor out = layer_output(tape, in.value, tape.value(weight), layout);
  tape.count_macs(layer_macs(out, in.value), weight);
  ops::linear(out, in.value, tape.value(weight), value_or_none(tape, bias), layout, tape.stream());
  return tape.record(
      out, {in.pre, weight, bias},
      [pre_var = in.pre, weight, bias, x = in.value, pre, layout](Tape& tape, const Tensor& d_out) {
        if (tape.needs_grad(pre_var)) {
          const Tensor d_pre = empty_like(tape, pre);
          tape.count_macs(layer_macs(d_out, pre), weight);
          ops::linear_backward_through_gelu(d_pre, d_out, tape.value(weight), pre, layout, tape.stream());
          tape.accumulate_grad(pre_var, d_pre);
        }
        layer_backward(tape, {}, weight, bias, d_out, x, layout);
      });
}

Var activated(Tape& tape, const Activation& a) {
  return tape.record(a.value, {a.pre},
                     [pre = a.pre, in = SavedVariable(tape, a.pre)](Tape& tape, const Tensor& d_out) {
                       with_grad_target(tape, pre, d_out.dtype(), [&](const Tape::GradTarget& d_pre) {
                         ops::gelu_backward(d_pre.tensor, d_out, in(tape), into(d_pre), tape.stream());
                       });
                     });
}

namespace {

/// [rows, last extent]
Tensor as_matrix(const Tensor& t) {
  std::size_t rows = 1;
  for (int d = 0; d + 1 < t.shape().dims(); ++d) rows *= t.shape()[d];
  return t.reshape({rows, t.shape()[-1]});
}

/// Backward of a low-rank update, where `low` is scale · x · Aᵀ.
void low_rank_backward(Tape& tape, const LowRank& update, const Tensor& x, const Tensor& low,
                       const Tensor& d_out) {
  constexpr auto out_in = WeightLayout::out_in;
  const Tensor d_low = empty_like(tape, low);
  const auto d_b = tape.grad_target(update.b);
  tape.count_macs(layer_macs(d_out, low) * (1 + std::uint64_t{d_b.tensor.defined()}), update.b);
  ops::linear_backward(d_low, d_b.tensor, {}, d_out, low, tape.value(update.b), out_in, ops::Into::overwrite,
                       into(d_b), tape.stream());
  ops::scale(d_low, d_low, update.scale, tape.stream());
  with_grad_target(tape, update.x, x.dtype(), [&](const Tape::GradTarget& d_x) {
    const auto d_a = tape.grad_target(update.a);
    const std::uint64_t gradients = std::uint64_t{d_x.tensor.defined()} + d_a.tensor.defined();
    tape.count_macs(layer_macs(d_low, x) * gradients, update.a);
    ops::linear_backward(d_x.tensor, d_a.tensor, {}, d_low, x, tape.value(update.a), out_in, into(d_x),
                         into(d_a), tape.stream());
  });
}

}  // namespace

Var linear_low_rank(Tape& tape, Var x_var, Var weight, Var bias, WeightLayout layout, LowRank update) {
  const bool same = x_var.index == update.x.index;
  cast_layer(tape, x_var, weight, bias);
  update.x = same ? x_var : autocast_low(tape, update.x);
  update.a = autocast_low(tape, update.a), update.b = autocast_low(tape, update.b);
  const Tensor x = tape.value(x_var), x_low = tape.value(update.x);
  const Tensor low = layer_output(tape, x_low, tape.value(update.a), WeightLayout::out_in);
  const Tensor out = layer_output(tape, x, tape.value(weight), layout);
  tape.count_macs(layer_macs(out, x), weight);
  tape.count_macs(layer_macs(low, x_low), update.a);
  tape.count_macs(layer_macs(out, low), update.b);
  ops::linear(out, x, tape.value(weight), value_or_none(tape, bias), layout, tape.stream());
  ops::linear(low, x_low, tape.value(update.a), {}, WeightLayout::out_in, tape.stream());
  ops::scale(low, low, update.scale, tape.stream());
  ops::matmul(as_matrix(out), as_matrix(low), false, tape.value(update.b), true, ops::Into::accumulate,
              tape.stream());
  return tape.record(out, {x_var, weight, bias, update.x, update.a, update.b},
                     [x_var, weight, bias, layout, update, low, x = SavedVariable(tape, x_var),
                      x_low = SavedVariable(tape, update.x)](Tape& tape, const Tensor& d_out) {
                       linear_backward(x_var, weight, bias, x, layout)(tape, d_out);
                       low_rank_backward(tape, update, x_low(tape), low, d_out);
                     });
}

namespace {

/// A matrix, or one for each index of the leading extents.
struct Factor {
  const Tensor& tensor;
  bool transposed;
  Factor transpose() const { return {tensor, !transposed}; }
};

/// Its matrices below each other, as they are stored without a transposition.
Tensor stacked(Tape& tape, const Factor& f) {
  const Shape& shape = f.tensor.shape();
  const int dims = shape.dims();
  if (!f.transposed)
    return f.tensor.reshape({f.tensor.count() / std::max<std::size_t>(1, shape[-1]), shape[-1]});
  std::array<int, 4> order{0, 1, 2, 3};
  std::swap(order[static_cast<std::size_t>(dims - 1)], order[static_cast<std::size_t>(dims - 2)]);
  const std::span<const int> dimensions(order.data(), static_cast<std::size_t>(dims));
  const Tensor turned = tape.empty(ops::permuted(shape, dimensions), f.tensor.dtype());
  ops::permute(turned, f.tensor, dimensions, ops::Into::overwrite, tape.stream());
  return stacked(tape, {turned, false});
}

/// d = a · b; where d is one matrix and the factors are several, the sum of their products, which is one
/// product of stacked matrices.
void product(Tape& tape, const Tape::GradTarget& d, const Factor& a, const Factor& b) {
  if (d.tensor.shape().dims() > 2 || a.tensor.shape().dims() == 2)
    return ops::matmul(d.tensor, a.tensor, a.transposed, b.tensor, b.transposed, into(d), tape.stream());
  ops::matmul(d.tensor, stacked(tape, a.transpose()), true, stacked(tape, b), false, into(d), tape.stream());
}

}  // namespace

Var matmul(Tape& tape, Var a_var, bool transpose_a, Var b_var, bool transpose_b) {
  a_var = autocast_low(tape, a_var), b_var = autocast_low(tape, b_var);
  const Tensor a = tape.value(a_var), b = tape.value(b_var);
  require_dims("matmul", "the left factor", a, 2, 4);
  require_dims("matmul", "the right factor", b, 2, 4);
  const Shape& leading = (b.shape().dims() > 2 ? b : a).shape();
  const int dims = leading.dims();
  const Tensor out = tape.empty(leading.with(dims - 2, a.shape()[transpose_a ? -1 : -2])
                                    .with(dims - 1, b.shape()[transpose_b ? -2 : -1]),
                                a.dtype());
  const std::uint64_t macs = out.count() * a.shape()[transpose_a ? -2 : -1];
  tape.count_macs(macs, b_var);
  ops::matmul(out, a, transpose_a, b, transpose_b, ops::Into::overwrite, tape.stream());
  return tape.record(
      out, {a_var, b_var},
      [=, left = SavedVariable(tape, a_var), right = SavedVariable(tape, b_var)](Tape& tape,
                                                                                 const Tensor& d_out) {
        tape.count_macs(macs * (std::uint64_t{tape.needs_grad(a_var)} + tape.needs_grad(b_var)), b_var);
        const Factor a{left(tape), transpose_a}, b{right(tape), transpose_b}, d{d_out, false};
        // out = A·B: dA = dOut·Bᵀ, and its transpose is B·dOutᵀ.
        if (const auto d_a = tape.grad_target(a_var); d_a.tensor.defined())
          transpose_a ? product(tape, d_a, b, d.transpose()) : product(tape, d_a, d, b.transpose());
        if (const auto d_b = tape.grad_target(b_var); d_b.tensor.defined())
          transpose_b ? product(tape, d_b, d.transpose(), a) : product(tape, d_b, a.transpose(), d);
      });
}

// ---- norms

Var layer_norm(Tape& tape, Var x_var, Var weight, Var bias, float epsilon) {
  x_var = autocast_wide(tape, x_var);
  weight = autocast_wide(tape, weight), bias = autocast_wide(tape, bias);
  const Tensor x = tape.value(x_var);
  const Tensor out = empty_like(tape, x), mean = row_statistic(tape, "layer_norm", x),
               inverse_deviation = empty_like(tape, mean);
  ops::layer_norm(out, mean, inverse_deviation, x, tape.value(weight), tape.value(bias), epsilon,
                  tape.stream());
  return tape.record(
      out, {x_var, weight, bias},
      layer_norm_backward(x_var, weight, bias, SavedVariable(tape, x_var), mean, inverse_deviation));
}

SumAndNorm add_layer_norm(Tape& tape, Var a, Var b, Var weight, Var bias, float epsilon) {
  a = autocast_wide(tape, a), b = autocast_wide(tape, b);
  weight = autocast_wide(tape, weight), bias = autocast_wide(tape, bias);
  const Tensor sum = empty_like(tape, tape.value(a)), out = empty_like(tape, sum),
               mean = row_statistic(tape, "add_layer_norm", sum), inverse_deviation = empty_like(tape, mean);
  ops::add_layer_norm(sum, out, mean, inverse_deviation, tape.value(a), tape.value(b), tape.value(weight),
                      tape.value(bias), epsilon, tape.stream());
  SumAndNorm result;
  result.sum = record_residual(tape, sum, a, b);
  result.norm = tape.record(out, {result.sum, weight, bias},
                            layer_norm_backward(result.sum, weight, bias, SavedVariable(tape, result.sum),
                                                mean, inverse_deviation));
  return result;
}

Var rms_norm(Tape& tape, Var x_var, Var weight, float epsilon) {
  x_var = autocast_wide(tape, x_var), weight = autocast_wide(tape, weight);
  const Tensor x = tape.value(x_var);
  const Tensor out = empty_like(tape, x), inverse_rms = row_statistic(tape, "rms_norm", x);
  ops::rms_norm(out, inverse_rms, x, tape.value(weight), epsilon, tape.stream());
  return tape.record(out, {x_var, weight},
                     rms_norm_backward(x_var, weight, SavedVariable(tape, x_var), inverse_rms));
}

SumAndNorm add_rms_norm(Tape& tape, Var a, Var b, Var weight, float epsilon) {
  a = autocast_wide(tape, a), b = autocast_wide(tape, b), weight = autocast_wide(tape, weight);
  const Tensor sum = empty_like(tape, tape.value(a)), out = empty_like(tape, sum),
               inverse_rms = row_statistic(tape, "add_rms_norm", sum);
  ops::add_rms_norm(sum, out, inverse_rms, tape.value(a), tape.value(b), tape.value(weight), epsilon,
                    tape.stream());
  SumAndNorm result;
  result.sum = record_residual(tape, sum, a, b);
  result.norm =
      tape.record(out, {result.sum, weight},
                  rms_norm_backward(result.sum, weight, SavedVariable(tape, result.sum), inverse_rms));
  return result;
}

// ---- transformer

Var embedding(Tape& tape, const Tensor& tokens, Var table) {
  const Tensor& rows = tape.value(table);
  require_dims("embedding", "the table", rows, 2, 2);
  const Tensor out = tape.empty(with_appended(tokens.shape(), rows.shape()[1]), rows.dtype());
  ops::embedding(out, tokens, rows, tape.stream());
  return tape.record(out, {table}, [table, tokens](Tape& tape, const Tensor& d_out) {
    const auto d_table = tape.grad_target(table);
    ops::embedding_backward(d_table.tensor, d_out, tokens, into(d_table), tape.stream());
  });
}

Var embedding_with_positions(Tape& tape, const Tensor& tokens, Var table, Var positions) {
  require_dims("embedding_with_positions", "the table", tape.value(table), 2, 2);
  require_dims("embedding_with_positions", "the tokens", tokens, 2, 2);
  const Tensor rows = tape.value(table);
  const Tensor out = tape.empty(with_appended(tokens.shape(), rows.shape()[1]), rows.dtype());
  ops::embedding_with_positions(out, tokens, rows, tape.value(positions), tape.stream());
  return tape.record(out, {table, positions}, [table, positions, tokens](Tape& tape, const Tensor& d_out) {
    if (const auto d = tape.grad_target(table); d.tensor.defined())
      ops::embedding_backward(d.tensor, d_out, tokens, into(d), tape.stream());
    if (const auto d = tape.grad_target(positions); d.tensor.defined())
      ops::positions_backward(d.tensor, d_out, into(d), tape.stream());
  });
}

// ---- losses

ops::LossSum Loss::read(const Stream& stream) const {
  if (!has_terms()) {
    require(sum.defined(), Errc::invalid_argument, "a loss that stands for no value: set nn::Loss::sum");
    const Tensor value = sum.tape->value(sum).on_host(stream);
    require(value.count() == 1, Errc::invalid_argument, "a loss of shape ", name(value.shape()),
            ": expected a scalar, e.g. its nn::mean()");
    float scalar = 0;
    ops::copy(Tensor::borrow(&scalar, value.shape()), value, Stream());
    return {scalar, 1};
  }
  const Tensor on_host = sum_count.on_host(stream);
  return {on_host.data<double>()[0], static_cast<std::size_t>(on_host.data<double>()[1])};
}

// With autocast the logits are not cast: the operator computes 16-bit logits in f32, so that a cast would
// change no bit of the loss or of the gradient.
Loss cross_entropy(Tape& tape, Var logits_var, const Tensor& targets) {
  require_dims("cross_entropy", "the logits", tape.value(logits_var), 2, 4);
  const Shape shape = tape.value(logits_var).shape();
  const Shape rows{shape.count() / std::max<std::size_t>(1, shape[-1])};
  const Shape table{rows[0], shape[-1]};
  const Tensor logits = tape.value(logits_var).reshape(table);
  const Tensor losses = tape.empty(rows), log_sum = tape.empty(rows), target_rows = targets.reshape(rows);
  const Tensor loss = tape.empty({}), sums = tape.empty({2}, DType::f64);
  ops::cross_entropy(loss, sums, losses, log_sum, logits, target_rows, tape.stream());
  const Var result =
      tape.record(loss, {logits_var},
                  [logits_var, shape, table, kept = SavedVariable(tape, logits_var), log_sum, target_rows](
                      Tape& tape, const Tensor& d_loss) {
                    const bool overwrite = tape.can_reuse(logits_var);  // before `logits` adds a reference
                    const Tensor logits = kept(tape).reshape(table);
                    const Tensor d = overwrite ? logits : empty_like(tape, logits);
                    ops::cross_entropy_backward(d, logits, log_sum, target_rows, d_loss, tape.stream());
                    tape.accumulate_grad(logits_var, d.reshape(shape));
                  });
  return {result, sums};
}

Var mse(Tape& tape, Var prediction_var, const Tensor& given) {
  prediction_var = autocast_wide(tape, prediction_var);
  const Tensor target = tape.value(autocast_wide(tape, tape.constant(given)));
  const Tensor prediction = tape.value(prediction_var);
  if (prediction.shape() != target.shape())
    fail(Errc::invalid_argument, "mse: the prediction is ", name(prediction.shape()), ", the target ",
         name(target.shape()));
  const Tensor loss = tape.empty({});
  ops::mean_squared_error(loss, prediction, target, tape.stream());
  return tape.record(loss, {prediction_var},
                     [prediction_var, prediction = SavedVariable(tape, prediction_var), target](
                         Tape& tape, const Tensor& d_loss) {
                       with_grad_target(tape, prediction_var, target.dtype(), [&](const Tape::GradTarget& d) {
                         ops::mean_squared_error_backward(d.tensor, d_loss, prediction(tape), target, into(d),
                                                          tape.stream());
                       });
                     });
}

}  // namespace rz::nn
