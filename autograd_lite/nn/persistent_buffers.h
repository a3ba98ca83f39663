#pragma once
/// The buffers that are saved with a model.

#include <string>
#include <utility>
#include <vector>

#include "autograd_lite/nn/module.h"

namespace rz {

/// The persistent buffers of a module with their names from it, as in PyTorch's state_dict().
std::vector<std::pair<std::string, ModuleBuffer*>> persistent_buffers(Module&);

}  // namespace rz
