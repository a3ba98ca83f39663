#pragma once
/// What must hold before ranks share a model.

#include <span>

#include "autograd_lite/parameter.h"
#include "comm/communicator.h"

namespace rz {

/// Errc::mismatch on every rank, naming the first parameter in which a rank differs from rank 0 (name, shape,
/// frozen or not, with or without a value) and what both have. Collective.
void require_same_model(std::span<Parameter* const>, Communicator&);

/// Rank 0's values on every rank, for parameters that have one. Collective.
void broadcast_values(std::span<Parameter* const>, Communicator&);

}  // namespace rz
