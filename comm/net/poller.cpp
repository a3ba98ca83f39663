#include "comm/net/poller.h"

#include <sys/eventfd.h>

#include <algorithm>
#include <array>
#include <cerrno>

#include "comm/core/error.h"

namespace rz::net {

namespace {

timespec to_timespec(std::chrono::microseconds timeout) {
  const auto us = std::clamp<long long>(timeout.count(), 0, 1'000'000);
  return {us / 1'000'000, (us % 1'000'000) * 1000};
}

}  // namespace

Poller::Poller() : epoll_(epoll_create1(EPOLL_CLOEXEC)), doorbell_(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {
  if (!epoll_) fail_errno("epoll_create1");
  if (!doorbell_) fail_errno("eventfd");
  // Edge-triggered: every ring is an edge, so the counter never has to be read.
  epoll_event event{EPOLLIN | EPOLLET, {.ptr = nullptr}};
  if (epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, doorbell_.get(), &event) != 0) fail_errno("epoll_ctl");
}

// epoll reports the current state of a new descriptor, so events before the registration are not lost.
void Poller::add(int fd, FdEvents& watched, std::uint32_t events) {
  epoll_event event{events | EPOLLRDHUP | EPOLLET, {.ptr = &watched}};
  if (epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, fd, &event) != 0) fail_errno("epoll_ctl");
}

void Poller::remove(int fd) { epoll_ctl(epoll_.get(), EPOLL_CTL_DEL, fd, nullptr); }

bool Poller::poll(std::chrono::microseconds timeout) {
  std::array<epoll_event, 64> events;
  const timespec limit = to_timespec(timeout);
  const bool looks = limit.tv_sec == 0 && limit.tv_nsec == 0;
  int n = looks ? epoll_wait(epoll_.get(), events.data(), events.size(), 0)
                : epoll_pwait2(epoll_.get(), events.data(), events.size(), &limit, nullptr);
  if (n < 0 && (errno == ENOSYS || errno == EPERM))  // kernel or sandbox without epoll_pwait2
    n = epoll_wait(epoll_.get(), events.data(), events.size(),
                   static_cast<int>(limit.tv_sec * 1000 + (limit.tv_nsec + 999'999) / 1'000'000));
  if (n < 0 && errno != EINTR) fail_errno("epoll_wait");
  for (int i = 0; i < n; ++i)
    if (auto* watched = static_cast<FdEvents*>(events[i].data.ptr)) watched->events |= events[i].events;
  return n > 0;
}

void Poller::ring_doorbell(int doorbell) noexcept {
  const std::uint64_t one = 1;
  // Fails only if the counter is full; then poll() returns anyway.
  [[maybe_unused]] const auto n = ::write(doorbell, &one, sizeof one);
}

}  // namespace rz::net
