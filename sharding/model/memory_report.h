#pragma once
/// Memory that a strategy holds on this rank.

#include <cstddef>
#include <string>

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

}  // namespace rz
