#include "comm/transport/wait_for_graph.h"

#include <deque>
#include <set>
#include <utility>

namespace rz {

void WaitForGraph::receive(int peer, const WaitMessage& note) {
  if (note.kind == WaitMessage::query) requesters_.push_back(peer);
  if (note.kind == WaitMessage::reply) replies_[peer] = note.waits_for;
}

std::vector<int> WaitForGraph::drain_requesters() { return std::exchange(requesters_, {}); }

int WaitForGraph::culprit(int suspect, const RankSet& waits_for) const {
  std::set<int> seen{-1, rank_};
  std::deque<int> next;
  const auto visit = [&](int r) {
    if (seen.insert(r).second) next.push_back(r);
  };
  const auto visit_all = [&](const RankSet& ranks) {
    for (std::size_t r = 0; r < ranks.size(); ++r)
      if (ranks[r]) visit(static_cast<int>(r));
  };
  visit(suspect);
  visit_all(waits_for);
  int idle = -1;
  for (; !next.empty(); next.pop_front()) {
    const auto reply = replies_.find(next.front());
    if (reply == replies_.end()) return next.front();
    if (reply->second.none() && idle < 0) idle = next.front();
    visit_all(reply->second);
  }
  return idle;
}

}  // namespace rz
