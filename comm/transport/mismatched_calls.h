#pragma once
/// The error of ranks that made different calls, and which of them deviates.

#include <optional>
#include <span>
#include <vector>

#include "comm/core/error.h"
#include "comm/transport/call_signature.h"

namespace rz {

/// Errc::mismatch: data of rank `peer` belongs to another call than the one that this rank is in.
struct OtherCall : Error {
  OtherCall(const std::string& text, int from, const CallSignature& call)
      : Error(Errc::mismatch, text), peer(from), theirs(call) {}
  int peer;
  CallSignature theirs;
};

/// The calls with the same number of all ranks of a group; empty where a rank's is not known.
using CallsOfRanks = std::vector<std::optional<CallSignature>>;

/// The first rank whose call is that of more than half of the ranks; -1 if there is none.
int rank_of_majority(const CallsOfRanks&);
/// The first rank whose call is known and differs from this one; -1 if there is none.
int rank_that_differs(const CallsOfRanks&, const CallSignature&);
/// Throws Errc::mismatch with two calls that differ. If there is a majority, the culprit is the first rank
/// that differs from it, the same on every rank; otherwise there is none, and one of the calls is that of
/// rank `own`. Requires that the call of `own` is known and differs from another one, or that there is a
/// majority from which one differs.
[[noreturn]] void fail_mismatched(const CallsOfRanks&, int own);

}  // namespace rz
