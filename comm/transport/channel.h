#pragma once
/// The byte streams between two ranks.

#include <cstdint>

namespace rz {

/// Collectives and point-to-point messages have separate streams, so that neither blocks the other.
enum class Channel : std::uint8_t { collective, point_to_point };
inline constexpr int channel_count = 2;

}  // namespace rz
