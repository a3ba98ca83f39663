#pragma once
/// Wait-for graph of a group. Ranks exchange it once one of them has waited long. At a deadline it identifies
/// the rank that blocks the others as the culprit, instead of a live rank that also waits for it. Queries
/// also return calls, so that ranks can compare calls that sent each other nothing.

#include <array>
#include <bitset>
#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "comm/transport/call_signature.h"

namespace rz {

/// A set of ranks that fits into a control frame. Waits for ranks beyond its size are not recorded.
using RankSet = std::bitset<3520>;

/// What one call waits for.
struct WaitState {
  RankSet waiting_on;  ///< the peers that the call waits for
  int suspect = -1;    ///< one of them, the furthest behind; -1: none
  std::string text;    ///< "rank 2 to send, rank 3 to receive", or "no rank"
};

/// A query, or a reply to one: of a rank that is in a call, or of one that is in no call of the group, or
/// only in calls of groups that are split from it and share its failures.
struct WaitMessage {
  enum Kind : std::uint32_t { query, reply, idle, elsewhere } kind;
  RankSet waits_for{};       ///< reply, elsewhere: the ranks; idle: the bytes of text()
  CallSignature call{};      ///< reply: of the call; idle: number and kind of the last, or no_call
  std::uint32_t number = 0;  ///< query: of the collective that the reply is to return
  std::optional<CallSignature> numbered{};  ///< in replies: this rank's collective of that number, if known

  static constexpr std::uint32_t no_call = 0xffffffff;  ///< a sequence
  static WaitMessage idle_in(std::string_view text);
  /// An idle rank has the waits of its process in other groups, or nothing.
  std::string text() const;
};

/// Queries and replies received by one rank, and this rank's last collectives. Not thread-safe.
class WaitForGraph {
 public:
  explicit WaitForGraph(int rank) : rank_(rank) {}

  /// Records a message from `peer`.
  void receive(int peer, const WaitMessage&);
  /// Whether there are queries without a reply.
  bool has_requests() const { return !queries_.empty(); }
  /// Removes the queries. Returns the reply to each: this one, with the collective of the query's number.
  std::vector<std::pair<int, WaitMessage>> drain_replies(const WaitMessage& reply);

  /// This rank begins the collective.
  void record(const CallSignature& call) { last_ = call, calls_[call.sequence % calls_.size()] = call; }
  /// The collective that began last; requires one.
  const CallSignature& last_call() const { return last_; }
  /// This rank's collective of that number; empty if it has not begun, or was not recorded, or is long ago.
  std::optional<CallSignature> call(std::uint32_t number) const;

  void clear_replies() { replies_.clear(); }
  /// True if the peer has not replied since clear_replies() that it is in a call: it is stuck or stopped, or
  /// it has replied that it is in none.
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
  std::vector<std::pair<int, std::uint32_t>> queries_;  // peer, number
  std::map<int, WaitMessage> replies_;
  std::array<std::optional<CallSignature>, 64> calls_;  // the last ones, by number
  CallSignature last_;
};

}  // namespace rz
