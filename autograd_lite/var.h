#pragma once
/// Handles of values.

#include <cstdint>

namespace rz {

/// Handle of a value on a tape. Cheap to copy; valid until Tape::reset(). A default Var means "none", e.g. no
/// bias.
struct Var {
  int index = -1;
  std::uint32_t pass = 0;  ///< the recording to which it belongs
  bool defined() const { return index >= 0; }
};

}  // namespace rz
