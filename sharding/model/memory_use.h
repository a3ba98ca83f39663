#pragma once
/// All memory of a rank that trains, by category.

#include <cstddef>
#include <string>
#include <vector>

#include "sharding/model/memory_report.h"

namespace rz {

/// Bytes that a rank holds. What it caches for the next step counts, as an allocator's reserved memory does
/// in PyTorch: the sum is therefore the peak of a steady run. Engine::memory() measures it, plan_training()
/// (sharding/engine/training_plan.h) predicts it.
///
/// Not included: batches of a loader, the memory of communicators and libraries, code, and on a device the
/// CUDA context.
struct MemoryUse {
  MemoryReport model;                  ///< Strategy::memory()
  std::size_t activations = 0;         ///< the tape's: outputs of operators, and gradients of them
  std::size_t activations_in_use = 0;  ///< the part of them that a pass used at once at most
  std::size_t buffers = 0;             ///< of the module, e.g. running means
  bool operator==(const MemoryUse&) const = default;
};

/// A category.
struct MemoryPart {
  const char* name;
  std::size_t bytes;
  bool on_host = false;  ///< offloaded: in host memory instead of the device's
};

/// All categories in the order of reports, those without memory included. A new category is a row here.
std::vector<MemoryPart> parts(const MemoryUse&);
/// Bytes of the device, which is the host where training runs there.
std::size_t on_device(const MemoryUse&);
/// Bytes in host memory beside a device.
std::size_t on_host(const MemoryUse&);
/// The largest category of the device.
MemoryPart largest_part(const MemoryUse&);

/// One line: "12.5 MiB: parameters 4.1 MiB, …", without categories that are empty.
std::string describe(const MemoryUse&);

}  // namespace rz
