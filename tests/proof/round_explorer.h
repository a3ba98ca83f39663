#pragma once
/// All orders in which the rounds of a call (rounds.h) can run on one rank, whatever its peers do.

#include <algorithm>
#include <array>
#include <set>
#include <tuple>
#include <vector>

#include "comm/core/error.h"
#include "tests/proof/rank_plans.h"

namespace rz::intranode {

/// Visits every state that a rank can reach, and derives from them what each move and each acknowledgement
/// implies: the fewest moves that have run before. Requires moves that, once possible, stay so.
template <class Rounds>
class RoundExplorer {
 public:
  explicit RoundExplorer(const Rounds& rounds) : rounds_(rounds) {
    std::vector<RoundCounts> open{{}};
    for (visited_.insert(key({})); !open.empty();) {
      const RoundCounts state = open.back();
      open.pop_back();
      visit(state, open);
    }
    std::sort(acks_.begin(), acks_.end(),
              [](const auto& a, const auto& b) { return is_after(b.before, a.before); });
  }

  /// Moves of the phase that have run before that one.
  const RoundCounts& before(PlannedMove::Kind kind, std::size_t round) const { return before_[kind][round]; }
  const std::vector<PlannedAck>& acks() const { return acks_; }

 private:
  using Key = std::tuple<std::size_t, std::size_t, std::size_t>;
  static Key key(const RoundCounts& s) { return {s.contributed, s.reduced, s.read}; }
  static RoundCounts smaller(const RoundCounts& a, const RoundCounts& b) {
    return {std::min(a.contributed, b.contributed), std::min(a.reduced, b.reduced), std::min(a.read, b.read)};
  }
  std::array<bool, 3> possible(const RoundCounts& state) {
    rounds_.done = state;
    return {rounds_.can_contribute(), rounds_.can_reduce(), rounds_.can_read()};
  }
  static std::size_t& count(RoundCounts& s, std::size_t kind) {
    return kind == PlannedMove::contribute ? s.contributed : kind == PlannedMove::reduce ? s.reduced : s.read;
  }

  void visit(const RoundCounts& state, std::vector<RoundCounts>& open) {
    const auto can = possible(state);
    note_ack(state);
    require(can != std::array<bool, 3>{} || rounds_.complete(), Errc::invalid_argument,
            "no move is possible after ", state.contributed, " contributions and ", state.read, " reads");
    for (std::size_t kind = 0; kind < can.size(); ++kind) {
      if (!can[kind]) continue;
      RoundCounts next = state;
      note_move(kind, count(next, kind)++, state);
      const auto still = possible(next);
      for (std::size_t other = 0; other < can.size(); ++other)
        require(other == kind || !can[other] || still[other], Errc::invalid_argument,
                "a move is no longer possible after ", next.contributed, " contributions and ", next.read,
                " reads");
      if (visited_.insert(key(next)).second) open.push_back(next);
    }
  }
  void note_move(std::size_t kind, std::size_t round, const RoundCounts& state) {
    auto& list = before_[kind];
    if (round >= list.size()) list.resize(round + 1, {~0ull, ~0ull, ~0ull});
    list[round] = smaller(list[round], state);
  }
  void note_ack(const RoundCounts& state) {
    const StepNumber before = rounds_.acked();
    if (before == rounds_.first) return;  // nothing is written
    for (PlannedAck& a : acks_)
      if (a.before == before) return void(a.after = smaller(a.after, state));
    acks_.push_back({before, state});
  }

  Rounds rounds_;
  std::set<Key> visited_;
  std::array<std::vector<RoundCounts>, 3> before_;
  std::vector<PlannedAck> acks_;
};

}  // namespace rz::intranode
