#pragma once
/// Optimizer updates and the norm of gradients on a device: many pieces of memory in few launches, with the
/// bits of tensor/kernels/optimizer_step.h. The host is never waited for.

#include <cstddef>
#include <cstdint>
#include <span>

#include "comm/core/types.h"
#include "comm/device/stream.h"
#include "tensor/kernels/optimizer_step.h"
#include "tensor/kernels/step_outcome.h"
#include "tensor/kernels/superaccumulator.h"

namespace rz::ops {

/// `count` elements that are updated alike, all on the stream's device; pieces do not overlap.
struct UpdateRun {
  float* value;
  const void* gradient;
  DType gradient_dtype;     ///< f32, f16 or bf16
  void* working = nullptr;  ///< a copy of the new values in 16 bits; null if there is none
  DType working_dtype = DType::bf16;
  float* state0;            ///< Adam's m, SGD's momentum (null without)
  float* state1 = nullptr;  ///< Adam's v
  std::size_t count;
  bool decay = true;  ///< false: as with a weight decay of 0
};

/// What a step takes from the device's memory.
struct StepInputs {
  const float* grad_scale = nullptr;  ///< multiplies the step's grad_scale; null: 1
  const int* skip = nullptr;          ///< not 0: nothing is written; null: 0
  /// The kernels::AdamRule or kernels::SgdStep to be used in place of the step that is passed; null: that.
  /// So that a step in a graph can be another one each time.
  const void* rule = nullptr;
};

/// Elements to be squared and added; count is a multiple of 64.
struct Squared {
  const void* data;
  DType dtype;  ///< f32, f16 or bf16
  std::size_t count;
};

namespace device {

/// kernels::adamw if `decoupled`, else kernels::adam.
void adam(std::span<const UpdateRun>, const kernels::AdamStep&, bool decoupled, const StepInputs&,
          const Stream&);
/// kernels::sgd_momentum
void sgd(std::span<const UpdateRun>, const kernels::SgdStep&, const StepInputs&, const Stream&);

/// Adds to the ExactLayout::words at `sum`, on the device, what rz::add_squares adds to an ExactSum: words
/// that differ, and the same value. They begin as zeros, and may be added up over ranks, as long as all
/// squares in the sum are at most 2^30 blocks of 64.
void add_squares(std::int64_t* sum, std::span<const Squared>, const Stream&);

/// *outcome = what an exact sum of squares, at `words` on the device and added up over ranks, makes of a
/// step.
void decide_step(StepOutcome* outcome, const std::int64_t* words, const StepLimits&, const Stream&);

}  // namespace device

struct DeviceOptimizer {
  decltype(&device::adam) adam;
  decltype(&device::sgd) sgd;
  decltype(&device::add_squares) add_squares;
  decltype(&device::decide_step) decide_step;
};

}  // namespace rz::ops
