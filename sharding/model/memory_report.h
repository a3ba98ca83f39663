#pragma once
/// Memory of a strategy, and of all that trains on a rank. sharding/parallel/traffic.h has the traffic.

#include <cstddef>
#include <string>
#include <vector>

namespace rz {

/// Parts of a strategy on a CUDA device that lie in host memory, in bytes, including padding.
struct OffloadedMemory {
  std::size_t parameters = 0, masters = 0, optimizer_state = 0;
  std::size_t total() const { return parameters + masters + optimizer_state; }
  bool operator==(const OffloadedMemory&) const = default;
};

/// Bytes on the strategy's device, including padding; sharding/strategy/prediction.h has the formulas.
/// `masters` are the f32 copies of the values that a rank updates, in mixed precision.
///
/// `transient` is memory that zero2 and zero3 use for a part of a step: whole gradient buckets until they are
/// reduced, gathered scopes, and tiles of offloaded memory while they are updated. It is cached for the next
/// step, and counted here while cached.
struct MemoryReport {
  std::size_t parameters = 0;
  std::size_t gradients = 0;
  std::size_t masters = 0;
  std::size_t optimizer_state = 0;   ///< 0 before the first step, which allocates it
  std::size_t transient = 0;         ///< in use or cached
  std::size_t transient_in_use = 0;  ///< the part of `transient` in use
  std::size_t transient_peak = 0;    ///< maximum of transient_in_use so far
  OffloadedMemory offloaded;         ///< what is in host memory instead
  /// Offload was chosen on the host, where all is in host memory already.
  bool offload_has_no_effect = false;
  /// On the device.
  std::size_t total() const { return parameters + gradients + masters + optimizer_state + transient; }
  bool operator==(const MemoryReport&) const = default;
};

/// One line: "parameters 474.7 MiB, gradients …".
std::string describe(const MemoryReport&);

/// All memory of a rank that trains, by category: bytes that it holds. What it caches for the next step
/// counts, as an allocator's reserved memory does in PyTorch: the sum is therefore the peak of a steady run.
/// Engine::memory() measures it, plan_training() (sharding/engine/training_plan.h) predicts it.
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
