#pragma once
/// Waiting for any of many descriptors, and for a doorbell that other threads and processes ring.

#include <poll.h>
#include <sys/epoll.h>

#include <chrono>
#include <cstdint>
#include <vector>

#include "comm/transports/descriptor.h"

namespace rz {

/// What the system has said about a descriptor and its owner has not cleared yet. Edges, not levels: after
/// clearing a bit, read or write until EAGAIN, or it may not come back.
struct Watched {
  std::uint32_t events = 0;
  bool readable() const { return events & (EPOLLIN | EPOLLRDHUP | EPOLLHUP | EPOLLERR); }
  bool writable() const { return events & EPOLLOUT; }
  bool hung_up() const { return events & (EPOLLRDHUP | EPOLLHUP | EPOLLERR); }
};

/// One thread adds, removes and polls; any thread, or process that holds the doorbell, rings. Few descriptors
/// are asked one by one: epoll would have every segment that comes enter itself in a list first, which takes
/// longer.
class Poller {
 public:
  Poller();
  /// `watched` must outlive the registration.
  void add(int fd, Watched& watched, std::uint32_t events);
  void remove(int fd);
  /// Sleeps until an event comes or the doorbell rings, at most `most`; zero looks only. True if anything
  /// came.
  bool poll(std::chrono::microseconds most);
  /// An eventfd: writing to it makes poll() return.
  int doorbell() const { return doorbell_.get(); }
  static void ring(int doorbell) noexcept;

 private:
  struct Entry {
    int fd;
    Watched* watched;
    std::uint32_t events;
  };
  bool ask_each(std::chrono::microseconds most);
  bool ask_epoll(std::chrono::microseconds most);
  void enter(const Entry&);

  Descriptor epoll_, doorbell_;
  std::vector<Entry> entries_;
  std::vector<pollfd> questions_;
  bool by_epoll_ = false;
};

}  // namespace rz
