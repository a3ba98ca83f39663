#include "autograd_lite/autocast.h"

#include "tensor/ops.h"

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

}  // namespace rz::nn
