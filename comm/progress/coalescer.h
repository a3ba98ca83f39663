#pragma once
/// Coalesces consecutive small all_reduces of one Group into one call.
///
/// All ranks submit the same Group. Kinds, types, operations and counts alone determine which calls run as
/// one, so that all ranks agree without communication. Addresses differ between ranks and play no part: a
/// call that reads the result of another call of the same run is rejected instead. Sums run in rank order,
/// element by element, so results have the bits of calls that run one by one. Not thread safe.

#include <cstddef>
#include <span>
#include <vector>

#include "comm/collective.h"

namespace rz {

class Coalescer {
 public:
  /// The sum over all calls of a run. For a larger call the copies cost more than the latency they save.
  static constexpr std::size_t max_bytes = 16 << 10;
  static constexpr std::size_t max_calls = 255;

  /// The number of calls, from the first on, that run as one; 0 if the first cannot be coalesced.
  template <class Calls>
  static std::size_t count(const Calls& calls) {
    std::size_t n = 0, bytes = 0;
    for (const CollectiveCall& op : calls) {
      if (!is_fusable(*std::begin(calls), op) || bytes + op.in.bytes() > max_bytes || n == max_calls) break;
      bytes += op.in.bytes(), ++n;
    }
    return n;
  }

  /// Throws Errc::invalid_argument if a call of the group reads the result of another call of its run.
  static void require_independent(std::span<const CollectiveCall> group);

  /// Packs the inputs into `memory` (max_bytes) and returns the call that replaces these, in place there.
  /// Valid until end().
  const CollectiveCall& begin(std::vector<const CollectiveCall*> calls, std::byte* memory);
  /// Copies the results to the outputs, after that call has completed.
  void end();

 private:
  static bool is_fusable(const CollectiveCall& first, const CollectiveCall&);

  std::vector<const CollectiveCall*> calls_;
  CollectiveCall fused_call_;
};

}  // namespace rz
