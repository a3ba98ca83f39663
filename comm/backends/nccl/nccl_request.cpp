#include "comm/backends/nccl/nccl_request.h"

#include "comm/core/error.h"
#include "comm/os/wait_policy.h"

namespace rz::nccl {

using namespace std::chrono_literals;

bool GroupStatus::fail(Failure failure) {
  const std::lock_guard lock(mutex_);
  if (failed_) return false;
  failure_ = std::move(failure);
  failed_.store(true, std::memory_order_release);
  return true;
}

void GroupStatus::publish(const std::string& more) {
  {
    const std::lock_guard lock(mutex_);
    failure_.reason += more;
    published_ = true;
  }
  changed_.notify_all();
}

bool GroupStatus::published() const noexcept {
  const std::lock_guard lock(mutex_);
  return published_;
}

bool GroupStatus::wait_published(std::chrono::milliseconds limit) const noexcept {
  std::unique_lock lock(mutex_);
  return changed_.wait_until(lock, Deadline::after(limit).at(), [&] { return published_; });
}

void GroupStatus::rethrow() const {
  wait_published(10s);  // longer than all limits of the watchdog's termination
  const std::lock_guard lock(mutex_);
  throw Error(failure_.code, failure_.reason, failure_.culprit);
}

void NcclRequest::set_events(Event ready, Event end, bool captured) {
  start_event_ = std::move(ready);
  end_event_ = std::move(end);
  captured_ = captured;
  issued_.store(true, std::memory_order_release);
}

bool NcclRequest::succeeded() const {
  if (succeeded_.load(std::memory_order_acquire)) return true;
  if (!issued() || (!captured_ && !end_event_.done()) || group_status_->failed()) return false;
  succeeded_.store(true, std::memory_order_release);
  return true;
}

bool NcclRequest::done() const noexcept {
  try {
    return succeeded() || (group_status_->failed() && group_status_->published());
  } catch (...) {
    return true;  // the device has failed; wait() throws the reason
  }
}

void NcclRequest::wait() {
  require(!captured_, Errc::invalid_argument, description,
          " is part of a graph that is being captured, where nothing ends; use wait_on(stream), and wait for "
          "the stream that the graph is launched in");
  for (unsigned polls = 0; !succeeded(); ++polls) {
    if (group_status_->failed()) group_status_->rethrow();
    nccl_backoff.wait(polls);
  }
}

void NcclRequest::wait_on(const Stream& stream) {
  if (!succeeded() && group_status_->failed()) group_status_->rethrow();
  stream.wait(end_event_);
}

}  // namespace rz::nccl
