#pragma once
/// What recorded operators share: memory for results, and values that backward reads again.

#include "autograd_lite/tape.h"
#include "tensor/element_ops.h"

namespace rz::nn {

inline ops::Into into(const Tape::GradTarget& target) {
  return target.accumulate ? ops::Into::accumulate : ops::Into::overwrite;
}

/// An uninitialized tensor of the same shape and dtype.
inline Tensor empty_like(Tape& tape, const Tensor& t) { return tape.empty(t.shape(), t.dtype()); }

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
