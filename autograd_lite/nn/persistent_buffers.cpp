#include "autograd_lite/nn/persistent_buffers.h"

namespace rz {

std::vector<std::pair<std::string, ModuleBuffer*>> persistent_buffers(Module& module) {
  const std::size_t prefix = module.path().empty() ? 0 : module.path().size() + 1;  // and a dot
  std::vector<std::pair<std::string, ModuleBuffer*>> all;
  for (ModuleBuffer* b : module.buffers())
    if (b->persistent) all.emplace_back(b->name.substr(prefix), b);
  return all;
}

}  // namespace rz
