#pragma once
/// What training costs a rank: memory of a strategy and of all that trains, and traffic.

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "comm/collective.h"
#include "comm/work.h"
#include "sharding/parallel/mesh.h"

namespace rz {

// ---- memory

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

// ---- traffic

/// Calls of one collective, and the bytes of the larger of a rank's two buffers in each.
struct CallCount {
  std::uint64_t calls = 0, bytes = 0;
  void add(std::size_t more) { ++calls, bytes += more; }
  CallCount& operator+=(const CallCount& more) {
    calls += more.calls, bytes += more.bytes;
    return *this;
  }
  CallCount operator-(const CallCount& before) const { return {calls - before.calls, bytes - before.bytes}; }
  bool operator==(const CallCount&) const = default;
};

/// Collectives of training steps among the ranks of one group.
struct Traffic {
  CallCount all_reduce, reduce_scatter;  ///< of gradients
  CallCount all_gather;                  ///< of values, and of directions of matrices (Muon)
  CallCount broadcast;                   ///< of directions of matrices, and of buffers of modules
  /// all_reduce of what decides on an update: norms of gradients and parameters, weights of losses, and what
  /// ranks agree on in a pass.
  CallCount control;

  /// Bytes that each of the `ranks` ranks of the group sends if it sends the least: twice (ranks - 1) / ranks
  /// of an all_reduce's buffer, once that of a reduce_scatter's input and an all_gather's output (Patarasuk
  /// and Yuan, doi:10.1016/j.jpdc.2008.09.002), and of a broadcast, in which the mean over the ranks is
  /// counted.
  std::uint64_t sent(int ranks) const {
    const auto n = static_cast<std::uint64_t>(ranks);
    const std::uint64_t bytes =
        2 * (all_reduce.bytes + control.bytes) + reduce_scatter.bytes + all_gather.bytes + broadcast.bytes;
    return bytes / n * (n - 1) + bytes % n * (n - 1) / n;
  }
  Traffic operator-(const Traffic& before) const {
    return {all_reduce - before.all_reduce, reduce_scatter - before.reduce_scatter,
            all_gather - before.all_gather, broadcast - before.broadcast, control - before.control};
  }
  Traffic& operator+=(const Traffic& more) {
    all_reduce += more.all_reduce, reduce_scatter += more.reduce_scatter, all_gather += more.all_gather;
    broadcast += more.broadcast, control += more.control;
    return *this;
  }
  bool operator==(const Traffic&) const = default;
};

/// The same by groups of a mesh, since a strategy was created, or since another count was subtracted. Where
/// two groups are the same ranks, a call is counted under the first name that applies: shard, replicate,
/// data.
struct MeshTraffic {
  Traffic all;        ///< of all ranks: what decides on an update
  Traffic data;       ///< of the ranks with data of their own
  Traffic shard;      ///< of the ranks that divide a copy of the model
  Traffic replicate;  ///< of the ranks with the same shard
  Traffic tp;         ///< of the ranks that share layers

  /// Of all groups.
  Traffic total() const;
  /// Bytes that each rank sends, if it sends the least.
  std::uint64_t sent(const MeshSizes&) const;
  MeshTraffic operator-(const MeshTraffic& before) const;
  bool operator==(const MeshTraffic&) const = default;
};

/// A collective of a training step that has just been started.
struct StartedCollective {
  Collective kind;
  std::size_t bytes;  ///< of the larger of a rank's two buffers
  int ranks;          ///< of the group
  std::chrono::steady_clock::time_point start;
  Work work;
  const Stream& stream;  ///< in the order of which it was started
};
/// Functions that are called on the thread of the rank; they may be empty.
struct CommunicationObserver {
  /// In the order in which collectives start. May wait for them, on every rank alike.
  std::function<void(const StartedCollective&)> started;
  /// The thread has waited for communication from `start` to `end`.
  std::function<void(std::chrono::steady_clock::time_point start, std::chrono::steady_clock::time_point end)>
      waited;
};

}  // namespace rz
