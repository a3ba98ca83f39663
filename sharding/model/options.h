#pragma once
/// Options of the parts of a sharded model.

#include <cstddef>
#include <cstdint>
#include <limits>
#include <optional>

#include "../../comm/core/types.h"

namespace rz {

// ---- gathering of sharded values

/// Limits of the gathering, in elements with padding. Names and units are those of the keys `stage3_*` of
/// DeepSpeed's "zero_optimization". Must be equal on all ranks. A unit is what one call gathers: parameters
/// of the same scopes. The unit that a scope needs is gathered whatever the limits. The defaults hold the
/// least memory that overlaps gathers with computation; those of a configuration are deepspeed_gather_limits.
struct GatherLimits {
  static constexpr std::size_t none = std::numeric_limits<std::size_t>::max();

  /// Units are gathered before their use while those that wait for their use hold fewer elements; 0: none. A
  /// value of 1 therefore prefetches one unit.
  std::size_t prefetch_bucket_size = 1;
  /// Gathered elements, without persistent ones, beyond which no unit is prefetched or kept for another use.
  std::size_t max_live_parameters = none;
  /// A unit that is used again before this many elements of other uses stays gathered.
  std::size_t max_reuse_distance = 0;
  /// Parameters of up to this many elements are persistent: every rank holds their values whole. Their
  /// gradients, masters and optimizer state stay sharded, as in DeepSpeed.
  std::size_t param_persistence_threshold = 0;
  /// Elements, without padding, of all persistent parameters. A parameter that exceeds the rest is not
  /// persistent; trainable parameters come first, then frozen ones, in the order of Module::parameters().
  std::size_t model_persistence_threshold = none;

  bool operator==(const GatherLimits&) const = default;
};

/// The defaults of DeepSpeed.
inline constexpr GatherLimits deepspeed_gather_limits{.prefetch_bucket_size = 50'000'000,
                                                      .max_live_parameters = 1'000'000'000,
                                                      .max_reuse_distance = 1'000'000'000,
                                                      .param_persistence_threshold = 100'000,
                                                      .model_persistence_threshold = INT64_MAX};

// ---- what lies in host memory

enum class OffloadDevice { none, cpu };
/// "none", "cpu".
const char* name(OffloadDevice);

/// Must be equal on all ranks. Names are those of DeepSpeed's "offload_optimizer" and "offload_param".
struct OffloadOptions {
  OffloadDevice device = OffloadDevice::none;
  /// Copies from and to pinned memory overlap with computation, and may be captured in a graph. Others may
  /// not: the host waits for each of them.
  bool pin_memory = true;
  /// Share of the optimizer state, from 0 to 1. Whole buckets are offloaded, in the order of reduction, until
  /// they hold at least this share. Not of parameters.
  double ratio = 1;
  bool operator==(const OffloadOptions&) const = default;
};

/// Errc::invalid_argument if the ratio is out of range; `key` names the options.
void check(const OffloadOptions&, const char* key);

// ---- sums of gradients

/// How gradients travel between ranks: they are scaled, rounded to `dtype`, summed over the ranks, widened
/// and scaled again; the result is their mean. Sums of 16-bit types are accumulated in f32 and rounded once.
/// Must be equal on all ranks. Names and arithmetic are those of DeepSpeed, which also rounds each factor's
/// product to `dtype`.
struct WireFormat {
  /// "communication_data_type", and PyTorch's fp16 and bf16 compression hooks: f32, bf16 or f16. Empty: that
  /// of the gradients.
  std::optional<DType> communication_data_type;
  /// Multiplies by 1 / ranks before the sum, and not after it. f16 then overflows less, and loses more small
  /// values.
  bool prescale_gradients = false;
  /// Multiplies by 1 / factor before the sum and by factor / ranks after it. No effect with
  /// prescale_gradients.
  double gradient_predivide_factor = 1;

  bool operator==(const WireFormat&) const = default;
};

/// Errc::invalid_argument unless the type is f32, bf16 or f16, and the factor positive and finite.
void check(const WireFormat&);

/// Names as in PyTorch's PowerSGDState.
struct PowerSgdOptions {
  int matrix_approximation_rank = 1;
  /// Reduced passes before compression begins; at least 2, since buckets are rebuilt after the first update.
  std::int64_t start_iter = 1000;
  /// Adds what compression has lost to the next gradients; keeps as much memory as the compressed gradients.
  bool use_error_feedback = true;
  /// Starts from the last factor; otherwise from a new random one each time.
  bool warm_start = true;
  /// A parameter is compressed if its gradient has more than this many times the elements of its factors.
  double min_compression_rate = 2;
  std::uint64_t random_seed = 0;
  bool operator==(const PowerSgdOptions&) const = default;
};

}  // namespace rz
