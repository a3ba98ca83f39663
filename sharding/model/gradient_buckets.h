#pragma once
/// Whole gradients in flat buckets.

#include <vector>

#include "sharding/model/flat_layout.h"
#include "sharding/model/runtime.h"

namespace rz {

/// Allocates all buckets in communicator memory, and makes Parameter::grad of every member a view of its
/// bucket.
std::vector<Tensor> allocate_gradient_buckets(const ModelParameters&, const FlatLayout&, DType,
                                              const Runtime&);

}  // namespace rz
