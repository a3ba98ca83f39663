#include "comm/transport/link_monitor.h"

#include <utility>

#include "comm/core/text.h"

namespace rz {

LinkMonitor::LinkMonitor(int rank, std::vector<int> nodes, bool oversubscribed)
    : rank_(rank),
      nodes_(std::move(nodes)),
      oversubscribed_(oversubscribed),
      waiter_(wait_policy(oversubscribed).transport),
      wait_graph_(rank),
      by_rank_(nodes_.size()) {}

void LinkMonitor::add(MonitoredLinks& links, std::span<const int> peers, LinkData data) {
  links_.push_back(&links);
  for (const int peer : peers) by_rank_[static_cast<std::size_t>(peer)] = &links;
  if (data == LinkData::memory) memory_links_.push_back(&links);
  if (data == LinkData::sockets) waiter_.expect_data_on_sockets();
}

void LinkMonitor::progress() {
  throw_if_failed();
  if (!waiter_.poll()) return;
  // Backwards: a failure that another node reports takes precedence over a peer lost on this one.
  for (auto links = links_.rbegin(); links != links_.rend(); ++links)
    if (const auto failure = (*links)->poll_failures()) abort(*failure);
  if (reported_) abort(*reported_);
  throw_if_failed();
}

void LinkMonitor::wait(std::chrono::microseconds most, bool eager) {
  waiter_.wait(
      most, eager, [&] { return has_event(); }, [&](bool asleep) { set_sleeping(asleep); });
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
    if (links->changed() || links->group_failure()) return true;
  return failure_.failed();
}

void LinkMonitor::query_waits() {
  wait_graph_.clear_replies();
  query_calls(wait_graph_.last_call().sequence);
}

void LinkMonitor::query_calls(std::uint32_t number) {
  const WaitMessage query{.kind = WaitMessage::query, .number = number};
  for (int r = 0; r < std::ssize(by_rank_); ++r) send_wait_message(r, query);
}

void LinkMonitor::reply_waits(const WaitMessage& reply) {
  for (const auto& [r, message] : wait_graph_.drain_replies(reply)) send_wait_message(r, message);
}

void LinkMonitor::send_wait_message(int peer, const WaitMessage& message) {
  if (auto* links = by_rank_[static_cast<std::size_t>(peer)]) links->send_wait_message(peer, message);
}

// ---- failures ----

/// The first failure wins. Each of the links sends what the links before it have agreed on.
void LinkMonitor::abort(const Failure& first) noexcept {
  failure_.record(first, [&](Failure failure) {
    for (MonitoredLinks* links : links_) failure = links->spread_failure(failure);
    return failure;
  });
  waiter_.ring_doorbell();
}

std::optional<Failure> LinkMonitor::group_failure() const {
  for (const MonitoredLinks* links : memory_links_)
    if (auto failure = links->group_failure()) return failure;
  return std::nullopt;
}

void LinkMonitor::throw_if_failed() {
  if (!failure_.failed())
    if (const auto failure = group_failure()) abort(*failure);
  if (!failure_.failed()) return;
  for (MonitoredLinks* links : links_) links->flush_failure();
  failure_.raise();
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
