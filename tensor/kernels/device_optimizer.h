#pragma once
/// Optimizer updates and gradient norms on a device: many buffers in few launches, bit-identical to
/// tensor/kernels/optimizer/optimizer.h. Never blocks the host.

#include <cstddef>
#include <cstdint>
#include <span>

#include "comm/core/types.h"
#include "comm/device/stream.h"
#include "tensor/kernels/scalar/optimizer_step.h"
#include "tensor/kernels/scalar/superaccumulator.h"

namespace rz::ops {

/// Inputs of a step in device memory.
struct StepInputs {
  const float* grad_scale = nullptr;  ///< multiplies the `scale` of the constants; null: 1
  const int* skip = nullptr;          ///< if not 0, nothing is written; null: 0
  /// Constants that replace the argument `rules`, so that each replay of a graph may use new ones; null: the
  /// argument applies.
  const void* rules = nullptr;
  const double* norms = nullptr;  ///< LAMB: the squared norms of p and u, two per member
};

/// Elements whose squares are summed; `count` is a multiple of 64.
struct Squared {
  const void* data;
  DType dtype;  ///< f32, f16 or bf16
  std::size_t count;
};

namespace device {

/// Largest number of constants in a call.
inline constexpr std::size_t max_rules = 8;

/// Updates as the functions of these names in tensor/kernels/optimizer/optimizer.h, each run with
/// rules[run.rule]. The runs are on the device of the stream and do not overlap. Runs of adam with a third
/// state and those without are one launch each.
void adam(std::span<const kernels::UpdateRun>, std::span<const kernels::AdamFactors> rules, const StepInputs&,
          const Stream&);
void sgd(std::span<const kernels::UpdateRun>, std::span<const kernels::SgdFactors> rules, const StepInputs&,
         const Stream&);
void lion(std::span<const kernels::UpdateRun>, std::span<const kernels::LionFactors> rules, const StepInputs&,
          const Stream&);
void adagrad(std::span<const kernels::UpdateRun>, std::span<const kernels::AdagradFactors> rules,
             const StepInputs&, const Stream&);
void rmsprop(std::span<const kernels::UpdateRun>, std::span<const kernels::RmspropFactors> rules,
             const StepInputs&, const Stream&);

void decayed_step(std::span<const kernels::UpdateRun>, std::span<const kernels::DecayedStepFactors> rules,
                  const StepInputs&, const Stream&);
/// The direction is written to run.value.
void muon_direction(std::span<const kernels::UpdateRun>, std::span<const kernels::MuonFactors> rules,
                    const StepInputs&, const Stream&);

/// The first half of LAMB, as kernels::lamb_moments; counts are multiples of 64. Adds the squares of p and u
/// to the exact sums 2·member and 2·member + 1 at `sums`, each of ExactLayout::words.
void lamb_moments(std::span<const kernels::UpdateRun>, std::span<const kernels::LambFactors> rules,
                  const StepInputs&, std::int64_t* sums, const Stream&);
/// The second half, as kernels::lamb with the trust ratios of inputs.norms.
void lamb(std::span<const kernels::UpdateRun>, std::span<const kernels::LambFactors> rules, const StepInputs&,
          const Stream&);
/// value[i] = the value of exact sum i at `sums`.
void read_sums(double* value, const std::int64_t* sums, std::size_t count, const Stream&);

/// Adds the squares to the exact sum at `sum`, ExactLayout::words in device memory. The words may differ from
/// those of rz::add_squares; their value is the same. Start from zeros. Sums may be added over ranks word by
/// word, as long as one sum covers at most 2^30 blocks of 64 squares.
void add_squares(std::int64_t* sum, std::span<const Squared>, const Stream&);

/// Adds *value to the exact sum at `sum`; both are in device memory.
void add_exact(std::int64_t* sum, const double* value, const Stream&);

/// Computes step_outcome() from the exact sum of squares and the exact number of terms (null: not counted),
/// summed over ranks, and stores it in *outcome. All are in device memory.
void decide_step(StepOutcome* outcome, const std::int64_t* squares, const std::int64_t* terms,
                 const StepLimits*, const Stream&);

}  // namespace device

struct DeviceOptimizer {
  decltype(&device::adam) adam;
  decltype(&device::sgd) sgd;
  decltype(&device::lion) lion;
  decltype(&device::adagrad) adagrad;
  decltype(&device::rmsprop) rmsprop;
  decltype(&device::decayed_step) decayed_step;
  decltype(&device::muon_direction) muon_direction;
  decltype(&device::lamb_moments) lamb_moments;
  decltype(&device::lamb) lamb;
  decltype(&device::read_sums) read_sums;
  decltype(&device::add_squares) add_squares;
  decltype(&device::add_exact) add_exact;
  decltype(&device::decide_step) decide_step;
};

}  // namespace rz::ops
