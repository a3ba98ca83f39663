#pragma once
/// The DeepSpeed configuration that a file of Accelerate stands for.

#include <string>

#include "tools/rzrun/accelerate/values.h"

namespace rz::accelerate {

/// distributed_type: how a model is divided.
enum class Method { single, data_parallel, deepspeed, fsdp };

/// Of distributed_type and the flags that stand for it; without them of the blocks that are there. Types
/// without a counterpart are Errc::config.
Method method_of(const Values&);

/// For RZ_CONFIG: JSON, or the path of deepspeed_config_file; empty if nothing but ranks is given. Keys of
/// blocks that the method does not read are errors.
std::string configuration_of(const Values&, Method);

}  // namespace rz::accelerate
