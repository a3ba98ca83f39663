#pragma once
/// Optimizer updates and gradient norms on a device: many buffers in few launches, bit-identical to
/// tensor/kernels/optimizer.h. Never blocks the host.

#include <cstddef>
#include <cstdint>
#include <span>

#include "comm/core/types.h"
#include "comm/device/stream.h"
#include "tensor/kernels/optimizer_step.h"
#include "tensor/kernels/step_outcome.h"
#include "tensor/kernels/superaccumulator.h"

namespace rz::ops {

/// `count` elements that are updated with one rule, on the stream's device. Runs do not overlap.
struct UpdateRun {
  float* value;
  const void* gradient;
  DType gradient_dtype;     ///< f32, f16 or bf16
  void* working = nullptr;  ///< 16-bit copy of the new values; may be null
  DType working_dtype = DType::bf16;
  float* state0;            ///< Adam's m; SGD's momentum, null without momentum
  float* state1 = nullptr;  ///< Adam's v
  std::size_t count;
  bool decay = true;  ///< false: no weight decay
};

/// Inputs of a step in device memory.
struct StepInputs {
  const float* grad_scale = nullptr;  ///< multiplies AdamStep::grad_scale or SgdStep::grad_scale; null: 1
  const int* skip = nullptr;          ///< if not 0, nothing is written; null: 0
  /// A kernels::AdamRule or kernels::SgdStep that replaces the step argument, so that each run of a graph may
  /// use a new one; null: the argument applies.
  const void* rule = nullptr;
};

/// Elements whose squares are summed; `count` is a multiple of 64.
struct Squared {
  const void* data;
  DType dtype;  ///< f32, f16 or bf16
  std::size_t count;
};

namespace device {

/// Updates as kernels::adamw if `decoupled`, otherwise as kernels::adam.
void adam(std::span<const UpdateRun>, const kernels::AdamStep&, bool decoupled, const StepInputs&,
          const Stream&);
/// Updates as kernels::sgd_momentum.
void sgd(std::span<const UpdateRun>, const kernels::SgdStep&, const StepInputs&, const Stream&);

/// Adds the squares to the exact sum at `sum`, ExactLayout::words in device memory. The words may differ from
/// those of rz::add_squares; their value is the same. Start from zeros. Sums may be added over ranks word by
/// word, as long as one sum covers at most 2^30 blocks of 64 squares.
void add_squares(std::int64_t* sum, std::span<const Squared>, const Stream&);

/// Computes step_outcome() from the exact sum of squares at `words`, in device memory and summed over ranks,
/// and stores it in *outcome.
void decide_step(StepOutcome* outcome, const std::int64_t* words, const StepLimits&, const Stream&);

}  // namespace device

struct DeviceOptimizer {
  decltype(&device::adam) adam;
  decltype(&device::sgd) sgd;
  decltype(&device::add_squares) add_squares;
  decltype(&device::decide_step) decide_step;
};

}  // namespace rz::ops
