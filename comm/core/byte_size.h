#pragma once
/// Sizes in bytes as users write them.

#include <cstddef>
#include <optional>
#include <string>
#include <string_view>

namespace rz {

/// "64K" is 65,536: K, M, G and T, in either case, are binary as in nccl-tests, and so are KiB, MiB, GiB and
/// TiB. "1KB" is 1,000: KB, MB, GB and TB are decimal as in Hugging Face's max_shard_size. Without a unit, or
/// with B, it is bytes. The number may have a fraction: "1.5K". nullopt for another text, and for 2^64 or
/// more.
std::optional<std::size_t> parse_byte_size(std::string_view text);

/// The inverse, in the largest of K, M and G that divides the size: "64K".
std::string exact_byte_size(std::size_t);

/// The value of a flag, at least `min`. Errc::config names the flag.
std::size_t byte_size_of_flag(std::string_view flag, std::string_view text, std::size_t min = 0);

}  // namespace rz
