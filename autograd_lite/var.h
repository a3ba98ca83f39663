#pragma once
/// Handles of values.

#include <cstdint>

namespace rz {

class Tape;

/// Handle of a value on a tape. Cheap to copy; valid until Tape::reset(). A default Var means "none", e.g. no
/// bias.
struct Var {
  int index = -1;
  std::uint32_t pass = 0;  ///< the recording to which it belongs
  Tape* tape = nullptr;    ///< for a + b and the like (autograd_lite/element_ops.h)
  bool defined() const { return index >= 0; }
};

}  // namespace rz
