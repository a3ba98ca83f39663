#include "comm/progress/progress_driver.h"

#include <sched.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>

#include "comm/core/error.h"
#include "comm/os/helper_thread.h"
#include "comm/os/wait_policy.h"

namespace rz {

using Clock = std::chrono::steady_clock;

// ---- its thread

/// The slot is the library's only state of a process that is not a cache: a communicator finds by it the
/// thread that another one has made. It owns nothing, and is empty without communicators. A child of fork()
/// inherits it with a driver whose thread it does not have, and replaces that.
std::shared_ptr<ProgressDriver> ProgressDriver::of_process() {
  std::shared_ptr<ProgressDriver> driver;
  without_fork([&] {
    static auto& slot =
        *new std::weak_ptr<ProgressDriver>;  // never destroyed: used by objects with static storage
    driver = slot.lock();
    if (driver && driver->creator_.is_this_generation()) return;
    driver = std::make_shared<ProgressDriver>();
    driver->thread_ = helper_thread([d = driver.get()] { d->run("rz-progress"); });
    slot = driver;
  });
  return driver;
}

std::shared_ptr<ProgressDriver> ProgressDriver::in_background(const std::shared_ptr<Driven>& only) {
  auto driver = std::make_shared<ProgressDriver>();
  driver->add(*only);
  helper_thread([driver, only] { driver->run("rz-background"); }).detach();
  return driver;
}

ProgressDriver::ProgressDriver() : doorbell_(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {
  if (!doorbell_) fail_errno("eventfd");
}

ProgressDriver::~ProgressDriver() {
  stop();
  if (thread_.joinable()) thread_.join();
}

void ProgressDriver::stop() noexcept {
  const std::lock_guard lock(mutex_);
  stopping_ = true;
  ring();
}

// ---- its members

void ProgressDriver::add(Driven& driven) {
  const std::lock_guard lock(mutex_);
  members_.push_back(&driven);
  wake(driven);
}

void ProgressDriver::remove(Driven& driven) {
  Lock lock(mutex_);
  std::erase(members_, &driven);
  ring();
  left_.wait(lock, [&] { return in_turn_ != &driven && std::ranges::count(sleepers_, &driven) == 0; });
}

void ProgressDriver::ring() const noexcept {
  const std::uint64_t one = 1;
  [[maybe_unused]] const auto n = ::write(doorbell_.get(), &one, sizeof one);
}

// ---- rounds

void ProgressDriver::run(const char* name) {
  name_this_thread(name);
  Lock lock(mutex_);
  for (int yields = 0; !stopping_;) {
    const auto state = run_round(lock);
    if (state == Driven::Turn::moved) {
      yields = 0;
    } else if (state == Driven::Turn::blocked && yields < driver_wait_policy.yields) {
      ++yields;
      lock.unlock();
      sched_yield();
      lock.lock();
    } else {
      sleep(lock);
    }
  }
}

/// Gives each member that is due a turn; returns the liveliest state. A member that others remove meanwhile
/// may move another one out of this round: sleep() finds it.
Driven::Turn::State ProgressDriver::run_round(Lock& lock) {
  auto state = Driven::Turn::idle;
  const auto now = Clock::now();
  for (std::size_t i = 0; i < members_.size() && !stopping_; ++i) {
    Driven& driven = *members_[i];
    if (!is_due(driven, now)) continue;
    in_turn_ = &driven;
    lock.unlock();
    const Driven::Turn turn = driven.turn();
    lock.lock();
    driven.last_ = turn;
    in_turn_ = nullptr;
    left_.notify_all();
    state = std::max(state, turn.state);
  }
  return state;
}

bool ProgressDriver::is_due(Driven& driven, Time now) {
  const bool woken = driven.woken_.exchange(false);
  return woken || driven.last_.state != Driven::Turn::idle || now >= driven.last_.next;
}

// ---- sleep

/// No wake() is missed: it sets woken_ before it reads asleep_, and this sets asleep_ before it reads woken_.
void ProgressDriver::sleep(Lock& lock) {
  asleep_.store(true);
  descriptors_.assign(1, {doorbell_.get(), POLLIN, 0});
  Time until = Clock::now() + driver_wait_policy.max_sleep;
  if (std::ranges::all_of(members_, [&](Driven* driven) { return prepare_sleep(*driven, until); })) {
    lock.unlock();
    poll(until);
    lock.lock();
  }
  asleep_.store(false);
  end_sleeps();
}

/// False: the member is due.
bool ProgressDriver::prepare_sleep(Driven& driven, Time& until) {
  if (driven.woken_.load() || driven.last_.state == Driven::Turn::moved) return false;
  until = std::min(until, driven.last_.next);
  if (driven.last_.state == Driven::Turn::idle) return true;
  const Driven::Sleep sleep = driven.begin_sleep();
  if (sleep.descriptor >= 0) {
    sleepers_.push_back(&driven);
    descriptors_.push_back({sleep.descriptor, POLLIN, 0});
  }
  return sleep.allowed;
}

void ProgressDriver::poll(Time until) noexcept {
  const auto left = std::max(until - Clock::now(), Clock::duration::zero());
  const auto seconds = std::chrono::duration_cast<std::chrono::seconds>(left);
  const timespec limit{seconds.count(), (left - seconds).count()};
  ::ppoll(descriptors_.data(), descriptors_.size(), &limit, nullptr);
  std::uint64_t rings = 0;
  if (descriptors_[0].revents) [[maybe_unused]]
    const auto n = ::read(doorbell_.get(), &rings, sizeof rings);
}

void ProgressDriver::end_sleeps() {
  for (Driven* const driven : sleepers_) driven->end_sleep();
  sleepers_.clear();
  left_.notify_all();
}

}  // namespace rz
