#pragma once
/// Waiting, failures and wait-for messages of a group, once for all its transports. Transports that serve
/// different peers of one group share a monitor and add their links to it.

#include <sys/types.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "comm/core/deadline.h"
#include "comm/transport/failure.h"
#include "comm/transport/split_waits.h"
#include "comm/transport/transport_waiter.h"
#include "comm/transport/wait_for_graph.h"

namespace rz {

/// What a peer's heartbeats have shown.
struct Pulse {
  int rank = -1;
  std::uint64_t beats = 0;                        ///< they change while the peer's process runs
  std::chrono::steady_clock::time_point read_at;  ///< when they were last looked at
  pid_t process = 0;                              ///< of a peer on this host; 0: on another one
  bool link = false;                              ///< it is of a connection, of which neither end is to blame
};

/// A socket on which data is on its way that the peer's host has not acknowledged yet.
struct Unacknowledged {
  int rank = -1;  ///< of the peer
  int socket = -1;
  std::chrono::milliseconds silence{};  ///< since the host has acknowledged anything
};

/// The connections of one transport with its peers, as LinkMonitor drives them.
class MonitoredLinks {
 public:
  /// Continues transfers, and handles control data on the descriptors that the poller has flagged. Returns a
  /// failure if a peer reports one or is lost.
  virtual std::optional<Failure> poll_failures() = 0;
  /// Sends the group's failure to the peers: the first one, and every one that is Errc::cancelled. Returns
  /// it, or another one that peers have agreed on before. Never blocks. One thread at a time, any.
  virtual Failure spread_failure(const Failure&) = 0;
  /// The fewest Failure::calls of the failures of peers that were Errc::cancelled; empty if there was none.
  virtual std::optional<std::uint32_t> cancelled_after() const = 0;
  /// Continues what spread_failure() could not send at once.
  virtual void flush_failure() noexcept {}
  /// Drops the message if the peer's socket is full.
  virtual void send_wait_message(int peer, const WaitMessage&) = 0;

  // ---- on the thread of heartbeats (heartbeats.h)
  /// Shows peers that this process runs.
  virtual void beat() noexcept {}
  /// Adds the pulses of peers for which this rank looks.
  virtual void add_pulses(std::vector<Pulse>&) const {}
  /// The failure of a peer without a beat for so long; empty if it is none.
  virtual std::optional<Failure> judge_silence(const Pulse&, std::chrono::duration<double>) const {
    return std::nullopt;
  }
  /// Adds the sockets on which data is on its way.
  virtual void add_unacknowledged(std::vector<Unacknowledged>&) const {}

  // For links whose data travels through memory shared with the peers.

  /// True if a peer has changed it since the last call.
  virtual bool changed() { return false; }
  /// While it is set, peers ring the poller's doorbell after they have changed it.
  virtual void set_sleeping(bool) {}
  /// The failure that the peers have agreed on in it; empty if there is none.
  virtual std::optional<Failure> group_failure() const { return std::nullopt; }

 protected:
  ~MonitoredLinks() = default;
};

/// How links carry their data. Links through sockets alone have no changes of memory.
enum class LinkData { memory, sockets };

/// The monitor of the group that a group is split from, and the ranks there of the ranks here.
struct ParentGroup {
  std::shared_ptr<class LinkMonitor> monitor;  ///< null: none
  std::vector<int> ranks;
};

/// Functions without a comment implement those of Transport.
///
/// A group with a parent shares its failures, unless they are Errc::cancelled: that of either ends both, with
/// the ranks of the parent. A rank
/// that is lost here is lost there, too. So the parent finds out which one was lost first, within a few
/// seconds; if it does not, this group fails by itself. Likewise the parent finds the rank for which a wait
/// that does not end here waits through other groups.
class LinkMonitor {
 public:
  /// `nodes`: the node of each rank (Transport::nodes()). `oversubscribed`: waits yield instead of spinning.
  LinkMonitor(int rank, std::vector<int> nodes, bool oversubscribed, ParentGroup parent = {});

  int rank() const { return rank_; }
  std::span<const int> nodes() const { return nodes_; }
  bool oversubscribed() const { return oversubscribed_; }
  /// Watches descriptors of links; they are flagged by progress() and wait().
  net::Poller& poller() { return waiter_.poller(); }
  /// Adds links with these peers. They stay valid as long as functions of Transport are called.
  void add(MonitoredLinks&, std::span<const int> peers, LinkData);

  void progress(std::uint32_t completed);
  std::optional<Failure> find_lost();
  void wait(std::chrono::microseconds timeout, bool eager);
  int begin_sleep();
  void end_sleep();
  void wake() noexcept { waiter_.wake(); }
  void abort(const Failure&) noexcept;
  /// The links are not used from now on; groups that were split from this one may live on. Any thread.
  void close() noexcept;
  void query_waits();
  void query_calls(std::uint32_t number, int peers);
  void reply_waits(const WaitMessage& reply);
  WaitForGraph& wait_graph() { return wait_graph_; }

  /// The waits of groups that are split from this one.
  SplitWaits& split_waits() { return split_waits_; }
  /// This rank has waited long for these ranks, or does not any more if there are none: groups above this one
  /// know it then.
  void set_long_wait(const RankSet&);
  /// A wait has not ended in time. False without a parent; else that fails all groups soon, or this group
  /// fails with `failure`. `cause`: of the wait, without a culprit.
  bool expire_in_parent(const Failure& failure, const std::string& cause, const RankSet& waiting_on);

  /// Whether a failure ends another group, too.
  bool shares_failures() const { return parent_.monitor != nullptr; }

  // On the thread of heartbeats. Once the group has failed, nothing is found.
  void beat() noexcept;
  std::vector<Pulse> pulses() const;
  std::optional<Failure> judge_silence(const Pulse&, std::chrono::duration<double>) const;
  std::vector<Unacknowledged> unacknowledged() const;

  // For links, on the driving thread.

  /// A later progress() fails the group with this, unless it finds another failure first.
  void report(const Failure&);
  /// This rank needs a peer that has left the group.
  void report_departed(int peer);

 private:
  static constexpr std::uint32_t no_limit = 0xffffffff;

  std::optional<Failure> group_failure() const;
  std::optional<Failure> poll_links();
  Failure in_parent(const Failure&) const;
  RankSet in_parent(const RankSet&) const;
  void cancel(const Failure&) noexcept;
  void found(const Failure&);
  void follow_parent();
  bool has_event();
  void set_sleeping(bool);
  bool is_pending() const;
  void throw_if_failed();
  void send_wait_message(int peer, const WaitMessage&);

  const int rank_;
  const std::vector<int> nodes_;
  const bool oversubscribed_;
  TransportWaiter waiter_;
  WaitForGraph wait_graph_;
  FailureState failure_;
  std::uint32_t completed_ = 0;  // collectives of this rank, as of the last progress()
  std::atomic<std::uint32_t> cancelled_after_{no_limit};  // by this rank
  bool closed_ = false;                                   // changed while no failure is recorded
  const ParentGroup parent_;
  SplitWaits split_waits_;
  std::optional<Failure> lost_;  // a peer, or time; the parent knows more
  Deadline lost_until_ = Deadline::after(std::chrono::seconds(0));
  std::optional<Failure> reported_;
  std::vector<MonitoredLinks*> links_, memory_links_;
  std::vector<MonitoredLinks*> by_rank_;  // null: this rank
};

}  // namespace rz
