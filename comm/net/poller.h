#pragma once
/// Waits for events of many descriptors (epoll), and for a doorbell that other threads and processes ring.

#include <sys/epoll.h>

#include <chrono>
#include <cstdint>

#include "comm/os/fd.h"

namespace rz::net {

/// Events of a descriptor that epoll has reported and the owner has not cleared. Edge-triggered: after
/// clearing a bit, read or write until EAGAIN, otherwise the bit may not be set again.
struct FdEvents {
  std::uint32_t events = 0;
  bool readable() const { return events & (EPOLLIN | EPOLLRDHUP | EPOLLHUP | EPOLLERR); }
  bool writable() const { return events & EPOLLOUT; }
  bool hung_up() const { return events & (EPOLLRDHUP | EPOLLHUP | EPOLLERR); }
};

/// add(), remove() and poll() are for one thread. Any thread may ring the doorbell, and any process that
/// holds its descriptor.
class Poller {
 public:
  Poller();
  /// Watches `fd` for `events` (EPOLLIN, EPOLLOUT) and for hang-up, and reports them in `watched`, which must
  /// stay valid until remove(). Errc::system if epoll refuses the descriptor.
  void add(int fd, FdEvents& watched, std::uint32_t events);
  void remove(int fd);
  /// Sleeps until an event arrives or the doorbell rings, at most `timeout` and at most 1 s; zero does not
  /// sleep. Returns true if anything arrived.
  bool poll(std::chrono::microseconds timeout);
  /// Readable while poll() would return true. Borrowed.
  int descriptor() const { return epoll_.get(); }
  /// The doorbell, an eventfd: writing to it makes poll() return. Borrowed.
  int doorbell() const { return doorbell_.get(); }
  static void ring_doorbell(int doorbell) noexcept;

 private:
  UniqueFd epoll_, doorbell_;
};

}  // namespace rz::net
