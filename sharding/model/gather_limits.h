#pragma once
/// Limits of the gathering of sharded values, in elements with padding. Names and units are those of the keys
/// `stage3_*` of DeepSpeed's "zero_optimization".

#include <cstddef>
#include <cstdint>
#include <limits>

namespace rz {

/// Must be equal on all ranks. A unit is what one call gathers: parameters of the same scopes. The unit that
/// a scope needs is gathered whatever the limits. The defaults hold the least memory that overlaps gathers
/// with computation; those of a configuration are deepspeed_gather_limits.
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

}  // namespace rz
