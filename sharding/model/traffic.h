#pragma once
/// Counts of the collectives of a training step.

#include <cstddef>
#include <cstdint>

namespace rz {

/// Calls of one collective, and the bytes of the larger of a rank's two buffers in each.
struct CallCount {
  std::uint64_t calls = 0, bytes = 0;
  void add(std::size_t more) { ++calls, bytes += more; }
  CallCount operator-(const CallCount& before) const { return {calls - before.calls, bytes - before.bytes}; }
  bool operator==(const CallCount&) const = default;
};

/// Since a strategy was created, or since another count was subtracted.
struct Traffic {
  CallCount all_reduce, reduce_scatter;  ///< of gradients
  CallCount all_gather;                  ///< of values, and of directions of matrices (Muon)
  CallCount broadcast;                   ///< of directions of matrices, and of buffers of modules
  /// all_reduce of what decides on an update: norms of gradients and parameters, weights of losses, and what
  /// ranks agree on in a pass.
  CallCount control;

  /// Bytes that each of `ranks` ranks sends if it sends the least: twice (ranks - 1) / ranks of an
  /// all_reduce's buffer, once that of a reduce_scatter's input and an all_gather's output (Patarasuk and
  /// Yuan, doi:10.1016/j.jpdc.2008.09.002), and of a broadcast, in which the mean over the ranks is counted.
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
  bool operator==(const Traffic&) const = default;
};

}  // namespace rz
