#include "comm/transport/link_monitor.h"

#include <algorithm>
#include <utility>

#include "comm/core/text.h"

namespace rz {

LinkMonitor::LinkMonitor(int rank, std::vector<int> nodes, bool oversubscribed, ParentGroup parent)
    : rank_(rank),
      nodes_(std::move(nodes)),
      oversubscribed_(oversubscribed),
      waiter_(wait_policy(oversubscribed).transport),
      wait_graph_(rank),
      parent_(std::move(parent)),
      by_rank_(nodes_.size()) {
  if (parent_.monitor) parent_.monitor->split_waits_.add_group();
}

void LinkMonitor::add(MonitoredLinks& links, std::span<const int> peers, LinkData data) {
  links_.push_back(&links);
  for (const int peer : peers) by_rank_[static_cast<std::size_t>(peer)] = &links;
  if (data == LinkData::memory) memory_links_.push_back(&links);
  if (data == LinkData::sockets) waiter_.expect_data_on_sockets();
}

void LinkMonitor::progress(std::uint32_t completed) {
  completed_ = completed;
  throw_if_failed();
  if (!waiter_.poll()) return;
  if (const auto failure = poll_links()) found(*failure);
  if (reported_) found(*reported_);
  throw_if_failed();
}

/// Backwards: a failure that another node reports takes precedence over a peer lost on this one.
std::optional<Failure> LinkMonitor::poll_links() {
  std::optional<Failure> first;
  for (auto links = links_.rbegin(); links != links_.rend(); ++links)
    if (auto failure = (*links)->poll_failures(); failure && !first) first = std::move(failure);
  return first;
}

std::optional<Failure> LinkMonitor::find_lost() {
  if (!waiter_.poll()) return std::nullopt;
  auto failure = poll_links();
  return failure && failure->code == Errc::peer_lost ? std::move(failure) : std::nullopt;
}

void LinkMonitor::wait(std::chrono::microseconds timeout, bool eager) {
  waiter_.wait(
      timeout, eager, [&] { return has_event(); }, [&](bool asleep) { set_sleeping(asleep); });
}

int LinkMonitor::begin_sleep() {
  const bool begun =
      waiter_.begin_sleep([&] { return has_event(); }, [&](bool asleep) { set_sleeping(asleep); });
  return begun ? waiter_.poller().descriptor() : -1;
}

void LinkMonitor::end_sleep() {
  waiter_.end_sleep([&](bool asleep) { set_sleeping(asleep); });
}

void LinkMonitor::set_sleeping(bool asleep) {
  for (MonitoredLinks* links : memory_links_) links->set_sleeping(asleep);
}

/// An event in memory for which wait() must return.
bool LinkMonitor::has_event() {
  for (MonitoredLinks* links : memory_links_)
    if (links->changed()) return true;
  return failure_.failed() ? !is_pending() : group_failure().has_value();
}

void LinkMonitor::query_waits() {
  wait_graph_.clear_replies();
  query_calls(wait_graph_.last_call().sequence, static_cast<int>(by_rank_.size()) - 1);
}

void LinkMonitor::query_calls(std::uint32_t number, int peers) {
  const WaitMessage query{.kind = WaitMessage::query, .number = number};
  const int size = static_cast<int>(by_rank_.size());
  for (int i = 1; i <= peers; ++i) send_wait_message((rank_ + i) % size, query);
}

void LinkMonitor::reply_waits(const WaitMessage& reply) {
  for (const auto& [r, message] : wait_graph_.drain_replies(reply)) send_wait_message(r, message);
}

void LinkMonitor::send_wait_message(int peer, const WaitMessage& message) {
  if (auto* links = by_rank_[static_cast<std::size_t>(peer)]) links->send_wait_message(peer, message);
}

// ---- heartbeats ----

void LinkMonitor::beat() noexcept {
  for (MonitoredLinks* links : links_) links->beat();
}

std::vector<Pulse> LinkMonitor::pulses() const {
  std::vector<Pulse> all;
  if (failure_.failed()) return all;
  for (const MonitoredLinks* links : links_) links->add_pulses(all);
  return all;
}

std::optional<Failure> LinkMonitor::judge_silence(const Pulse& pulse,
                                                  std::chrono::duration<double> silence) const {
  return by_rank_[static_cast<std::size_t>(pulse.rank)]->judge_silence(pulse, silence);
}

std::vector<Unacknowledged> LinkMonitor::unacknowledged() const {
  std::vector<Unacknowledged> all;
  if (failure_.failed()) return all;
  for (const MonitoredLinks* links : links_) links->add_unacknowledged(all);
  return all;
}

// ---- failures ----

namespace {

/// The parent polls once a second. Of a timeout it also queries its ranks, which poll once a second.
constexpr std::chrono::seconds max_verdict{3}, max_verdict_of_timeout{6};

}  // namespace

/// In numbers of the parent.
Failure LinkMonitor::in_parent(const Failure& failure) const {
  Failure out = failure;
  if (failure.culprit >= 0) out.culprit = parent_.ranks[static_cast<std::size_t>(failure.culprit)];
  if (failure.reason.find("rank ") != std::string::npos) {
    std::string text;
    for (const int r : parent_.ranks) text += concat(text.empty() ? "" : ", ", r);
    out.reason = concat(out.culprit < 0 ? "" : concat("rank ", out.culprit, ": "),
                        "in the group of the ranks ", text, ", numbered from 0: ", failure.reason);
  }
  return out;
}

RankSet LinkMonitor::in_parent(const RankSet& ranks) const {
  RankSet out;
  for (std::size_t r = 0; r < parent_.ranks.size() && r < ranks.size(); ++r) {
    const auto rank = static_cast<std::size_t>(parent_.ranks[r]);
    if (ranks[r] && rank < out.size()) out.set(rank);
  }
  return out;
}

void LinkMonitor::set_long_wait(const RankSet& ranks) {
  RankSet waiting_on = ranks;
  for (const LinkMonitor* m = this; m->parent_.monitor; m = m->parent_.monitor.get()) {
    waiting_on = m->in_parent(waiting_on);
    m->parent_.monitor->split_waits_.set(this, waiting_on);
  }
}

bool LinkMonitor::expire_in_parent(const Failure& failure, const std::string& cause,
                                   const RankSet& waiting_on) {
  if (!parent_.monitor) return false;
  SplitWaits::Expired wait{{-1, failure.code, cause}, failure.culprit, waiting_on};
  LinkMonitor* m = this;
  for (; m->parent_.monitor; m = m->parent_.monitor.get()) {
    wait.failure = m->in_parent(wait.failure);
    wait.waiting_on = m->in_parent(wait.waiting_on);
    if (wait.suspect >= 0) wait.suspect = m->parent_.ranks[static_cast<std::size_t>(wait.suspect)];
  }
  m->split_waits_.expire(wait);
  lost_ = failure;
  lost_until_ = Deadline::after(max_verdict_of_timeout);
  return true;
}

/// The first failure wins. Each of the links sends what the links before it have agreed on. Where the parent
/// has failed before, its peers have its failure.
void LinkMonitor::abort(const Failure& first) noexcept {
  if (first.code == Errc::cancelled) return cancel(first);
  Failure of_parent;
  bool follows = false;
  if (parent_.monitor) {
    FailureState& shared = parent_.monitor->failure_;
    follows = shared.failed();
    if (!follows) parent_.monitor->abort(in_parent(first));
    of_parent = shared.failure();
  }
  failure_.record(first, [&](Failure failure) {
    if (!closed_ && !follows)
      for (MonitoredLinks* links : links_) failure = links->spread_failure(failure);
    return parent_.monitor ? of_parent : failure;
  });
  waiter_.ring_doorbell();
}

/// Groups above and below this one are cancelled with counts of their own. Each rank that cancels tells the
/// others its count, whichever was the first.
void LinkMonitor::cancel(const Failure& failure) noexcept {
  const auto spread = [&](Failure spread_next) {
    if (!closed_)
      for (MonitoredLinks* links : links_) spread_next = links->spread_failure(spread_next);
    return spread_next;
  };
  cancelled_after_ = std::min(cancelled_after_.load(), failure.calls);
  bool is_first = false;
  failure_.record(failure, [&](const Failure& f) { return is_first = true, spread(f); });
  if (!is_first) failure_.exclude([&] { spread(failure); });
  waiter_.ring_doorbell();
}

/// The group is cancelled, but every rank that has cancelled it had completed more calls than this one has.
/// So the call that this rank is in, or is about to make, ends.
bool LinkMonitor::is_pending() const {
  if (failure_.failure().code != Errc::cancelled) return false;
  std::uint32_t after = cancelled_after_;
  for (const MonitoredLinks* links : links_)
    after = std::min(after, links->cancelled_after().value_or(after));
  return completed_ < after;
}

void LinkMonitor::close() noexcept {
  set_long_wait({});
  failure_.exclude([this] { closed_ = true; });
}

void LinkMonitor::found(const Failure& failure) {
  if (failure_.failed()) {
    // A call that a cancelled group would still complete does not end without the peer.
    if (failure.code != Errc::cancelled && is_pending())
      throw Error(failure.code, failure.reason, failure.culprit);
    return;
  }
  if (!parent_.monitor || failure.code != Errc::peer_lost) return abort(failure);
  if (lost_) return;
  lost_ = failure;
  lost_until_ = Deadline::after(max_verdict);
}

void LinkMonitor::follow_parent() {
  for (const LinkMonitor* above = parent_.monitor.get(); above; above = above->parent_.monitor.get())
    if (above->failure_.failed() && above->failure_.failure().code != Errc::cancelled)
      failure_.record(above->failure_.failure(), [](const Failure& failure) { return failure; });
  if (lost_ && lost_until_.expired()) abort(*lost_);
}

std::optional<Failure> LinkMonitor::group_failure() const {
  for (const MonitoredLinks* links : memory_links_)
    if (auto failure = links->group_failure()) return failure;
  return std::nullopt;
}

void LinkMonitor::throw_if_failed() {
  if (!failure_.failed())
    if (const auto failure = group_failure()) found(*failure);
  if (!failure_.failed() && parent_.monitor) follow_parent();
  if (!failure_.failed()) return;
  for (MonitoredLinks* links : links_) links->flush_failure();
  if (!is_pending()) failure_.raise();
}

void LinkMonitor::report(const Failure& failure) {
  if (!reported_) reported_ = failure;
}

void LinkMonitor::report_departed(int peer) {
  if (reported_) return;
  report(
      {peer, Errc::peer_lost, concat("rank ", peer, " left the group, and rank ", rank_, " still needs it")});
}

}  // namespace rz
