#include "comm/transport/wait_for_graph.h"

#include <array>
#include <bit>
#include <cstring>
#include <deque>
#include <set>
#include <utility>

namespace rz {

WaitMessage WaitMessage::idle_in(std::string_view text) {
  std::array<char, sizeof(RankSet)> bytes{};
  text.copy(bytes.data(), bytes.size() - 1);
  return {idle, std::bit_cast<RankSet>(bytes), {}};
}

std::string WaitMessage::text() const {
  const auto bytes = std::bit_cast<std::array<char, sizeof(RankSet)>>(waits_for);
  return {bytes.data(), strnlen(bytes.data(), bytes.size())};
}

void WaitForGraph::receive(int peer, const WaitMessage& note) {
  if (note.kind == WaitMessage::query) requesters_.push_back(peer);
  if (note.kind == WaitMessage::reply || note.kind == WaitMessage::idle)
    replies_.insert_or_assign(peer, note);
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
    if (unresponsive(next.front())) return next.front();
    const RankSet& theirs = state_of(next.front())->waits_for;
    if (theirs.none() && idle < 0) idle = next.front();
    visit_all(theirs);
  }
  return idle;
}

}  // namespace rz
