#pragma once
/// Small all_reduces that are in flight together, as one.
///
/// Every all_reduce says how many calls behind it its rank would fuse (Signature::behind), and a message of
/// it the least that its sender has heard of. A result depends on every rank, and so do the messages that it
/// comes of: the least that any rank says, which all of them fuse next. A rank never waits for calls that it
/// has not made, since it fuses only what all have in flight, in the order in which they were made. Sums run
/// in rank order, element by element: fused or not, the bits are the same.

#include <algorithm>
#include <cstdint>
#include <iterator>
#include <memory>
#include <span>
#include <vector>

#include "comm/collective.h"

namespace rz {

class Fused {
 public:
  /// Of all together: beyond, a call is worth its latency.
  static constexpr std::size_t most_bytes = 16 << 10;
  static constexpr std::size_t most_calls = 255;

  /// How many of these calls, from the first on, one call can stand for; 0 if the first is none of them. Not
  /// one that reads what an earlier one of them writes. Ranks need not come to the same number.
  template <class Calls>
  static std::uint8_t count(const Calls& calls) {
    std::size_t n = 0, bytes = 0;
    Range written;
    for (const Operation& op : calls) {
      if (!fits(*std::begin(calls), op) || bytes + op.in.bytes() > most_bytes || n == most_calls) break;
      const Range reads(op.in.data, op.in.bytes());
      if (reads.meets(written))
        for (std::size_t i = 0; i < n; ++i)
          if (const Buffer& out = std::begin(calls)[static_cast<std::ptrdiff_t>(i)].out;
              reads.meets(Range(out.data, out.bytes())))
            return static_cast<std::uint8_t>(n);
      written.add(Range(op.out.data, op.out.bytes()));
      bytes += op.in.bytes(), ++n;
    }
    return static_cast<std::uint8_t>(n);
  }

  /// The call that stands for these, in place in `memory` of most_bytes.
  const Operation& begin(std::vector<const Operation*> calls, std::byte* memory);
  /// It has ended: their results.
  void end();

 private:
  struct Range {
    std::uintptr_t begin = 0, end = 0;
    Range() = default;
    Range(const void* at, std::size_t bytes)
        : begin(reinterpret_cast<std::uintptr_t>(at)), end(begin + bytes) {}
    bool meets(const Range& o) const { return begin < o.end && o.begin < end; }
    void add(const Range& o) {
      begin = end == 0 ? o.begin : std::min(begin, o.begin);
      end = std::max(end, o.end);
    }
  };
  static bool fits(const Operation& first, const Operation&);

  std::vector<const Operation*> calls_;
  Operation all_;
};

}  // namespace rz
