#pragma once
/// Wait-for graph of a group. Ranks exchange it once one of them has waited long. At a deadline it identifies
/// the rank that blocks the others as the culprit, instead of a live rank that also waits for it.

#include <bitset>
#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "comm/transport/call_signature.h"

namespace rz {

/// A set of ranks that fits into a control frame. Waits for ranks beyond its size are not recorded.
using RankSet = std::bitset<3776>;

/// What one call waits for.
struct WaitState {
  RankSet waiting_on;  ///< the peers that the call waits for
  int suspect = -1;    ///< one of them, the furthest behind; -1: none
  std::string text;    ///< "rank 2 to send, rank 3 to receive", or "no rank"
};

/// A query, or a reply to one: of a rank that is in a call, or of one that is in no call of the group.
struct WaitMessage {
  enum Kind : std::uint32_t { query, reply, idle } kind;
  RankSet waits_for{};   ///< reply: the ranks; idle: the bytes of text()
  CallSignature call{};  ///< reply: of the call

  static WaitMessage idle_in(std::string_view text);
  /// Of an idle rank: the waits of its process in other groups, or nothing.
  std::string text() const;
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
  /// True if the peer has not replied since clear_replies() that it is in a call: it is stuck, stopped, or
  /// makes no call.
  bool unresponsive(int peer) const {
    const WaitMessage* const state = state_of(peer);
    return !state || state->kind == WaitMessage::idle;
  }
  /// What the peer has replied since clear_replies(); null if nothing.
  const WaitMessage* state_of(int peer) const {
    const auto found = replies_.find(peer);
    return found == replies_.end() ? nullptr : &found->second;
  }
  /// The rank that blocks this one. Searches breadth-first along the replies, from `suspect` and then from
  /// `waits_for`, the ranks for which this rank waits. Returns the nearest rank without a reply, else the
  /// nearest that waits for no rank, else -1 (all wait for each other).
  int culprit(int suspect, const RankSet& waits_for) const;

 private:
  const int rank_;
  std::vector<int> requesters_;
  std::map<int, WaitMessage> replies_;
};

}  // namespace rz
