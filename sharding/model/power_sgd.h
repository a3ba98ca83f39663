#pragma once
/// PowerSGD: gradients as products of low rank (Vogels et al., arXiv:1905.13727).

#include <cstdint>
#include <memory>

#include "sharding/model/communication_hook.h"
#include "sharding/model/options.h"

namespace rz {

/// A parameter of two or more dimensions is a matrix of shape[0] rows. Others, and those that
/// min_compression_rate excludes, are averaged exactly in the same call. Two all_reduces per bucket. All
/// ranks get the same bits; these differ from those of an exact mean. f32; products are those of tensor/ops.h
/// on the device of the gradients.
///
/// Errc::invalid_argument for a rank below 1, start_iter below 2 or a rate that is not above 0.
std::shared_ptr<CommunicationHook> make_power_sgd(const PowerSgdOptions&);

/// The same for a whole bucket as one square matrix, whatever its parameters and min_compression_rate: fewer
/// products and less accuracy.
std::shared_ptr<CommunicationHook> make_batched_power_sgd(const PowerSgdOptions&);

}  // namespace rz
