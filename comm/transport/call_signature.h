#pragma once
/// The fields that identify a call, and the streams that carry them. Ranks compare the fields to detect
/// mismatched calls, and to find the rank that deviates.

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "comm/collective.h"
#include "comm/core/error.h"

namespace rz {

/// The byte streams between two ranks. Collectives and point-to-point messages have separate streams, so that
/// neither blocks the other.
enum class Channel : std::uint8_t { collective, point_to_point };
inline constexpr int channel_count = 2;

/// Sent with every frame, so that ranks that made different calls detect the mismatch. Plain data without
/// padding.
struct CallSignature {
  std::uint32_t sequence = 0;  ///< number of the call in its channel
  std::int32_t root = 0;
  std::uint64_t count = 0;  ///< elements of the call (all_to_all_v: of this pair)
  Collective kind = Collective::barrier;
  DType dtype = DType::u8;
  ReduceOp::Kind op = ReduceOp::sum;
  std::uint8_t unused = 0;  ///< explicit padding, so that all bytes are defined
  std::uint32_t algorithm = 0;
  bool operator==(const CallSignature&) const = default;
};

/// The properties of a call that must be equal on all ranks.
CallSignature make_signature(const CollectiveCall&, int size, std::uint32_t sequence,
                             std::uint32_t algorithm = 0);
/// A signature for error messages: "all_reduce #17 (1024 f32, sum)".
std::string describe(const CallSignature&);

/// Errc::mismatch: data of rank `peer` belongs to another call than the one that this rank is in.
struct OtherCall : Error {
  OtherCall(const std::string& text, int from, const CallSignature& call)
      : Error(Errc::mismatch, text), peer(from), theirs(call) {}
  int peer;
  CallSignature theirs;
};

/// The calls with the same number of all ranks of a group; empty where a rank's is not known.
using CallsOfRanks = std::vector<std::optional<CallSignature>>;

/// The first rank whose call is that of more than half of the ranks; -1 if there is none.
int rank_of_majority(const CallsOfRanks&);
/// The first rank whose call is known and differs from this one; -1 if there is none.
int rank_that_differs(const CallsOfRanks&, const CallSignature&);
/// Throws Errc::mismatch with two calls that differ. If there is a majority, the culprit is the first rank
/// that differs from it, the same on every rank; otherwise there is none, and one of the calls is that of
/// rank `own`. Requires that the call of `own` is known and differs from another one, or that there is a
/// majority from which one differs.
[[noreturn]] void fail_mismatched(const CallsOfRanks&, int own);

}  // namespace rz
