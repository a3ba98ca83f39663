#include "comm/progress/progress_engine.h"

#include <algorithm>
#include <utility>

#include "comm/core/deadline.h"
#include "comm/core/error.h"
#include "comm/flight_dump.h"

namespace rz {

namespace {

using namespace std::chrono_literals;
using Clock = std::chrono::steady_clock;

constexpr auto max_token_wait = 5s;  // for a driving thread, which was woken
constexpr auto max_departure = 2s;   // for the last requests, before the rest of stop() in the background

std::size_t bytes_of(std::span<const CollectiveCall> group) {
  std::size_t bytes = 0;
  for (const CollectiveCall& call : group) bytes += std::max(call.in.bytes(), call.out.bytes());
  return bytes;
}

ProgressOptions with_bounded_timeout(ProgressOptions options) {
  options.timeout = bounded(options.timeout);
  return options;
}

std::string message_of(const std::exception_ptr& error) {
  try {
    std::rethrow_exception(error);
  } catch (const std::exception& e) {
    return e.what();
  }
}

std::exception_ptr destroyed_error(int rank) {
  return std::make_exception_ptr(
      Error(Errc::aborted, concat("the communicator of rank ", rank, " was destroyed"), rank));
}

}  // namespace

bool Request::done() const noexcept {
  if (!is_complete() && !engine_->has_thread()) engine_->progress();
  return is_complete();
}

void Request::wait() {
  engine_->wait(*this);
  if (error_) std::rethrow_exception(error_);
}

ProgressEngine::ProgressEngine(std::unique_ptr<Progressable> target, const ProgressOptions& options)
    : options_(with_bounded_timeout(options)), target_(std::move(target)) {}

ProgressEngine::~ProgressEngine() { stop(); }

void ProgressEngine::fail_in_child() const {
  rz::fail(Errc::invalid_argument, "the communicator of rank ", options_.rank, " belongs to process ",
           creator_.process(), ", and this is process ", ::getpid(),
           ", which came of it by fork(); connect a communicator in each process that uses one");
}

std::shared_ptr<Request> ProgressEngine::make_request(std::span<const CollectiveCall> group) {
  return std::make_shared<Request>(shared_from_this(), group, Clock::now() + options_.timeout);
}

// ---- submission

std::shared_ptr<Request> ProgressEngine::submit(std::span<const CollectiveCall> group) {
  check_process();
  auto request = make_request(group);
  {
    const std::lock_guard lock(mutex_);
    if (ending_.failure) std::rethrow_exception(ending_.failure);
    if (group.empty()) {
      request->end(nullptr);
      return request;
    }
    inbox_.requests.push_back(request);
    ++unfinished_;
    schedule_.last_use = request->deadline - options_.timeout;
    const bool first = !inbox_.changed.exchange(true, std::memory_order_acq_rel);
    if (token_.has_driver()) {
      if (first) target_->wake();  // the driving thread may sleep in Progressable::wait()
    } else if (schedule_.asleep || bytes_of(group) >= options_.wake_bytes) {
      wake_thread();
    }
  }
  if (!has_thread()) progress();
  return request;
}

std::shared_ptr<Request> ProgressEngine::continue_inline(const CollectiveCall& call,
                                                         const std::function<void(Request&)>& adopt) {
  auto request = make_request({&call, 1});
  adopt(*request);
  in_flight_.requests.push_back(request);
  const std::lock_guard lock(mutex_);
  ++unfinished_;
  schedule_.last_use = request->deadline - options_.timeout;
  token_.release_inline();
  if (schedule_.asleep) wake_thread();
  return request;
}

std::shared_ptr<Request> ProgressEngine::fail_inline(const std::exception_ptr& error) {
  {
    const std::lock_guard lock(mutex_);
    token_.become_driver();
  }
  fail(error);
  auto request = make_request({});
  const std::lock_guard lock(mutex_);
  request->end(ending_.failure);
  release_driver();
  return request;
}

// ---- waiting and driving

void ProgressEngine::wait(Request& request) {
  if (request.is_complete()) return;
  check_process();
  Lock lock(mutex_);
  if (const auto now = Clock::now(); now > request.deadline - options_.timeout + options_.policy->active_poll)
    schedule_.last_unattended = now;
  for (unsigned polls = 0; !request.is_complete();) {
    if (token_.try_acquire_driver()) {
      lock.unlock();
      drive(request);
      lock.lock();
      release_driver();
    } else if (token_.has_driver()) {
      if (++waiters_ == 1) target_->wake();  // a progress thread that drives yields to this one
      changed_.wait(lock);
      --waiters_;
    } else {
      lock.unlock();
      short_backoff.wait(polls++);
      lock.lock();
    }
  }
}

/// Makes this thread a driver. False after `limit`.
bool ProgressEngine::acquire_within(std::chrono::seconds limit, Lock& lock) {
  const Deadline end = Deadline::after(limit);
  bool acquired = false;
  ++waiters_;
  while (!(acquired = token_.try_acquire_driver()) && !end.expired()) {
    if (token_.has_driver()) target_->wake();
    changed_.wait_for(lock,
                      token_.has_driver() ? end.remaining() : Clock::duration(options_.policy->inline_poll));
  }
  --waiters_;
  return acquired;
}

/// Calls f, as a driver, without the mutex.
void ProgressEngine::with_token(Lock& lock, const std::function<void()>& f) {
  require(acquire_within(max_token_wait, lock), Errc::timeout, "rank ", options_.rank,
          ": another thread kept the communicator busy");
  lock.unlock();
  std::exception_ptr error;
  try {
    f();
  } catch (...) {
    error = std::current_exception();
  }
  lock.lock();
  release_driver();
  if (error) std::rethrow_exception(error);
}

void ProgressEngine::release_driver() {
  hand_over();
  if (unfinished_ > 0) wake_thread();
}

/// Releases the token; of the progress thread, which goes on by itself.
void ProgressEngine::hand_over() {
  token_.release_driver();
  if (waiters_ > 0 || ending_.stopping) changed_.notify_all();
}

void ProgressEngine::wake_thread() {
  if (driver_) driver_->wake(*this);
}

void ProgressEngine::progress() noexcept {
  Lock lock(mutex_);
  if (!token_.try_acquire_driver()) return;
  lock.unlock();
  try {
    if (!step(false)) target_->wait(max_wait(), false);
  } catch (...) {
    fail(std::current_exception());
  }
  lock.lock();
  release_driver();
}

void ProgressEngine::run_exclusively(const std::function<void()>& f) {
  check_process();
  Lock lock(mutex_);
  if (ending_.failure) std::rethrow_exception(ending_.failure);
  with_token(lock, f);
}

/// In wait(). It may spin, for ProgressWaitPolicy::spin_limit at most.
void ProgressEngine::drive(const Request& until) {
  while (!until.is_complete()) {
    try {
      if (!step(true)) target_->wait(max_wait(), !in_flight_.idle.may_sleep());
    } catch (...) {
      return fail(std::current_exception());
    }
  }
}

std::chrono::microseconds ProgressEngine::max_wait() const {
  return in_flight_.idle.may_sleep() ? options_.policy->max_sleep : options_.policy->max_wait;
}

/// True on progress. `waited_for`: the thread is in wait().
bool ProgressEngine::step(bool waited_for) {
  if (inbox_.changed.load(std::memory_order_acquire)) accept();
  const bool moved = target_->advance(waited_for && !in_flight_.idle.may_sleep(), in_flight_.ended);
  end_calls();
  if (moved && !in_flight_.idle.progressed()) return true;
  // The clock is read before failures are polled: a process that was stopped for longer than the timeout then
  // receives the failure that the others have agreed on, instead of reporting a timeout of its own.
  const auto now = Clock::now();
  target_->poll(now, in_flight_.requests.empty() ? nullptr : in_flight_.requests.front().get(), waited_for);
  if (!moved) in_flight_.idle.idle(now, *options_.policy);
  return moved;
}

void ProgressEngine::accept() {
  const std::lock_guard lock(mutex_);
  inbox_.changed.store(false, std::memory_order_relaxed);
  if (ending_.failure) std::rethrow_exception(ending_.failure);
  if (ending_.stopping && unfinished_ > 0) std::rethrow_exception(destroyed_error(options_.rank));
  for (auto& request : inbox_.requests) {
    in_flight_.requests.push_back(request);
    target_->accept(request);
  }
  inbox_.requests.clear();
}

void ProgressEngine::end_calls() {
  auto& requests = in_flight_.requests;
  for (Request* const ended : in_flight_.ended) {
    if (--ended->remaining > 0) continue;
    const auto at = std::ranges::find(requests, ended, &std::shared_ptr<Request>::get);
    const auto held = std::move(*at);
    requests.erase(at);
    const std::lock_guard lock(mutex_);
    ended->end(nullptr);
    --unfinished_;
    if (waiters_ > 0 || ending_.stopping) changed_.notify_all();
  }
  in_flight_.ended.clear();
}

// ---- failures

void ProgressEngine::fail(const std::exception_ptr& error) noexcept {
  end_calls();
  bool reported = false, destroyed = false;
  {
    const std::lock_guard lock(mutex_);
    reported = std::exchange(ending_.reported, true);
    destroyed = ending_.stopping && !ending_.failure;
  }
  const std::exception_ptr shown = reported ? error : target_->fail(error, destroyed);
  if (!reported && !destroyed) flight::dump_failure(message_of(shown));
  const std::lock_guard lock(mutex_);
  ending_.fail(shown);
  const auto end = [this](const std::shared_ptr<Request>& request) {
    if (!request->is_complete()) request->end(ending_.failure);
  };
  std::ranges::for_each(in_flight_.requests, end);
  std::ranges::for_each(inbox_.requests, end);
  in_flight_.requests.clear();
  inbox_.requests.clear();
  inbox_.changed.store(false, std::memory_order_relaxed);
  unfinished_ = 0;
  changed_.notify_all();
}

void ProgressEngine::abort(const std::string& reason) noexcept {
  if (!creator_.is_this_generation()) return;
  {
    const std::lock_guard lock(mutex_);
    if (!target_) return;
    target_->abort(reason);
    target_->wake();
    if (ending_.failure) return;
    ending_.fail(std::make_exception_ptr(Error(Errc::aborted, reason, options_.rank)));
    inbox_.changed.store(true, std::memory_order_release);
    wake_thread();
  }
  if (!has_thread()) progress();
}

void ProgressEngine::cancel(const Error& cause) {
  check_process();
  Lock lock(mutex_);
  if (!ending_.failure) {
    ending_.fail(std::make_exception_ptr(cause));
    inbox_.changed.store(true, std::memory_order_release);
    target_->wake();
  }
  with_token(lock, [this] { fail(ending_.failure); });
  try {
    std::rethrow_exception(ending_.failure);
  } catch (const Error& e) {
    if (e.code() == Errc::peer_lost) throw;
  } catch (const std::exception&) {  // of this rank alone
  }
}

void ProgressEngine::check_peers() {
  check_process();
  Lock lock(mutex_);
  with_token(lock, [this] { target_->check_peers(); });
}

void ProgressEngine::check() {
  check_process();
  Lock lock(mutex_);
  poll_idle(lock);
  if (ending_.failure) std::rethrow_exception(ending_.failure);
}

/// Unless another thread drives and does so. Releases the mutex meanwhile.
void ProgressEngine::poll_idle(Lock& lock) {
  schedule_.last_poll = Clock::now();
  if (ending_.begun || !token_.try_acquire_driver()) return;
  lock.unlock();
  try {
    target_->poll_idle();
  } catch (...) {
    fail(std::current_exception());
  }
  lock.lock();
  release_driver();
}

// ---- the progress thread

void ProgressEngine::start() {
  schedule_.last_poll = Clock::now();
  if (options_.thread == ProgressOptions::none) return;
  const bool shared = options_.thread == ProgressOptions::shared;
  const auto driver =
      shared ? ProgressDriver::of_process() : ProgressDriver::in_background(shared_from_this());
  {
    const std::lock_guard lock(mutex_);
    driver_ = driver;
  }
  if (shared) driver->add(*this);
}

Driven::Turn ProgressEngine::turn() noexcept {
  Lock lock(mutex_);
  schedule_.asleep = false;
  if (ending_.stopping) {
    lock.unlock();
    if (options_.thread == ProgressOptions::own) finish(), driver_->stop();
    return {.next = Time::max()};
  }
  const bool needed = (unfinished_ > 0 || inbox_.changed) && waiters_ == 0 && !token_.has_driver();
  if (needed) return drive_unattended(lock);
  if (Clock::now() >= schedule_.last_poll + options_.failure_poll) poll_idle(lock);
  return next_turn();
}

Driven::Turn ProgressEngine::next_turn() {
  const auto now = Clock::now();
  const auto next_poll = schedule_.last_poll + options_.failure_poll;
  schedule_.asleep = !schedule_.is_active(now, *options_.policy);
  return {.next =
              schedule_.asleep ? next_poll : std::min(next_poll, schedule_.next_look(now, *options_.policy))};
}

/// A request older than ProgressWaitPolicy::attended_grace counts as unattended: its caller probably does not
/// wait for it.
Driven::Turn ProgressEngine::drive_unattended(Lock& lock) {
  const auto now = Clock::now();
  if (!token_.try_acquire_driver()) return {.next = now + options_.policy->inline_poll};  // an inline call
  const auto& requests = in_flight_.requests.empty() ? inbox_.requests : in_flight_.requests;
  const bool unattended = requests.empty() || now > requests.front()->deadline - options_.timeout +
                                                        options_.policy->attended_grace;
  lock.unlock();
  const Turn turn = steps(now);
  lock.lock();
  hand_over();
  if (unattended && waiters_ == 0) schedule_.last_unattended = Clock::now();
  return unfinished_ == 0 || waiters_ > 0 ? next_turn() : turn;
}

/// Steps until one makes no progress, nothing is in flight, a thread waits, or the time of a turn is over.
/// Without the third, two threads would alternate during every call.
Driven::Turn ProgressEngine::steps(Time begin) {
  const auto is_over = [&] {
    return (in_flight_.requests.empty() && !inbox_.changed.load(std::memory_order_acquire)) ||
           waiters_.load(std::memory_order_relaxed) > 0 || Clock::now() >= begin + options_.policy->max_turn;
  };
  bool moved = false;
  try {
    while (step(false)) {
      moved = true;
      if (is_over()) break;
    }
  } catch (...) {
    fail(std::current_exception());
  }
  return {moved ? Turn::moved : Turn::blocked, begin + max_wait()};
}

/// Takes the token for the time of the sleep: the thread that then waits for a request wakes the
/// Progressable.
Driven::Sleep ProgressEngine::begin_sleep() noexcept {
  {
    const std::lock_guard lock(mutex_);
    if (ending_.stopping) return {};
    // A thread that progresses the calls wakes this one if it leaves some.
    if (unfinished_ == 0 || waiters_ > 0 || token_.has_driver()) return {.allowed = true};
    if (inbox_.changed || !token_.try_acquire_driver()) return {};
  }
  const int descriptor = target_->begin_sleep();
  if (descriptor >= 0) return {.allowed = true, .descriptor = descriptor};
  const std::lock_guard lock(mutex_);
  hand_over();
  return {};
}

void ProgressEngine::end_sleep() noexcept {
  target_->end_sleep();
  const std::lock_guard lock(mutex_);
  hand_over();
}

// ---- the end

void ProgressEngine::stop() noexcept {
  Lock lock(mutex_);
  if (ending_.stopping) return;
  ending_.stop();
  inbox_.changed.store(true, std::memory_order_release);
  target_->wake();
  if (options_.thread == ProgressOptions::own) {
    wake_thread();
    changed_.wait_for(lock, max_departure, [this] { return unfinished_ == 0; });
    return;
  }
  const auto driver = std::move(driver_);
  lock.unlock();
  if (driver) driver->remove(*this);
  finish();
}

/// Keeps the token, so that no thread drives from now on. A thread that still drives was woken and sees
/// ending_.stopping in its next step.
void ProgressEngine::finish() noexcept {
  Lock lock(mutex_);
  if (!acquire_within(max_token_wait, lock)) return;
  const auto destroyed = destroyed_error(options_.rank);
  const auto error = ending_.failure ? ending_.failure : unfinished_ > 0 ? destroyed : nullptr;
  lock.unlock();
  if (error) fail(error);
  target_->close();
  lock.lock();
  ending_.fail(destroyed);
  const auto closed = std::move(target_);
  lock.unlock();
}

void ProgressEngine::abandon() noexcept {
  if (mutex_.try_lock() && token_.try_acquire_driver()) target_->abandon();
}

}  // namespace rz
