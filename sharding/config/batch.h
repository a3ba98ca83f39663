#pragma once
/// Batch sizes.

#include <cstdint>
#include <optional>
#include <string>

namespace rz {

/// The sizes that were given.
struct BatchConfig {
  std::optional<std::int64_t> train;         ///< train_batch_size: samples of an update
  std::optional<std::int64_t> micro;         ///< train_micro_batch_size_per_gpu: samples of a pass on a rank
  std::optional<std::int64_t> accumulation;  ///< gradient_accumulation_steps: passes of an update
  bool operator==(const BatchConfig&) const = default;
};

/// All positive; train = micro × accumulation × ranks.
struct BatchSizes {
  std::int64_t train = 0, micro = 0, accumulation = 0;
  bool operator==(const BatchSizes&) const = default;
};

/// Two of the three sizes determine the third. Train or micro alone imply accumulation 1. Errc::config, which
/// begins with `file`, if they do not divide exactly, with the numbers and the nearest that do; or if
/// accumulation alone, or none of the three, is given.
BatchSizes resolve_batch(const BatchConfig&, int ranks, const std::string& file);

}  // namespace rz
