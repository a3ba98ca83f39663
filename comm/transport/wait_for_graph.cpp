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
  return {.kind = idle, .waits_for = std::bit_cast<RankSet>(bytes), .call = {.sequence = no_call}};
}

std::string WaitMessage::text() const {
  const auto bytes = std::bit_cast<std::array<char, sizeof(RankSet)>>(waits_for);
  return {bytes.data(), strnlen(bytes.data(), bytes.size())};
}

void WaitForGraph::receive(int peer, const WaitMessage& note) {
  if (note.kind == WaitMessage::query)
    queries_.emplace_back(peer, note.number);
  else
    replies_.insert_or_assign(peer, note);
}

std::vector<std::pair<int, WaitMessage>> WaitForGraph::drain_replies(const WaitMessage& reply) {
  std::vector<std::pair<int, WaitMessage>> replies;
  for (const auto& [peer, number] : std::exchange(queries_, {})) {
    replies.emplace_back(peer, reply);
    replies.back().second.numbered = call(number);
  }
  return replies;
}

std::optional<CallSignature> WaitForGraph::call(std::uint32_t number) const {
  const auto& found = calls_[number % calls_.size()];
  return found && found->sequence == number ? found : std::nullopt;
}

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
