#pragma once
/// Counts of the collectives that move gradients and values.

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
  CallCount all_reduce, reduce_scatter, all_gather;

  /// Bytes that each of `ranks` ranks sends if it sends the least: twice (ranks - 1) / ranks of an
  /// all_reduce's buffer, once that of a reduce_scatter's input and an all_gather's output (Patarasuk and
  /// Yuan, doi:10.1016/j.jpdc.2008.09.002). Exact if `ranks` divides the bytes, as it divides buckets.
  std::uint64_t sent(int ranks) const {
    const auto n = static_cast<std::uint64_t>(ranks);
    return (2 * all_reduce.bytes + reduce_scatter.bytes + all_gather.bytes) / n * (n - 1);
  }
  Traffic operator-(const Traffic& before) const {
    return {all_reduce - before.all_reduce, reduce_scatter - before.reduce_scatter,
            all_gather - before.all_gather};
  }
  bool operator==(const Traffic&) const = default;
};

}  // namespace rz
