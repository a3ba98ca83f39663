#include <utility>

#include "comm/core/error.h"
#include "sharding/strategies/ddp.h"
#include "sharding/strategies/strategy.h"
#include "sharding/strategies/zero.h"
#include "sharding/strategies/zero3.h"

namespace rz {

std::unique_ptr<Strategy> make_strategy(StrategyKind kind, Module& module, Communicator& communicator,
                                        StrategyOptions options) {
  switch (kind) {
    case StrategyKind::ddp:
      return std::make_unique<Ddp>(module, communicator, std::move(options));
    case StrategyKind::zero1:
    case StrategyKind::zero2:
      return std::make_unique<Zero>(kind, module, communicator, std::move(options));
    case StrategyKind::zero3:
      return std::make_unique<Zero3>(module, communicator, std::move(options));
  }
  fail(Errc::invalid_argument, "no such strategy");
}

}  // namespace rz
