#pragma once
/// The fields that identify a call, and the streams that carry them. Ranks compare the fields to detect
/// mismatched calls.

#include <cstdint>
#include <string>

#include "comm/collective.h"

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

}  // namespace rz
