#pragma once
/// Heartbeats of a process: they show its peers that it runs, whatever its ranks compute, and find peers that
/// do not.

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "comm/os/process.h"
#include "comm/transport/link_monitor.h"

namespace rz {

/// A thread, "rz-heartbeats", makes a beat a second over the links of each group, or four in the time in
/// which a silence is judged. It takes part in no data: a long step of a call, a page fault or a kernel is no
/// silence.
///
/// A peer is lost if it has shown no beat for `detection`: it was stopped by a signal or a frozen control
/// group, its host has vanished, or the network drops all. One that a debugger has stopped is not. A thread
/// whose own beat comes late begins anew, since it was its process that did not run: who pauses all ranks
/// accuses none.
class Heartbeats {
 public:
  /// Watches the group while it lives.
  class Watch {
   public:
    Watch(std::shared_ptr<LinkMonitor>, std::chrono::milliseconds detection);
    ~Watch();
    Watch(const Watch&) = delete;

   private:
    const std::shared_ptr<LinkMonitor> monitor_;
    const std::shared_ptr<Heartbeats> thread_;
  };
  /// None if `detection` is 0, and of a group that shares the failures of another, which has its ranks.
  static std::unique_ptr<Watch> watch(const std::shared_ptr<LinkMonitor>&,
                                      std::chrono::milliseconds detection);

  /// Use watch().
  Heartbeats() = default;
  ~Heartbeats();
  Heartbeats(const Heartbeats&) = delete;

 private:
  using Clock = std::chrono::steady_clock;
  struct Seen {
    std::uint64_t beats = 0;
    Clock::time_point at;
  };
  struct Group {
    LinkMonitor* monitor;
    Clock::duration detection;
    std::map<int, Seen> peers;
    std::map<int, Clock::time_point> unacknowledged;  ///< sockets, since when nothing was acknowledged
  };

  static std::shared_ptr<Heartbeats> of_process();
  void add(LinkMonitor&, Clock::duration detection);
  void remove(LinkMonitor&);
  void run();
  Clock::duration period() const;
  static void look(Group&);
  static void look_at_sockets(Group&);

  const Creator creator_;
  std::mutex mutex_;  // held while groups are looked at
  std::condition_variable changed_;
  std::vector<Group> groups_;
  bool stopping_ = false;
  std::thread thread_;
};

}  // namespace rz
