#pragma once
/// Wait-for graph of a group. Ranks exchange it once one of them has waited long. At a deadline it identifies
/// the rank that blocks the others as the culprit, instead of a live rank that also waits for it.

#include <bitset>
#include <cstdint>
#include <map>
#include <string>
#include <vector>

namespace rz {

/// A set of ranks that fits into a control frame. Waits for ranks beyond its size are not recorded.
using RankSet = std::bitset<3840>;

/// What one call waits for.
struct WaitState {
  RankSet waiting_on;  ///< the peers that the call waits for
  int suspect = -1;    ///< one of them, the furthest behind; -1: none
  std::string text;    ///< "rank 2 to send, rank 3 to receive", or "no rank"
};

/// A query, or the reply to one.
struct WaitMessage {
  enum Kind : std::uint32_t { query, reply } kind;
  RankSet waits_for;  ///< reply only
};

/// Queries and replies received by one rank. Not thread-safe.
class WaitForGraph {
 public:
  explicit WaitForGraph(int rank) : rank_(rank) {}

  /// Records a message from `peer`.
  void receive(int peer, const WaitMessage&);
  /// Whether there are queries without a reply.
  bool has_requests() const { return !requesters_.empty(); }
  /// Removes and returns the peers whose queries have no reply yet.
  std::vector<int> drain_requesters();

  void clear_replies() { replies_.clear(); }
  /// True if the peer has sent no reply since clear_replies(): it is stuck, stopped, or makes no call.
  bool unresponsive(int peer) const { return !replies_.contains(peer); }
  /// The rank that blocks this one. Searches breadth-first along the replies, from `suspect` and then from
  /// `waits_for`, the ranks for which this rank waits. Returns the nearest rank without a reply, else the
  /// nearest that waits for no rank, else -1 (all wait for each other).
  int culprit(int suspect, const RankSet& waits_for) const;

 private:
  const int rank_;
  std::vector<int> requesters_;
  std::map<int, RankSet> replies_;
};

}  // namespace rz
