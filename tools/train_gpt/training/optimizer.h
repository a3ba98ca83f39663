#pragma once
/// The optimizer of a configuration.

#include <memory>

#include "sharding/config/ds_config.h"
#include "sharding/optim/optimizer.h"

namespace rz::train_gpt {

/// `decay_all`: one group of all parameters, as in DeepSpeed; else two, matrices and the rest, of which the
/// latter has no weight decay. Muon has two groups of its own. Errc::invalid_argument names an option that
/// is out of range.
std::unique_ptr<Optimizer> make_optimizer(const OptimizerConfig&, bool decay_all);

}  // namespace rz::train_gpt
