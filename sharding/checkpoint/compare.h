#pragma once
/// Comparison of checkpoints and models, tensor by tensor.

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "sharding/checkpoint/tensor_source.h"

namespace rz {

/// A tensor of both sources that differs.
struct TensorDifference {
  std::string name;
  std::string a, b;         ///< dtype and shape: "F32 [2, 3]"
  bool comparable = true;   ///< shapes are equal; dtypes are too, or both are of floating point
  std::uint64_t count = 0;  ///< elements
  std::uint64_t differing = 0;
  /// The largest difference of values; NaN if a value is NaN in one only, or if the dtype has no values here,
  /// as F8_E8M0 and C64.
  double max_difference = 0;
};

struct SourceDifferences {
  std::vector<std::string> only_in_a, only_in_b;
  std::vector<TensorDifference> tensors;
  std::vector<std::string> state;  ///< "steps: 10 and 20"; empty unless both have a state
  std::uint64_t equal = 0;         ///< tensors
  bool none() const { return only_in_a.empty() && only_in_b.empty() && tensors.empty() && state.empty(); }
};

/// Elements differ if their bits do, or for a tolerance above 0 if their values differ by more. dtypes that
/// differ are a difference only for tolerance 0. Reads a block of a tensor at a time. Not thread-safe.
/// `progress(done, all)` is in tensors.
SourceDifferences compare(const TensorSource& a, const TensorSource& b, double tolerance,
                          const std::function<void(std::uint64_t, std::uint64_t)>& progress);

}  // namespace rz
