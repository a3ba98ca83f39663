#pragma once
/// Who waits for whom, as the ranks of a group tell each other once one of them has waited long: by it a
/// deadline blames the rank that holds up the others, and not a live one that waits for it, too.

#include <bitset>
#include <cstdint>
#include <map>
#include <vector>

namespace rz {

/// As many as a control frame has room for; ranks beyond are never blamed for what others wait for.
using RankSet = std::bitset<3840>;

/// What one rank says to another.
struct WaitMessage {
  enum Kind : std::uint32_t { query, reply } kind;
  RankSet waits_for;  ///< of an answer
};

class WaitForGraph {
 public:
  explicit WaitForGraph(int rank) : rank_(rank) {}

  void receive(int peer, const WaitMessage&);
  bool has_requests() const { return !requesters_.empty(); }
  /// Who has asked and got no answer yet.
  std::vector<int> drain_requesters();

  void clear_replies() { replies_.clear(); }
  /// Has told nothing since forget(): it is stuck, or stopped, or makes no call.
  bool unresponsive(int peer) const { return !replies_.contains(peer); }
  /// Of those for whom this rank waits, `suspect` first, and for whom they wait, and so on: the nearest that
  /// is silent, else one that waits for nobody. -1: all wait for each other.
  int culprit(int suspect, const RankSet& waits_for) const;

 private:
  const int rank_;
  std::vector<int> requesters_;
  std::map<int, RankSet> replies_;
};

}  // namespace rz
