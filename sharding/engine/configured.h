#pragma once
/// What a configuration asks for, as objects and options.

#include <functional>
#include <memory>

#include "sharding/config/ds_config.h"
#include "sharding/optim/optimizer.h"
#include "sharding/strategy/strategy_options.h"

namespace rz {

/// Parameters to which weight decay applies.
enum class Decay {
  all,      ///< one group of all parameters, as in DeepSpeed
  matrices  ///< two groups: parameters of two or more dimensions, and the rest without decay
};

/// Muon has two groups of its own. Errc::invalid_argument names an option that is out of range.
std::unique_ptr<Optimizer> make_optimizer(const OptimizerConfig&, Decay);

/// The kind of zero_optimization.stage.
StrategyKind strategy_kind(const DsConfig&);
/// All keys that StrategyOptions has, for a kind, as `configure` has changed them, but for what
/// ringzero.deterministic needs. Errc::config names a key that the kind does not have.
StrategyOptions strategy_options(const DsConfig&, StrategyKind,
                                 const std::function<void(StrategyOptions&)>& configure = {});

}  // namespace rz
