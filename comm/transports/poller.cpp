#include "comm/transports/poller.h"

#include <sys/eventfd.h>

#include <algorithm>
#include <array>
#include <cerrno>

#include "comm/core/error.h"

namespace rz {

namespace {

/// So many descriptors are asked one by one.
constexpr std::size_t few = 8;

// poll() and epoll speak of the same events by the same bits.
static_assert(EPOLLIN == POLLIN && EPOLLOUT == POLLOUT && EPOLLERR == POLLERR && EPOLLHUP == POLLHUP &&
              EPOLLRDHUP == POLLRDHUP);
constexpr std::uint32_t final_events = EPOLLHUP | EPOLLERR;

timespec limit_of(std::chrono::microseconds most) {
  const auto us = std::clamp<long long>(most.count(), 0, 1'000'000);
  return {us / 1'000'000, (us % 1'000'000) * 1000};
}

}  // namespace

Poller::Poller() : epoll_(epoll_create1(EPOLL_CLOEXEC)), doorbell_(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {
  if (!epoll_) fail_errno("epoll_create1");
  if (!doorbell_) fail_errno("eventfd");
  // Edge-triggered: every ring is an edge, so that epoll needs no read of the counter.
  epoll_event event{EPOLLIN | EPOLLET, {.ptr = nullptr}};
  if (epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, doorbell_.get(), &event) != 0) fail_errno("epoll_ctl");
}

void Poller::enter(const Entry& e) {
  epoll_event event{e.events | EPOLLET, {.ptr = e.watched}};
  if (epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, e.fd, &event) != 0) fail_errno("epoll_ctl");
}

// epoll says of a descriptor that is new to it all that is true of it, so that nothing is lost on the way
// there.
void Poller::add(int fd, Watched& watched, std::uint32_t events) {
  entries_.push_back({fd, &watched, events | EPOLLRDHUP});
  if (by_epoll_) return enter(entries_.back());
  if (entries_.size() <= few) return;
  by_epoll_ = true;
  for (const Entry& e : entries_) enter(e);
}

void Poller::remove(int fd) {
  std::erase_if(entries_, [&](const Entry& e) { return e.fd == fd; });
  if (by_epoll_) epoll_ctl(epoll_.get(), EPOLL_CTL_DEL, fd, nullptr);
}

bool Poller::poll(std::chrono::microseconds most) { return by_epoll_ ? ask_epoll(most) : ask_each(most); }

/// Asks only for what the owners do not know yet, so that nothing old cuts a sleep short.
bool Poller::ask_each(std::chrono::microseconds most) {
  questions_.clear();
  questions_.push_back({doorbell(), POLLIN, 0});
  for (const Entry& e : entries_) {
    const bool over = e.watched->events & final_events;  // these are said without being asked for
    questions_.push_back({over ? -1 : e.fd, static_cast<short>(e.events & ~e.watched->events), 0});
  }
  const timespec limit = limit_of(most);
  const int n = ppoll(questions_.data(), questions_.size(), &limit, nullptr);
  if (n < 0 && errno != EINTR) fail_errno("ppoll");
  if (n <= 0) return false;
  for (std::size_t i = 0; i < entries_.size(); ++i) {
    const auto said = static_cast<std::uint16_t>(questions_[i + 1].revents);
    entries_[i].watched->events |= said & final_events ? said | entries_[i].events : said;
  }
  std::uint64_t rings = 0;
  if (questions_[0].revents) [[maybe_unused]]
    const auto bytes = ::read(doorbell(), &rings, sizeof rings);
  return true;
}

bool Poller::ask_epoll(std::chrono::microseconds most) {
  std::array<epoll_event, 64> events;
  const timespec limit = limit_of(most);
  const bool looks = limit.tv_sec == 0 && limit.tv_nsec == 0;
  int n = looks ? epoll_wait(epoll_.get(), events.data(), events.size(), 0)
                : epoll_pwait2(epoll_.get(), events.data(), events.size(), &limit, nullptr);
  if (n < 0 && (errno == ENOSYS || errno == EPERM))  // a kernel or a sandbox from before epoll_pwait2
    n = epoll_wait(epoll_.get(), events.data(), events.size(),
                   static_cast<int>(limit.tv_sec * 1000 + (limit.tv_nsec + 999'999) / 1'000'000));
  if (n < 0 && errno != EINTR) fail_errno("epoll_wait");
  for (int i = 0; i < n; ++i)
    if (auto* watched = static_cast<Watched*>(events[i].data.ptr)) watched->events |= events[i].events;
  return n > 0;
}

void Poller::ring(int doorbell) noexcept {
  const std::uint64_t one = 1;
  // Fails only if the counter is full, and then poll() returns anyhow.
  [[maybe_unused]] const auto n = ::write(doorbell, &one, sizeof one);
}

}  // namespace rz
