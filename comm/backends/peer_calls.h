#pragma once
/// Turns an operation into what a kernel is told (peer_call.h): pure functions.

#include "comm/backends/peer_group.h"
#include "comm/collective.h"
#include "comm/select_peer.h"

namespace rz {

/// Where peers can read an operation's memory: what letters call it (peer_call.h). 0: nowhere.
struct PeerReach {
  std::uint64_t in = 0, out = 0;
};

PeerChoice choose(const Operation&, const peer::Seat&, const std::string& forced);
peer::FoldCall fold_call(const Operation&, const peer::Seat&, const PeerChoice&, PeerReach);
peer::MoveCall move_call(const Operation&, const peer::Seat&, const PeerChoice&, PeerReach);

/// The signature of a call, and in words, e.g. "all_reduce (sum) of 12 f32".
std::uint64_t signature(const Operation&);
std::string in_words(std::uint64_t what, std::uint64_t count);

}  // namespace rz
