#pragma once
/// What identifies a call, so that ranks can compare theirs.

#include <cstdint>

#include "comm/collective.h"

namespace rz {

/// Travels with every piece of a message, so that two ranks that called different things find out.
struct CallSignature {
  std::uint32_t sequence = 0;  ///< number of the call in its lane
  std::int32_t root = 0;
  std::uint64_t count = 0;  ///< elements of the call (all_to_all_v: of this pair)
  Collective kind = Collective::barrier;
  DType dtype = DType::u8;
  ReduceOp::Kind op = ReduceOp::sum;
  std::uint8_t unused = 0;  ///< in place of padding, whose bytes are not defined
  std::uint32_t algorithm = 0;
  bool operator==(const CallSignature&) const = default;
};

}  // namespace rz
