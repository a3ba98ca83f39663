#include "comm/backends/peer_cuda/device_watchdog.h"

#include <algorithm>
#include <iterator>

#include "comm/backends/peer_cuda/build_kernel_args.h"
#include "comm/core/deadline.h"
#include "comm/os/helper_thread.h"
#include "comm/os/wait_policy.h"

namespace rz {

using namespace std::chrono_literals;

namespace {

constexpr auto cancel_grace = 1s;  // of an operation in a cancelled group

}  // namespace

DeviceWatchdog::DeviceWatchdog(const std::shared_ptr<Backend>& host, peer::DeviceStatus& status,
                               const PeerCudaOptions& options)
    : options_(options),
      host_(host),
      status_(status),
      long_waits_{{options.waits, options.rank, options.size}, {options.waits, options.rank, options.size}},
      thread_(helper_thread([this] { run(); })) {}

DeviceWatchdog::~DeviceWatchdog() {
  {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  changed_.notify_all();
  thread_.join();
}

void DeviceWatchdog::check() {
  check_device_error();
  std::unique_lock lock(mutex_);
  decided_.wait_for(lock, 2s, [&] { return !deciding_; });
  if (failure_) std::rethrow_exception(failure_);
}

void DeviceWatchdog::launched(std::uint64_t signature, std::uint64_t count, bool captured) {
  const std::lock_guard lock(mutex_);
  is_numbered_ = is_numbered_ && !captured;
  const std::uint64_t number = ++launches_;
  launched_[number % std::size(launched_)] = {is_numbered_ ? number : 0, signature, count};
}

bool DeviceWatchdog::failed() noexcept {
  try {
    check();
  } catch (...) {
    return true;
  }
  return false;
}

void DeviceWatchdog::fail_with(const Error& error) noexcept {
  const std::lock_guard lock(mutex_);
  if (!failure_) failure_ = std::make_exception_ptr(error);
  store_release(status_.stop, std::uint32_t{1});
}

void DeviceWatchdog::fail_timeout(int channel) noexcept {
  {
    const std::lock_guard lock(mutex_);
    if (failure_ || deciding_) return;
    deciding_ = true;
    store_release(status_.stop, std::uint32_t{1});
  }
  const Deadline deadline = Deadline::after(1s);
  while (load_acquire(status_.finished[channel]) != load_acquire(status_.started[channel]) &&
         !deadline.expired())
    std::this_thread::sleep_for(poll_period::group_teardown);
  check_device_error();  // the kernels may have reported another error meanwhile
  fail_with(timeout_error(channel));
  {
    const std::lock_guard lock(mutex_);
    deciding_ = false;
  }
  decided_.notify_all();
}

void DeviceWatchdog::run() {
  const auto pause = std::clamp<Clock::duration>(options_.timeout / 20, 1ms, 20ms);
  ChannelProgress channels[peer::channel_count];
  std::unique_lock lock(mutex_);
  while (!changed_.wait_for(lock, pause, [&] { return stopping_; })) {
    lock.unlock();
    check_device_error();
    for (int i = 0; i < peer::channel_count; ++i) check_progress(i, channels[i]);
    lock.lock();
  }
}

/// Fails with Errc::timeout if a started call does not end in time.
void DeviceWatchdog::check_progress(int i, ChannelProgress& channel) {
  const std::uint64_t left = load_acquire(status_.finished[i]), entered = load_acquire(status_.started[i]);
  report_long_wait(i, entered == left ? 0 : entered);
  if (entered == left || entered != channel.call) {
    channel = {entered, Clock::now()};
    return;
  }
  check_host(Clock::now() - channel.since);
  if (Clock::now() - channel.since >= options_.timeout && !load_acquire(status_.stop)) fail_timeout(i);
}

void DeviceWatchdog::report_long_wait(int channel, std::uint64_t call) {
  const auto now = Clock::now();
  LongWait& wait = long_waits_[channel];
  if (!wait.is_due(now, call)) return;
  std::string ranks;
  for (int r = 0; r < options_.size; ++r)
    if (r != options_.rank && load_acquire(status_.waiting_on[channel][r]))
      ranks += concat(ranks.empty() ? "it waits for rank " : ", ", r);
  wait.report(now, concat(text_of(channel, call), " on ", name(options_.device)),
              ranks.empty() ? "it waits for no rank, so other work on the device is late" : ranks);
}

std::string DeviceWatchdog::text_of(int channel, std::uint64_t call) {
  const std::string number = concat(" #", call - 1);
  if (channel == peer::message_channel) return "a group of messages" + number;
  const std::lock_guard lock(mutex_);
  const Launched& launched = launched_[call % std::size(launched_)];
  return is_numbered_ && launched.number == call ? to_string(launched.signature, launched.count) + number
                                                 : "a collective" + number;
}

/// Timeout error; the culprit is the lowest rank that a kernel waits for.
Error DeviceWatchdog::timeout_error(int channel) const {
  int culprit = -1;
  for (int r = options_.size - 1; r >= 0; --r)
    if (r != options_.rank && load_acquire(status_.waiting_on[channel][r])) culprit = r;
  return Error(
      Errc::timeout,
      concat(channel == peer::message_channel ? "a message" : "a collective", " on ", name(options_.device),
             " did not end within ", std::chrono::duration<double>(options_.timeout).count(), " s on rank ",
             options_.rank, ": ",
             culprit < 0 ? std::string("no rank is missing, so work before it in the stream is late")
                         : concat("rank ", culprit, " has not reached it"),
             "; a rank may be stuck, or slower than the timeout allows"),
      culprit);
}

/// The host backend detects ranks that have died, aborted or cancelled. `waited`: of the kernel that runs; in
/// a cancelled group it may be one that the others have completed.
void DeviceWatchdog::check_host(Clock::duration waited) noexcept {
  try {
    if (const auto host = host_.lock()) host->check();
  } catch (const Error& e) {
    if (e.code() != Errc::cancelled || waited >= cancel_grace) fail_with(e);
  }
}

/// Turns an error reported by a kernel into the group's failure.
void DeviceWatchdog::check_device_error() {
  const std::uint32_t error = load_acquire(status_.error);
  if (error == peer::no_error) return;
  const int culprit = static_cast<int>(status_.culprit);
  switch (error) {
    case peer::mismatch:
      return fail_with(Error(
          Errc::mismatch,
          concat("rank ", options_.rank, " called ", to_string(status_.own_call[0], status_.own_call[1]),
                 ", but rank ", culprit, " called ", to_string(status_.peer_call[0], status_.peer_call[1])),
          culprit));
    case peer::peer_aborted:
      check_host(cancel_grace);  // it knows why
      return fail_with(Error(Errc::aborted, concat("rank ", culprit, " called abort()"), culprit));
    default:
      return fail_with(Error(Errc::peer_lost,
                             concat("rank ", culprit, " has left the group, and rank ", options_.rank,
                                    " waits for it on ", name(options_.device)),
                             culprit));
  }
}

}  // namespace rz
