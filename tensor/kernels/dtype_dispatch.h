#pragma once
/// Dispatch from a tensor's dtype to a template type.

#include "comm/core/error.h"
#include "comm/core/types.h"

namespace rz::ops {

/// Calls f(T{}) with T = float, f16 or bf16. Errc::invalid_argument for other types.
template <class F>
void dispatch_dtype(DType t, const F& f) {
  switch (t) {
    case DType::f32:
      return f(float{});
    case DType::f16:
      return f(f16{});
    case DType::bf16:
      return f(bf16{});
    default:
      fail(Errc::invalid_argument, "kernels work on f32, f16 and bf16, not on ", name(t));
  }
}

/// Calls f(G{}) for the gradient dtype of a parameter of type T: G = T or float. Errc::invalid_argument for
/// other types.
template <class T, class F>
void dispatch_gradient_dtype(DType t, const F& f) {
  if (t == DType::f32)
    f(float{});
  else if (t == dtype_of<T>)
    f(T{});
  else
    fail(Errc::invalid_argument, "the gradient of ", name(dtype_of<T>), " parameters must be ",
         name(dtype_of<T>), " or f32, not ", name(t));
}

}  // namespace rz::ops
