#include "comm/transports/wait_for_graph.h"

#include <deque>
#include <set>
#include <utility>

namespace rz {

void WaitForGraph::hear(int peer, const WaitNote& note) {
  if (note.kind == WaitNote::question) askers_.push_back(peer);
  if (note.kind == WaitNote::answer) told_[peer] = note.waits_for;
}

std::vector<int> WaitForGraph::take_askers() { return std::exchange(askers_, {}); }

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
    const auto told = told_.find(next.front());
    if (told == told_.end()) return next.front();
    if (told->second.none() && idle < 0) idle = next.front();
    visit_all(told->second);
  }
  return idle;
}

}  // namespace rz
