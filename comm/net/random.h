#pragma once
/// Names that nobody can guess: 128 bits from the kernel.

#include <array>
#include <cstdint>
#include <string>

namespace rz {

using JobId = std::array<std::uint8_t, 16>;

JobId random_id();
std::string to_hex(const JobId&);
/// Errc::rendezvous if the text is not 32 hexadecimal digits.
JobId from_hex(const std::string&);
inline std::string random_hex() { return to_hex(random_id()); }

}  // namespace rz
