#pragma once
/// Coalesces small all_reduces of one Group: they run as one call.
///
/// All ranks make the same Group. Which calls run as one follows from their kinds, types, operations and
/// counts, so that all ranks come to the same without any message. Addresses differ between ranks and decide
/// nothing: a call that reads the result of another one of the same run is refused instead. Sums run in rank
/// order, element by element, so the bits are those of calls that run one by one.

#include <cstddef>
#include <span>
#include <vector>

#include "comm/collective.h"

namespace rz {

class Coalescer {
 public:
  /// Of all calls of a run together: a larger call is worth its latency.
  static constexpr std::size_t max_bytes = 16 << 10;
  static constexpr std::size_t max_calls = 255;

  /// How many of these calls, from the first on, run as one; 0 if the first does not fit.
  template <class Calls>
  static std::size_t count(const Calls& calls) {
    std::size_t n = 0, bytes = 0;
    for (const CollectiveCall& op : calls) {
      if (!is_fusable(*std::begin(calls), op) || bytes + op.in.bytes() > max_bytes || n == max_calls) break;
      bytes += op.in.bytes(), ++n;
    }
    return n;
  }

  /// Throws Errc::invalid_argument if a call of the group reads the result of one with which it runs as one.
  static void require_independent(std::span<const CollectiveCall> group);

  /// The call that stands for these, in place in `memory` of max_bytes.
  const CollectiveCall& begin(std::vector<const CollectiveCall*> calls, std::byte* memory);
  /// It has ended: copies out the results.
  void end();

 private:
  static bool is_fusable(const CollectiveCall& first, const CollectiveCall&);

  std::vector<const CollectiveCall*> calls_;
  CollectiveCall fused_call_;
};

}  // namespace rz
