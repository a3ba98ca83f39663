#pragma once
/// An end between the two of a connection, as an attacker on the network has it.

#include <sys/socket.h>

#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstddef>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "comm/net/socket.h"

namespace rz::test {

/// An end in the middle of connections to a server of this host. It records what passes, and changes a bit of
/// what goes to the server: that at `flip` of each connection, or what change_next() selects.
class Between {
 public:
  explicit Between(int server_port, std::ptrdiff_t flip = -1)
      : listener_(net::listen_tcp(net::resolve({"127.0.0.1", 0}).front())),
        thread_([this, server_port, flip] { run(server_port, flip); }) {}
  ~Between() {
    stop_ = true;
    thread_.join();
  }
  net::SocketAddress address() const { return net::local_address(listener_.get()); }
  /// Of the next bytes that go to the server and are so many at once, or more. 0: of none.
  void change_next(std::size_t min_size) { change_next_ = min_size; }
  std::string recorded() {
    const std::lock_guard lock(mutex_);
    return recorded_;
  }

 private:
  struct Relay {
    UniqueFd ends[2];
    std::ptrdiff_t passed = 0;
  };
  void run(int server_port, std::ptrdiff_t flip) {
    std::vector<Relay> relays;
    while (!stop_) {
      if (UniqueFd client{accept4(listener_.get(), nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC)}) {
        relays.emplace_back();
        relays.back().ends[0] = std::move(client);
        relays.back().ends[1] = net::connect_tcp(net::resolve({"127.0.0.1", server_port}).front(),
                                                 Deadline::after(std::chrono::seconds(30)));
      }
      for (Relay& r : relays)
        for (int from = 0; from < 2; ++from) pass(r, from, flip);
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
  }
  void pass(Relay& r, int from, std::ptrdiff_t flip) {
    if (!r.ends[1]) r.ends[0].close();  // nobody listens any more
    if (!r.ends[0]) return;
    char bytes[65536];
    const ssize_t n = recv(r.ends[from].get(), bytes, sizeof bytes, MSG_DONTWAIT);
    if (n == 0 || (n < 0 && errno != EAGAIN)) {
      r.ends[0].close(), r.ends[1].close();
      return;
    }
    if (n < 0) return;
    if (from == 0) {
      if (flip >= r.passed && flip < r.passed + n) bytes[flip - r.passed] ^= 4;
      r.passed += n;
      if (const std::size_t min_size = change_next_; min_size && static_cast<std::size_t>(n) >= min_size) {
        bytes[n / 2] ^= 4;
        change_next_ = 0;
      }
    }
    {
      const std::lock_guard lock(mutex_);
      recorded_.append(bytes, static_cast<std::size_t>(n));
    }
    for (ssize_t done = 0; done < n;) {
      const ssize_t k =
          send(r.ends[1 - from].get(), bytes + done, static_cast<std::size_t>(n - done), MSG_NOSIGNAL);
      if (k < 0 && errno != EAGAIN) return;
      if (k > 0) done += k;
    }
  }

  UniqueFd listener_;
  std::atomic<bool> stop_ = false;
  std::atomic<std::size_t> change_next_ = 0;
  std::mutex mutex_;
  std::string recorded_;
  std::thread thread_;
};

}  // namespace rz::test
