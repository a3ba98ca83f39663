#pragma once
/// What training sends: collectives and their bytes, by the dimensions of a mesh.

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <utility>

#include "../../comm/collective.h"
#include "../../comm/work.h"
#include "mesh_sizes.h"

namespace rz {

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

/// Collectives of training steps among the ranks of one group. Those among the ranks that share layers are of
/// activations, too, and of parts of losses.
struct Traffic {
  CallCount all_reduce, reduce_scatter;  ///< of gradients
  CallCount all_gather;                  ///< of values, and of directions of matrices (Muon)
  CallCount broadcast;                   ///< of directions of matrices, and of buffers of modules
  /// all_reduce of what decides on an update: norms of gradients and parameters, weights of losses, and what
  /// ranks agree on in a pass.
  CallCount control;

  /// The count of all_reduce, reduce_scatter, all_gather or broadcast.
  CallCount& of(Collective);

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
/// two groups are the same ranks, a call is counted under the first name that applies: shard, replicate, tp,
/// data.
struct MeshTraffic {
  Traffic all;        ///< of all ranks: what decides on an update
  Traffic data;       ///< of the ranks with data of their own
  Traffic shard;      ///< of the ranks that divide a copy of the model
  Traffic replicate;  ///< of the ranks with the same shard
  Traffic tp;         ///< of the ranks that share layers

  /// The sum over all groups.
  Traffic total() const;
  /// Bytes that each rank sends, if it sends the least.
  std::uint64_t sent(const MeshSizes&) const;
  MeshTraffic operator-(const MeshTraffic& before) const;
  bool operator==(const MeshTraffic&) const = default;
};

/// A collective of a training step that has just been started.
struct StartedCollective {
  Collective kind;
  std::size_t bytes;  ///< of the larger of a rank's two buffers; of a Group of calls, their sum
  int ranks;          ///< of the group
  std::chrono::steady_clock::time_point start;
  Work work;
  const Stream& stream;  ///< it was started in the order of this stream
};
/// Functions that are called on the thread of the rank; they may be empty.
struct CommunicationObserver {
  /// In the order in which collectives start. May wait for them, on every rank alike.
  std::function<void(const StartedCollective&)> started;
  /// The thread has waited for communication from `start` to `end`.
  std::function<void(std::chrono::steady_clock::time_point start, std::chrono::steady_clock::time_point end)>
      waited;
};

class Communicator;
struct CommunicationMeter;

/// The ranks of collectives on a tape. The communicator must outlive what has a copy.
struct CountedGroup {
  // NOLINTNEXTLINE(google-explicit-constructor)
  CountedGroup(Communicator& c, std::shared_ptr<CommunicationMeter> m = nullptr)
      : communicator(&c), meter(std::move(m)) {}
  Communicator* communicator;
  std::shared_ptr<CommunicationMeter> meter;  ///< counts the calls; null: nothing does
  /// The layer that reads an exchanged input computes its product for its weights beside that of the input's
  /// gradient (Tape::mark_overlaps).
  bool overlaps = false;
};

}  // namespace rz
