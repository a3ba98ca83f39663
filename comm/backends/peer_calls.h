#pragma once
/// Turns an operation into what a kernel is told (peer_call.h): pure functions.

#include "comm/backends/peer_group.h"
#include "comm/collective.h"
#include "comm/select_peer.h"

namespace rz {

/// What a rank may do with an operation's memory.
struct PeerReach {
  bool in = false, out = false;  ///< peers can read it where it lies
};

PeerChoice choose(const Operation&, const peer::Seat&, const std::string& forced);
peer::FoldCall fold_call(const Operation&, const peer::Seat&, const PeerChoice&, PeerReach);
peer::MoveCall move_call(const Operation&, const peer::Seat&, const PeerChoice&, PeerReach);

/// The signature of a call, and in words, e.g. "all_reduce (sum) of 12 f32".
std::uint64_t signature(const Operation&);
std::string in_words(std::uint64_t what, std::uint64_t count);

}  // namespace rz
