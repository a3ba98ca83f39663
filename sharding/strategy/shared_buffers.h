#pragma once
/// Buffers of a module on all ranks.

#include <vector>

#include "autograd_lite/nn/module.h"
#include "sharding/model/runtime.h"

namespace rz {

/// Buffers, such as running means, that are those of rank 0 in every forward pass that trains.
class SharedBuffers {
 public:
  /// Both must outlive this object. `enabled`: StrategyOptions::broadcast_buffers.
  SharedBuffers(Module&, bool enabled, Runtime&);

  bool enabled() const { return !buffers_.empty(); }
  /// Broadcasts them from rank 0. Collective, unless there are none.
  void broadcast();

 private:
  Runtime& runtime_;
  std::vector<ModuleBuffer*> buffers_;  // empty unless enabled
};

}  // namespace rz
