#include <utility>

#include "sharding/strategies/strategy.h"

namespace rz {

std::unique_ptr<Strategy> make_strategy(StrategyKind kind, Module& module, Mesh mesh,
                                        StrategyOptions options) {
  return std::make_unique<Strategy>(kind, plan_of(kind), module, std::move(mesh), std::move(options));
}

}  // namespace rz
