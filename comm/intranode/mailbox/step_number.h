#pragma once
/// Steps number the slots of all mailboxes of a node: 32-bit numbers that wrap around. Steps that are
/// compared are less than 2^31 apart.

#include <cstdint>

namespace rz::intranode {

using StepNumber = std::uint32_t;

inline bool is_after(StepNumber a, StepNumber b) { return static_cast<std::int32_t>(a - b) > 0; }

}  // namespace rz::intranode
