#include "comm/transport/heartbeats.h"

#include <algorithm>
#include <utility>

#include "comm/os/helper_thread.h"

namespace rz {

using namespace std::chrono_literals;

// ---- the thread

/// As ProgressDriver::of_process().
std::shared_ptr<Heartbeats> Heartbeats::of_process() {
  std::shared_ptr<Heartbeats> thread;
  without_fork([&] {
    static auto& slot = *new std::weak_ptr<Heartbeats>;
    thread = slot.lock();
    if (thread && thread->creator_.is_this_generation()) return;
    thread = std::make_shared<Heartbeats>();
    thread->thread_ = helper_thread([t = thread.get()] { t->run(); });
    slot = thread;
  });
  return thread;
}

Heartbeats::~Heartbeats() {
  {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  changed_.notify_all();
  if (thread_.joinable()) thread_.join();
}

void Heartbeats::run() {
  name_this_thread("rz-heartbeats");
  std::unique_lock lock(mutex_);
  while (!stopping_) {
    const auto pause = period();
    const auto due = Clock::now() + pause;
    changed_.wait_until(lock, due,
                        [this, known = groups_.size()] { return stopping_ || groups_.size() != known; });
    const bool late = Clock::now() > due + pause;
    for (Group& group : groups_) {
      if (late) group.peers.clear(), group.unacknowledged.clear();
      look(group);
    }
  }
}

Heartbeats::Clock::duration Heartbeats::period() const {
  Clock::duration shortest = 1s;
  for (const Group& group : groups_) shortest = std::min(shortest, group.detection / 4);
  return shortest;
}

void Heartbeats::look(Group& group) {
  group.monitor->beat();
  for (const Pulse& pulse : group.monitor->pulses()) {
    Seen& seen = group.peers.try_emplace(pulse.rank, Seen{pulse.beats, pulse.read_at}).first->second;
    if (seen.beats != pulse.beats) seen = {pulse.beats, pulse.read_at};
    // A peer of another host is judged later: those on its own host know more, as do sockets to one that has
    // vanished.
    const auto patience = pulse.process ? group.detection : group.detection + group.detection / 2;
    if (pulse.read_at - seen.at < patience) continue;
    if (const auto failure = group.monitor->judge_silence(pulse, pulse.read_at - seen.at))
      group.monitor->abort(*failure);
  }
  look_at_sockets(group);
}

/// Control sockets show a host that has vanished. A flow of data alone may be lost as well.
void Heartbeats::look_at_sockets(Group& group) {
  const auto now = Clock::now();
  const std::vector<Unacknowledged> sockets = group.monitor->unacknowledged();
  std::erase_if(group.unacknowledged, [&](const auto& known) {
    return std::ranges::find(sockets, known.first, &Unacknowledged::socket) == sockets.end();
  });
  for (const Unacknowledged& s : sockets) {
    auto& since = group.unacknowledged.try_emplace(s.socket, now).first->second;
    since = std::max(since, now - s.silence);
    if (now - since < group.detection) continue;
    if (const auto failure = group.monitor->judge_silence({.rank = s.rank, .link = true}, now - since))
      group.monitor->abort(*failure);
  }
}

// ---- its groups

void Heartbeats::add(LinkMonitor& monitor, Clock::duration detection) {
  {
    const std::lock_guard lock(mutex_);
    groups_.push_back({&monitor, detection, {}});
    look(groups_.back());
  }
  changed_.notify_all();
}

void Heartbeats::remove(LinkMonitor& monitor) {
  const std::lock_guard lock(mutex_);
  std::erase_if(groups_, [&](const Group& group) { return group.monitor == &monitor; });
}

Heartbeats::Watch::Watch(std::shared_ptr<LinkMonitor> monitor, std::chrono::milliseconds detection)
    : monitor_(std::move(monitor)), thread_(of_process()) {
  thread_->add(*monitor_, detection);
}

Heartbeats::Watch::~Watch() { thread_->remove(*monitor_); }

std::unique_ptr<Heartbeats::Watch> Heartbeats::watch(const std::shared_ptr<LinkMonitor>& monitor,
                                                     std::chrono::milliseconds detection) {
  const bool alone = !monitor || monitor->nodes().size() == 1;
  if (alone || detection.count() == 0 || monitor->shares_failures()) return nullptr;
  return std::make_unique<Watch>(monitor, detection);
}

}  // namespace rz
