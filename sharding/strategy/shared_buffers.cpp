#include "sharding/strategy/shared_buffers.h"

#include "sharding/parallel/rank_consistency.h"

namespace rz {

SharedBuffers::SharedBuffers(Module& module, bool enabled, Runtime& runtime) : runtime_(runtime) {
  if (enabled) buffers_ = module.buffers();
}

void SharedBuffers::broadcast() {
  if (buffers_.empty()) return;
  std::vector<Tensor> values;
  for (const ModuleBuffer* buffer : buffers_) {
    values.push_back(buffer->value);
    if (runtime_.communicator.size() > 1 && buffer->value.bytes() > 0)
      runtime_.traffic.broadcast.add(buffer->value.bytes());
  }
  broadcast_buffers(values, runtime_.communicator, runtime_.stream);
}

}  // namespace rz
