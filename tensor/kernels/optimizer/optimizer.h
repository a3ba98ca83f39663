#pragma once
/// Element-wise optimizer updates and sums of squares on raw memory; single-threaded. Gradients may be f32,
/// f16 or bf16; everything else is computed and kept in f32, and a 16-bit working copy of the values is
/// rounded to nearest. Each element is computed independently, with one rounding per operation (no fused
/// multiply-add), so that any split of a span and any CPU give the same bits. State that would be subnormal
/// is flushed to 0: decay cannot shrink it further, and it would slow down every later update.

#include <cstddef>

#include "tensor/kernels/scalar/optimizer_step.h"

namespace rz::kernels {

/// The formula of each rule is at its constants. With state2: AMSGrad.
void adam(const UpdateRun&, const AdamFactors&);
/// Without state0 there is no momentum.
void sgd(const UpdateRun&, const SgdFactors&);
void lion(const UpdateRun&, const LionFactors&);
void adagrad(const UpdateRun&, const AdagradFactors&);
/// Without the state after those that the constants need there is no momentum.
void rmsprop(const UpdateRun&, const RmspropFactors&);
void decayed_step(const UpdateRun&, const DecayedStepFactors&);

/// The first half of LAMB: new m and v. squares[2i] and squares[2i + 1] receive the sums of squares of p and
/// u of block i of 64 elements, as sum_of_squares() forms them; the count must be a multiple of 64.
void lamb_moments(const UpdateRun&, const LambFactors&, double* squares);
/// The second half: p -= rate·u.
void lamb(const UpdateRun&, const LambFactors&);
/// New m, and direction[0, count).
void muon_direction(const UpdateRun&, const MuonFactors&, float* direction);

/// out[i] = sum of squares of x[64i … 64i+63], in double, in an order that is the same on every CPU.
void sum_of_squares(const float* x, std::size_t blocks64, double* out);

}  // namespace rz::kernels
