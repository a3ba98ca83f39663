#pragma once
/// Strangers that connect to a listener on loopback.

#include <poll.h>
#include <sys/socket.h>

#include <atomic>
#include <chrono>
#include <string>
#include <thread>
#include <vector>

#include "comm/core/error.h"
#include "comm/net/authentication.h"
#include "comm/net/socket.h"
#include "comm/os/fd.h"

namespace rz::test {

/// A socket that calls `port` of 127.0.0.1 from an address of loopback. It does not wait.
inline UniqueFd call_from(const std::string& source, int port) {
  UniqueFd s(socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
  const net::SocketAddress from = net::resolve({source, 0}).front(),
                           to = net::resolve({"127.0.0.1", port}).front();
  if (s && bind(s.get(), from.get(), from.size) == 0) connect(s.get(), to.get(), to.size);
  return s;
}

/// A hello as a member of this group would send it.
inline std::string plausible_hello(net::Purpose purpose, std::uint64_t group) {
  int fds[2];
  require(socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0, fds) == 0, Errc::system,
          "socketpair");
  const UniqueFd near(fds[0]), far(fds[1]);
  const net::Secret other = net::Secret::random();
  net::Authentication::client({&other, purpose, ""}, {.size = 2, .rank = 1, .group = group})
      .advance(near.get());
  std::string bytes(64, '\0');
  require(recv(far.get(), bytes.data(), bytes.size(), 0) == 64, Errc::io, "recv");
  return bytes;
}

/// Holds a connection from each of many hosts, which has sent `bytes`, and opens those again that were ended:
/// each 10 ms ten of them.
class ManyHosts {
 public:
  ManyHosts(int hosts, int port, std::string bytes)
      : held_(static_cast<std::size_t>(hosts)), thread_([this, port, bytes = std::move(bytes)] {
          while (!stop_) {
            int opened = 0;
            for (std::size_t i = 0; i < held_.size() && (opened < 10 || rounds_ == 0); ++i) {
              // Another one at each turn is the first, so that none is left out.
              const std::size_t host = (i + static_cast<std::size_t>(rounds_) * 10) % held_.size();
              UniqueFd& s = held_[host];
              if (s && !has_ended(s.get())) continue;
              s = call_from(concat("127.0.1.", host + 1), port);
              pollfd p{s.get(), POLLOUT, 0};
              poll(&p, 1, 1000);
              send(s.get(), bytes.data(), bytes.size(), MSG_NOSIGNAL | MSG_DONTWAIT);
              ++opened;
            }
            ++rounds_;
            std::this_thread::sleep_for(std::chrono::milliseconds(10));
          }
        }) {}
  ~ManyHosts() {
    stop_ = true;
    thread_.join();
  }
  /// Once all have connected, and some of them anew.
  void await() const {
    while (rounds_ < 5) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }

  static bool has_ended(int socket) {
    pollfd p{socket, POLLRDHUP, 0};
    return poll(&p, 1, 0) == 1 && p.revents & (POLLRDHUP | POLLHUP | POLLERR);
  }

 private:
  std::vector<UniqueFd> held_;
  std::atomic<bool> stop_ = false;
  std::atomic<int> rounds_ = 0;
  std::thread thread_;
};

}  // namespace rz::test
