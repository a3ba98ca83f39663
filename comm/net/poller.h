#pragma once
/// Waiting for any of many descriptors, and for a doorbell that other threads and processes ring.

#include <sys/epoll.h>

#include <chrono>
#include <cstdint>

#include "comm/os/fd.h"

namespace rz {

/// What the system has said about a descriptor and its owner has not cleared yet. Edges, not levels: after
/// clearing a bit, read or write until EAGAIN, or it may not come back.
struct FdEvents {
  std::uint32_t events = 0;
  bool readable() const { return events & (EPOLLIN | EPOLLRDHUP | EPOLLHUP | EPOLLERR); }
  bool writable() const { return events & EPOLLOUT; }
  bool hung_up() const { return events & (EPOLLRDHUP | EPOLLHUP | EPOLLERR); }
};

/// One thread adds, removes and polls; any thread, or process that holds the doorbell, rings.
class Poller {
 public:
  Poller();
  /// `watched` must outlive the registration.
  void add(int fd, FdEvents& watched, std::uint32_t events);
  void remove(int fd);
  /// Sleeps until an event comes or the doorbell rings, at most `most`; zero looks only. True if anything
  /// came.
  bool poll(std::chrono::microseconds most);
  /// An eventfd: writing to it makes poll() return.
  int doorbell() const { return doorbell_.get(); }
  static void ring_doorbell(int doorbell) noexcept;

 private:
  UniqueFd epoll_, doorbell_;
};

}  // namespace rz
