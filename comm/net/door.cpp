#include "comm/net/door.h"

#include <poll.h>
#include <sys/epoll.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <utility>

#include "comm/core/error.h"
#include "comm/os/wait_policy.h"

namespace rz::net {

namespace {

/// Without a descriptor accept() does not find out.
bool any_waits(int listener) {
  pollfd wait{listener, POLLIN, 0};
  return ::poll(&wait, 1, 0) > 0;
}

}  // namespace

// At once: all that may be there without a proof, and a batch, so that members alone are never delayed.
Door::Door(Expected expected)
    : expected_(std::move(expected)),
      epoll_(::epoll_create1(EPOLL_CLOEXEC)),
      accept_rate_(expected_.members + 2 * max_unproven) {
  if (!epoll_) fail_errno("epoll_create1");
}

void Door::add(int listener) {
  watch(listener, nullptr);
  listeners_.push_back(listener);
}

std::list<Door::Arrival> Door::advance(double per_second) noexcept {
  Arrivals proven;
  try {
    if (rests_ && rests_->expired()) listen(true);
    std::array<epoll_event, 64> events;
    const int n = ::epoll_wait(epoll_.get(), events.data(), events.size(), 0);
    bool any_calls = false;
    for (int i = 0; i < n; ++i) {
      auto* const arrival = static_cast<Arrival*>(events[static_cast<std::size_t>(i)].data.ptr);
      (arrival ? arrival->is_ready : any_calls) = true;
    }
    // Those that are there first, so that later ones cannot displace them.
    for (auto a = unproven_.begin(); a != unproven_.end();)
      a = std::exchange(a->is_ready, false) || a->until.expired() ? attend(a, proven) : std::next(a);
    for (const int listener : listeners_) {
      if (!any_calls || rests_) break;
      const auto pause = accept_rate_.rest(per_second);
      if (pause.count())
        rest(pause);
      else
        accept(listener, proven);
    }
    // A flood at one takes all that may be accepted: the next one has its turn then.
    if (listeners_.size() > 1) std::ranges::rotate(listeners_, listeners_.begin() + 1);
  } catch (const std::exception&) {  // no memory for another connection
    rest(poll_period::exhausted_descriptors);
  }
  return proven;
}

/// Reads what the connection has sent. It leaves the list once it has proved the secret, is refused, or has
/// no time left; and without a proof if it must leave. The next one.
Door::Arrivals::iterator Door::attend(Arrivals::iterator a, Arrivals& proven, bool must_leave) noexcept {
  using Status = Authentication::Status;
  Authentication& end = a->authentication;
  Status status = Status::refused;
  try {
    status = end.advance(a->socket.get());
  } catch (const std::exception&) {  // no memory for its encryption
  }
  // The other end takes its connection for established once it has sent its proof, so it is not dropped for a
  // late one. Strangers that have read the group in another connection are limited in number.
  if (expected_.members_until && (end.has_proof() || knows_group(end))) a->until = *expected_.members_until;
  const bool stays = must_leave ? end.has_proof() : !a->until.expired();
  const auto next = std::next(a);
  if (status == Status::pending && stays) return next;
  // Before it is closed, since a child of fork() may hold it longer.
  ::epoll_ctl(epoll_.get(), EPOLL_CTL_DEL, a->socket.get(), nullptr);
  if (status == Status::proven) {
    accept_rate_.proven();
    proven.splice(proven.end(), unproven_, a);
    return next;
  }
  strangers_.count(a->from, end);
  if (expected_.on_refusal) expected_.on_refusal(end);
  return unproven_.erase(a);
}

void Door::accept(int listener, Arrivals& proven) {
  for (int i = 0; i < max_accepts_per_poll; ++i) {
    SocketAddress from;
    UniqueFd socket = accept_connection(listener, from);
    const int error = socket ? 0 : errno;
    const bool is_exhausted = error == EMFILE || error == ENFILE || error == ENOBUFS || error == ENOMEM;
    exhausted_ = is_exhausted && any_waits(listener) ? error : 0;
    if (error == EAGAIN || error == EWOULDBLOCK || (is_exhausted && !exhausted_)) return;
    if (exhausted_ && !drop_one(proven)) return rest(poll_period::exhausted_descriptors);
    if (!socket) continue;  // else the connection was closed before it was accepted
    accept_rate_.accepted();
    unproven_.push_back(
        {std::move(socket),
         Authentication::server(expected_.key, expected_.rank, expected_.group, expected_.encryption), from,
         Deadline::after(expected_.time_to_prove)});
    const auto last = std::prev(unproven_.end());
    last->authentication.passed_fds = expected_.passed_fds;
    try {
      watch(last->socket.get(), &*last);
    } catch (...) {
      unproven_.erase(last);
      throw;
    }
    attend(last, proven);  // its hello may be there, or it is of another user
    if (unproven() > max_unproven + expected_.members) drop_one(proven);
  }
}

/// Makes place for another connection; false if none is unproven.
bool Door::drop_one(Arrivals& proven) {
  std::vector<Unproven> all;
  std::vector<Arrivals::iterator> places;
  for (auto a = unproven_.begin(); a != unproven_.end(); ++a)
    if (!a->authentication.has_proof()) {
      all.push_back({source_of(a->from), knows_group(a->authentication)});
      places.push_back(a);
    }
  if (all.empty()) return false;
  attend(places[choose_dropped(all, expected_.members)], proven, true);
  return true;
}

void Door::watch(int fd, Arrival* arrival) {
  epoll_event event{EPOLLIN, {.ptr = arrival}};
  if (::epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, fd, &event) != 0) fail_errno("epoll_ctl");
}

void Door::rest(Deadline::Clock::duration time) {
  listen(false);
  rests_ = Deadline::after(time);
}

void Door::listen(bool accepts) {
  for (const int listener : listeners_) {
    epoll_event event{accepts ? EPOLLIN : 0u, {.ptr = nullptr}};
    ::epoll_ctl(epoll_.get(), EPOLL_CTL_MOD, listener, &event);
  }
  rests_.reset();
}

int Door::poll_ms(int max) const {
  int ms = rests_ ? rests_->poll_ms(max) : max;
  for (const Arrival& a : unproven_) ms = a.until.poll_ms(ms);
  return ms;
}

std::size_t Door::unproven() const {
  return static_cast<std::size_t>(
      std::ranges::count_if(unproven_, [](const Arrival& a) { return !a.authentication.has_proof(); }));
}

std::string Door::why_closed() const {
  if (!exhausted_) return "";
  const bool is_limit = exhausted_ == EMFILE || exhausted_ == ENFILE;
  return concat("no connection can be accepted: ", std::strerror(exhausted_),
                is_limit ? " (ulimit -n raises the limit)" : "");
}

std::string Door::text() const {
  const std::string why = why_closed();
  return concat(strangers_.text(), why.empty() ? "" : "; ", why);
}

}  // namespace rz::net
