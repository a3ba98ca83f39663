#include <utility>

#include "sharding/strategies/strategy.h"

namespace rz {

std::unique_ptr<Strategy> make_strategy(StrategyKind kind, Module& module, Communicator& communicator,
                                        StrategyOptions options) {
  return std::make_unique<Strategy>(kind, plan_of(kind), module, communicator, std::move(options));
}

}  // namespace rz
