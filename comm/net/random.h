#pragma once
/// Unguessable identifiers: 128 random bits from getrandom(2).

#include <array>
#include <cstdint>
#include <string>

namespace rz::net {

using JobId = std::array<std::uint8_t, 16>;

JobId random_id();
/// 32 lower-case hexadecimal digits.
std::string to_hex(const JobId&);
/// Inverse of to_hex(). Errc::rendezvous if the text is not 32 lower-case hexadecimal digits.
JobId from_hex(const std::string&);
inline std::string random_hex() { return to_hex(random_id()); }

}  // namespace rz::net
