#pragma once
/// What tests of TLS share: sockets over loopback, and a key.

#include <poll.h>
#include <sys/socket.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <random>
#include <string>
#include <vector>

#include "comm/core/deadline.h"
#include "comm/net/socket.h"
#include "comm/net/tls.h"
#include "comm/os/fd.h"

namespace rz::test {

/// The secret of a job.
inline const std::string tls_secret = "the secret of this job, which nobody else has";

inline Deadline soon() { return Deadline::after(std::chrono::seconds(30)); }

using TlsKey = std::array<std::uint8_t, 32>;
constexpr TlsKey key_a{1, 2, 3}, key_b{1, 2, 4};

/// Both ends of a connection over loopback.
struct Sockets {
  UniqueFd client, server;
  Sockets() {
    const UniqueFd listener = net::listen_tcp(net::resolve({"127.0.0.1", 0}).front());
    client = net::connect_tcp(net::local_address(listener.get()), soon());
    pollfd p{listener.get(), POLLIN, 0};
    poll(&p, 1, 10'000);
    server = UniqueFd(accept4(listener.get(), nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC));
    net::set_tcp_options(server.get());
  }
};

inline std::vector<std::byte> noise(std::size_t size, unsigned seed = 1) {
  std::mt19937 random(seed);
  std::vector<std::byte> bytes(size);
  for (auto& b : bytes) b = static_cast<std::byte>(random());
  return bytes;
}

}  // namespace rz::test
