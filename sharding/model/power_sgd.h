#pragma once
/// PowerSGD: gradients as products of low rank (Vogels et al., arXiv:1905.13727).

#include <cstdint>
#include <memory>

#include "sharding/model/communication_hook.h"

namespace rz {

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

/// A parameter of two or more dimensions is a matrix of shape[0] rows. Others, and those that
/// min_compression_rate excludes, are averaged exactly in the same call. Two all_reduces a bucket. All ranks
/// get the same bits; these differ from those of an exact mean. f32; products are those of tensor/ops.h on
/// the device of the gradients.
///
/// Errc::invalid_argument for a rank below 1, start_iter below 2 or a rate that is not above 0.
std::shared_ptr<CommunicationHook> make_power_sgd(const PowerSgdOptions&);

/// The same for a whole bucket as one square matrix, whatever its parameters and min_compression_rate: fewer
/// products and less accuracy.
std::shared_ptr<CommunicationHook> make_batched_power_sgd(const PowerSgdOptions&);

}  // namespace rz
