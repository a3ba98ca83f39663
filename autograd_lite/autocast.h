#pragma once
/// How operators follow Tape::autocast(). Without it each function returns its argument. An undefined Var
/// stays undefined; values that are not f32, f16 or bf16 are not cast.

#include <utility>

#include "tape.h"

namespace rz::nn {

/// x in another dtype, f32, f16 or bf16, rounded to nearest; x itself if it has that dtype. The gradient is
/// converted back. The cast of a parameter is not kept where the parameter's memory is released.
Var cast(Tape&, Var x, DType);

/// For products: in the dtype of autocast.
Var autocast_low(Tape&, Var);
/// For norms, softmax and losses: in f32.
Var autocast_wide(Tape&, Var);
/// For sums and element-wise products: both in f32 if their dtypes differ.
std::pair<Var, Var> autocast_alike(Tape&, Var a, Var b);

}  // namespace rz::nn
