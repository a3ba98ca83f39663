#include "autograd_lite/element_ops.h"

#include "autograd_lite/saved_variable.h"
#include "tensor/ops.h"
#include "tensor/shape_ops.h"

namespace rz::nn {
namespace {

bool can_cast(DType t) { return t == DType::f32 || t == DType::f16 || t == DType::bf16; }

Var cast_unless_cached(Tape& tape, Var x, DType dtype) {
  if (const Var before = tape.cached_cast(x, dtype); before.defined()) return before;
  const Var now = cast(tape, x, dtype);
  if (tape.is_parameter_memory(now)) tape.cache_cast(x, now);
  return now;
}

Var autocast_to(Tape& tape, Var x, DType dtype) {
  if (!x.defined()) return x;
  const DType from = tape.value(x).dtype();
  return from == dtype || !can_cast(from) ? x : cast_unless_cached(tape, x, dtype);
}

}  // namespace

Var cast(Tape& tape, Var x, DType dtype) {
  if (tape.value(x).dtype() == dtype) return x;
  const Tensor out = tape.empty(tape.value(x).shape(), dtype);
  ops::copy(out, tape.value(x), tape.stream());
  const Var result = tape.record(
      out, {x}, [x](Tape& tape, const Tensor& d_out) { tape.write_grad(tape.grad_target(x), d_out); });
  if (tape.is_parameter_memory(x)) tape.mark_view(result, x);
  return result;
}

Var autocast_low(Tape& tape, Var x) { return tape.autocast() ? autocast_to(tape, x, *tape.autocast()) : x; }

Var autocast_wide(Tape& tape, Var x) { return tape.autocast() ? autocast_to(tape, x, DType::f32) : x; }

std::pair<Var, Var> autocast_alike(Tape& tape, Var a, Var b) {
  if (!tape.autocast() || tape.value(a).dtype() == tape.value(b).dtype()) return {a, b};
  const Var wide = autocast_wide(tape, a);  // before b: the order of the casts is that of the arguments
  return {wide, autocast_wide(tape, b)};
}

namespace {

using ops::Binary;
using ops::Unary;
using ops::UnaryFunction;

Var wide(Tape& tape, Var x) { return autocast_wide(tape, x); }
Var same(Tape&, Var x) { return x; }

/// Records the backward of an operator of one tensor, which reads saved(tape).
template <class F>
Var record_unary(Tape& tape, Var x, const Tensor& out, UnaryFunction f, F saved) {
  return tape.record(out, {x}, [x, f, saved](Tape& tape, const Tensor& d_out) {
    with_grad_target(tape, x, d_out.dtype(), [&](const Tape::GradTarget& d_x) {
      ops::unary_backward(d_x.tensor, d_out, saved(tape), f, into(d_x), tape.stream());
    });
  });
}

Var unary(Tape& tape, Var x, UnaryFunction f) {
  const Tensor out = empty_like(tape, tape.value(x));
  ops::unary(out, tape.value(x), f, tape.stream());
  if (ops::saved_by(f.op) == ops::Saved::input) return record_unary(tape, x, out, f, SavedVariable(tape, x));
  return record_unary(tape, x, out, f, [out](const Tape&) { return out; });
}

/// Whether the gradient of an operand is that of the result.
bool passes_gradient(Binary op, int operand) {
  return op == Binary::add || (op == Binary::sub && operand == 0);
}

/// The gradient of an operand before the sum over repeated elements.
Tensor full_gradient(Tape& tape, Binary op, int operand, const Tensor& d_out, const Tensor& a,
                     const Tensor& b) {
  const Tensor d = empty_like(tape, d_out);
  if (op == Binary::sub)
    ops::scale(d, d_out, -1, tape.stream());
  else if (op == Binary::mul)
    ops::binary(d, d_out, operand == 0 ? b : a, op, tape.stream());
  else
    ops::binary_backward(d, d_out, a, b, op, operand, tape.stream());
  return d;
}

/// Uses d, of the shape of the result, as the gradient of an operand.
void propagate(Tape& tape, Var to, const Shape& shape, const Tensor& d) {
  if (shape == d.shape()) return tape.accumulate_grad(to, d);
  const auto target = tape.grad_target(to);
  ops::sum_to_size(target.tensor, tape.converted_for(target, d), 1, into(target), tape.stream());
}

/// The operands of sums are not read again.
Var record_sum(Tape& tape, Var a, Var b, Binary op, const Tensor& out) {
  return tape.record(out, {a, b},
                     [a, b, op, of_a = tape.value(a).shape(), of_b = tape.value(b).shape()](
                         Tape& tape, const Tensor& d_out) {
                       if (tape.needs_grad(a)) propagate(tape, a, of_a, d_out);
                       if (!tape.needs_grad(b)) return;
                       propagate(tape, b, of_b,
                                 passes_gradient(op, 1) ? d_out : full_gradient(tape, op, 1, d_out, {}, {}));
                     });
}

Var record_product(Tape& tape, Var a, Var b, Binary op, const Tensor& out) {
  return tape.record(
      out, {a, b},
      [a, b, op, x = SavedVariable(tape, a), y = SavedVariable(tape, b)](Tape& tape, const Tensor& d_out) {
        const auto propagate_to = [&](Var to, int operand) {
          if (!tape.needs_grad(to)) return;
          const Tensor first = x(tape), second = y(tape);
          propagate(tape, to, (operand == 0 ? first : second).shape(),
                    full_gradient(tape, op, operand, d_out, first, second));
        };
        propagate_to(a, 0);
        propagate_to(b, 1);
      });
}

/// Rows with a stride are read by kernels of equal shapes, and by backward of add, sub and mul.
bool needs_contiguous(Tape& tape, Var a, Var b, Binary op) {
  return op > Binary::mul || tape.value(a).shape() != tape.value(b).shape();
}

Var binary(Tape& tape, Var a_in, Var b_in, Binary op) {
  if (op == Binary::pow) a_in = autocast_wide(tape, a_in), b_in = autocast_wide(tape, b_in);
  auto [a, b] = autocast_alike(tape, a_in, b_in);
  const Shape shape = ops::broadcast_shapes(ops::name_of(op), tape.value(a).shape(), tape.value(b).shape());
  if (needs_contiguous(tape, a, b, op)) a = contiguous(tape, a), b = contiguous(tape, b);
  const Tensor out = tape.empty(shape, tape.value(a).dtype());
  ops::binary(out, tape.value(a), tape.value(b), op, tape.stream());
  if (ops::is_comparison(op)) return tape.record(out, {}, [](Tape&, const Tensor&) {});
  return op == Binary::add || op == Binary::sub ? record_sum(tape, a, b, op, out)
                                                : record_product(tape, a, b, op, out);
}

/// A number in the dtype of an operand.
Tensor scalar(Tape& tape, float value, DType dtype) {
  const Tensor t = tape.empty({}, dtype);
  ops::fill(t, value, tape.stream());
  return t;
}
Var scalar_like(Tape& tape, float value, Var operand) {
  return tape.constant(scalar(tape, value, tape.value(operand).dtype()));
}

/// factor · x + shift
Var affine(Tape& tape, Var x, float factor, float shift) {
  const Tensor out = empty_like(tape, tape.value(x));
  ops::affine(out, tape.value(x), factor, shift, tape.stream());
  return tape.record(out, {x}, [x, factor](Tape& tape, const Tensor& d_out) {
    if (factor == 1) return tape.accumulate_grad(x, d_out);
    const Tensor d = empty_like(tape, d_out);
    ops::scale(d, d_out, factor, tape.stream());
    tape.accumulate_grad(x, d);
  });
}

/// The sum over the extents that `kept` lacks or has as 1, divided, in another shape of the same count.
Var sum_over(Tape& tape, Var x, const Shape& kept, const Shape& shape, double divisor) {
  const Tensor in = tape.value(x), out = tape.empty(kept, in.dtype());
  ops::sum_to_size(out, in, divisor, ops::Into::overwrite, tape.stream());
  return tape.record(out.reshape(shape), {x}, [x, kept, divisor](Tape& tape, const Tensor& d_out) {
    const auto d_x = tape.grad_target(x);
    ops::expand(d_x.tensor, tape.converted_for(d_x, d_out.reshape(kept)), static_cast<float>(1 / divisor),
                into(d_x), tape.stream());
  });
}

/// The shapes of a sum over one extent.
struct Reduced {
  Shape kept, left_out;
  std::size_t count;
};
Reduced reduced(const char* op, const Shape& shape, int extent) {
  const int dims = shape.dims(), at = ops::dimension(op, shape, extent);
  std::array<std::size_t, 4> kept{}, others{};
  for (int d = 0, other = 0; d < dims; ++d) {
    kept[static_cast<std::size_t>(d)] = d == at ? 1 : shape[d];
    if (d != at) others[static_cast<std::size_t>(other++)] = shape[d];
  }
  const auto first = [](const std::array<std::size_t, 4>& extents, int n) {
    return Shape(std::span<const std::size_t>(extents.data(), static_cast<std::size_t>(n)));
  };
  return {first(kept, dims), first(others, dims - 1), shape[at]};
}

Var sum_over_extent(Tape& tape, const char* op, Var x, int extent, bool keepdim, bool mean) {
  const Reduced r = reduced(op, tape.value(x).shape(), extent);
  return sum_over(tape, x, r.kept, keepdim ? r.kept : r.left_out, mean ? static_cast<double>(r.count) : 1);
}

template <auto forward, auto backward>
Var over_rows(Tape& tape, Var given) {
  const Var x = autocast_wide(tape, given);
  const Tensor out = empty_like(tape, tape.value(x));
  forward(out, tape.value(x), tape.stream());
  return tape.record(out, {x}, [x, out](Tape& tape, const Tensor& d_out) {
    with_grad_target(tape, x, d_out.dtype(), [&](const Tape::GradTarget& d_x) {
      backward(d_x.tensor, d_out, out, into(d_x), tape.stream());
    });
  });
}

}  // namespace

#define RZ_UNARY(name, saved, cast) \
  Var name(Tape& tape, Var x) { return unary(tape, cast(tape, x), Unary::name); }
#define RZ_PARAMETRIC(name, saved, cast, parameter) \
  Var name(Tape& tape, Var x, float p) { return unary(tape, cast(tape, x), {Unary::name, p}); }
#include "tensor/element_ops.inc"
#define RZ_BINARY(name) \
  Var name(Tape& tape, Var a, Var b) { return binary(tape, a, b, Binary::name); }
#define RZ_COMPARISON(name) \
  RZ_BINARY(name)           \
  Var name(Tape& tape, Var a, float b) { return binary(tape, a, scalar_like(tape, b, a), Binary::name); }
#include "tensor/element_ops.inc"

Var where(Tape& tape, Var given, Var a_in, Var b_in) {
  const auto operands = autocast_alike(tape, a_in, b_in);
  const Var a = contiguous(tape, operands.first), b = contiguous(tape, operands.second);
  const DType dtype = tape.value(a).dtype();
  Var condition = contiguous(tape, given);
  if (tape.value(condition).dtype() != dtype)  // a small number of a wider type would become 0
    condition = cast(tape, ne(tape, condition, 0), dtype);
  const Shape of_a = tape.value(a).shape(), of_b = tape.value(b).shape();
  const Shape shape = ops::broadcast_shapes("where", tape.value(condition).shape(),
                                            ops::broadcast_shapes("where", of_a, of_b));
  const Tensor out = tape.empty(shape, dtype);
  ops::where(out, tape.value(condition), tape.value(a), tape.value(b), tape.stream());
  return tape.record(
      out, {a, b},
      [a, b, of_a, of_b, kept = SavedVariable(tape, condition)](Tape& tape, const Tensor& d_out) {
        const Tensor zero = scalar(tape, 0, d_out.dtype());
        const auto propagate_to = [&](Var to, const Shape& shape, const Tensor& where_true,
                                      const Tensor& where_false) {
          if (!tape.needs_grad(to)) return;
          const Tensor d = empty_like(tape, d_out);
          ops::where(d, kept(tape), where_true, where_false, tape.stream());
          propagate(tape, to, shape, d);
        };
        propagate_to(a, of_a, d_out, zero);
        propagate_to(b, of_b, zero, d_out);
      });
}

Var masked_fill(Tape& tape, Var x, Var mask, float value) {
  return where(tape, mask, scalar_like(tape, value, x), x);
}

Var contiguous(Tape& tape, Var x) {
  if (tape.value(x).contiguous()) return x;
  const Tensor out = empty_like(tape, tape.value(x));
  ops::copy(out, tape.value(x), tape.stream());
  return tape.record(out, {x}, [x](Tape& tape, const Tensor& d_out) { tape.accumulate_grad(x, d_out); });
}

Var neg(Tape& tape, Var x) { return mul(tape, x, -1); }

Var clamp(Tape& tape, Var x, float low, float high) {
  const Tensor out = empty_like(tape, tape.value(x));
  ops::clamp(out, tape.value(x), low, high, tape.stream());
  return tape.record(out, {x}, [x, low, high, in = SavedVariable(tape, x)](Tape& tape, const Tensor& d_out) {
    with_grad_target(tape, x, d_out.dtype(), [&](const Tape::GradTarget& d_x) {
      ops::clamp_backward(d_x.tensor, d_out, in(tape), low, high, into(d_x), tape.stream());
    });
  });
}

Var softmax(Tape& tape, Var x) { return over_rows<ops::softmax, ops::softmax_backward>(tape, x); }
Var log_softmax(Tape& tape, Var x) { return over_rows<ops::log_softmax, ops::log_softmax_backward>(tape, x); }

Var add(Tape& tape, Var x, float y) { return affine(tape, x, 1, y); }
Var sub(Tape& tape, Var x, float y) { return affine(tape, x, 1, -y); }
Var sub(Tape& tape, float x, Var y) { return affine(tape, y, -1, x); }
Var div(Tape& tape, Var x, float divisor) { return mul(tape, x, 1 / divisor); }
Var div(Tape& tape, float x, Var y) { return mul(tape, reciprocal(tape, y), x); }

Var mul(Tape& tape, Var x, float factor) {
  const Tensor out = empty_like(tape, tape.value(x));
  ops::scale(out, tape.value(x), factor, tape.stream());
  return tape.record(out, {x}, [x, factor](Tape& tape, const Tensor& d_out) {
    const Tensor d = empty_like(tape, d_out);
    ops::scale(d, d_out, factor, tape.stream());
    tape.accumulate_grad(x, d);
  });
}

Var sum(Tape& tape, Var given) {
  const Var x = autocast_wide(tape, given);
  return sum_over(tape, x, {}, {}, 1);
}
Var mean(Tape& tape, Var x) { return sum_over(tape, x, {}, {}, static_cast<double>(tape.value(x).count())); }
Var sum(Tape& tape, Var x, int extent, bool keepdim) {
  return sum_over_extent(tape, "sum", autocast_wide(tape, x), extent, keepdim, false);
}
Var mean(Tape& tape, Var x, int extent, bool keepdim) {
  return sum_over_extent(tape, "mean", x, extent, keepdim, true);
}

Var expand(Tape& tape, Var given, const Shape& shape) {
  const Var x = contiguous(tape, given);
  const Tensor in = tape.value(x);
  if (in.shape() == shape) return x;
  require(ops::broadcast_shapes("expand", in.shape(), shape) == shape, Errc::invalid_argument,
          "expand: ", name(in.shape()), " does not broadcast to ", name(shape));
  const Tensor out = tape.empty(shape, in.dtype());
  ops::expand(out, in, 1, ops::Into::overwrite, tape.stream());
  return tape.record(
      out, {x}, [x, of_x = in.shape()](Tape& tape, const Tensor& d_out) { propagate(tape, x, of_x, d_out); });
}

}  // namespace rz::nn

