#pragma once
/// Small all_reduces that are in flight together, as one.
///
/// Every call of which each rank hears from all others says how many calls behind it its rank would fuse
/// (Signature::behind); the least that any rank says is what all of them fuse next. A rank never waits for
/// calls that it has not made, since it fuses only what all have in flight, in the order in which they were
/// made. Sums run in rank order, element by element: fused or not, the bits are the same.

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "comm/collective.h"

namespace rz {

class Fused {
 public:
  static constexpr std::size_t most_bytes = 16
                                            << 10;  ///< of all together: beyond, a call is worth its latency
  static constexpr std::size_t most_calls = 255;

  /// How many of these calls, from the first on, one call can stand for; 0 if the first is none of them. A
  /// pure function, so that it is the same on every rank that has made these calls.
  template <class Calls>
  static std::uint8_t count(const Calls& calls) {
    std::size_t n = 0, bytes = 0;
    const Operation* first = nullptr;
    for (const Operation& op : calls) {
      if (!first) first = &op;
      if (!fits(*first, op) || bytes + op.in.bytes() > most_bytes || n == most_calls) break;
      bytes += op.in.bytes(), ++n;
    }
    return static_cast<std::uint8_t>(n);
  }

  /// The call that stands for these, in place in `memory` of most_bytes.
  const Operation& begin(std::vector<const Operation*> calls, std::byte* memory);
  /// It has ended: their results.
  void end();

 private:
  static bool fits(const Operation& first, const Operation&);

  std::vector<const Operation*> calls_;
  Operation all_;
};

}  // namespace rz
