#pragma once
/// What recorded operators share: memory for results, and values that backward reads again.

#include "../tensor/element_ops.h"
#include "tape.h"

namespace rz::nn {

inline ops::Into into(const Tape::GradTarget& target) {
  return target.accumulate ? ops::Into::accumulate : ops::Into::overwrite;
}

/// An uninitialized tensor of the same shape and dtype.
inline Tensor empty_like(Tape& tape, const Tensor& t) { return tape.empty(t.shape(), t.dtype()); }

/// Calls write(target) for an input's gradient by a kernel whose result has this dtype. The gradient of a
/// parameter may be of another one, f32 beside a value in 16 bits: the kernel then writes memory of its own,
/// which is converted.
template <class F>
void with_grad_target(Tape& tape, Var x, DType dtype, F&& write) {
  const Tape::GradTarget target = tape.grad_target(x);
  if (!target.tensor.defined() || target.tensor.dtype() == dtype) return write(target);
  const Tape::GradTarget own{tape.empty(target.tensor.shape(), dtype), false};
  write(own);
  tape.write_grad(target, own.tensor);
}

/// An input that backward reads again. For a parameter it reads the current value, since the memory may have
/// moved or been released. Other tensors are kept, which also prevents operators from overwriting them
/// (Tape::can_reuse).
class SavedVariable {
 public:
  SavedVariable(const Tape& tape, Var v)
      : var_(v), value_(tape.is_parameter_memory(v) ? Tensor() : tape.value(v)) {}
  const Tensor& operator()(const Tape& tape) const { return value_.defined() ? value_ : tape.value(var_); }

 private:
  Var var_;
  Tensor value_;
};

}  // namespace rz::nn