namespace rz {
namespace {

Tape& tape_of(const char* sign, Var a) {
  require(a.defined() && a.tape, Errc::invalid_argument, "operator ", sign,
          ": an operand is a Var that stands for no value");
  return *a.tape;
}
Tape& tape_of(const char* sign, Var a, Var b) {
  Tape& tape = tape_of(sign, a);
  require(&tape_of(sign, b) == &tape, Errc::invalid_argument, "operator ", sign,
          ": the operands are of two tapes; record both on one");
  return tape;
}

}  // namespace

Var operator+(Var a, Var b) { return nn::add(tape_of("+", a, b), a, b); }
Var operator-(Var a, Var b) { return nn::sub(tape_of("-", a, b), a, b); }
Var operator*(Var a, Var b) { return nn::mul(tape_of("*", a, b), a, b); }
Var operator/(Var a, Var b) { return nn::div(tape_of("/", a, b), a, b); }
Var operator+(Var a, float b) { return nn::add(tape_of("+", a), a, b); }
Var operator-(Var a, float b) { return nn::sub(tape_of("-", a), a, b); }
Var operator*(Var a, float b) { return nn::mul(tape_of("*", a), a, b); }
Var operator/(Var a, float b) { return nn::div(tape_of("/", a), a, b); }
Var operator+(float a, Var b) { return b + a; }
Var operator-(float a, Var b) { return nn::sub(tape_of("-", b), a, b); }
Var operator*(float a, Var b) { return b * a; }
Var operator/(float a, Var b) { return nn::div(tape_of("/", b), a, b); }
Var operator-(Var a) { return nn::neg(tape_of("-", a), a); }

}  // namespace rz
