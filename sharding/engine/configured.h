#pragma once
/// What a configuration asks for, as objects and options.

#include <functional>

#include "sharding/config/ds_config.h"
#include "sharding/strategy/strategy_options.h"

namespace rz {

/// The kind of zero_optimization.stage.
StrategyKind strategy_kind(const DsConfig&);
/// All keys that StrategyOptions has, for a kind, as `configure` has changed them, except for what
/// ringzero.deterministic needs. Errc::config names a key that the kind does not have.
StrategyOptions strategy_options(const DsConfig&, StrategyKind,
                                 const std::function<void(StrategyOptions&)>& configure = {});

}  // namespace rz
