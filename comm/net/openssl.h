#pragma once
/// What this library uses of OpenSSL besides TLS. It has a library context of its own, so no file of
/// configuration (OPENSSL_CONF) changes what it computes or negotiates, and a program that uses OpenSSL
/// itself shares no settings with it. Nothing is freed at exit, when other threads may still need it.

#include <array>
#include <cstdint>
#include <span>

struct ossl_lib_ctx_st;

namespace rz::net {

/// Made at its first use.
ossl_lib_ctx_st* openssl_context();

using Digest = std::array<std::uint8_t, 32>;
Digest sha256(std::span<const std::uint8_t>);
Digest hmac_sha256(std::span<const std::uint8_t> key, std::span<const std::uint8_t> text);

/// Throws Errc::system with the reason that OpenSSL gives. `what`: the function that failed.
[[noreturn]] void fail_openssl(const char* what);

}  // namespace rz::net
