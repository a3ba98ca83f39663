#pragma once
/// Sizes in bytes as Hugging Face writes them.

#include <cstdint>
#include <optional>
#include <string_view>

namespace rz {

/// "5GB" is 5·10^9 and "5GiB" 5·2^30; also KB, MB, TB, KiB, MiB and TiB, or a number of bytes. nullopt for
/// another text, and for 2^64 or more.
std::optional<std::uint64_t> parse_byte_size(std::string_view text);

}  // namespace rz
