#include "comm/transport/call_signature.h"

#include <algorithm>

namespace rz {

CallSignature make_signature(const CollectiveCall& op, int size, std::uint32_t sequence,
                             std::uint32_t algorithm) {
  return {.sequence = sequence,
          .root = op.root,
          .count = count_per_rank(op, size),
          .kind = op.kind,
          .dtype = op.dtype(),
          .op = op.op.kind,
          .algorithm = algorithm};
}

std::string describe(const CallSignature& s) {
  const CollectiveTraits& t = traits(s.kind);
  return concat(name(s.kind), " #", s.sequence, " (", s.count, " ", name(s.dtype),
                t.reduces ? concat(", ", name(ReduceOp(s.op))) : "",
                t.rooted() ? concat(", root ", s.root) : "",
                s.algorithm ? concat(", algorithm ", s.algorithm) : "", ")");
}

int rank_of_majority(const CallsOfRanks& calls) {
  for (const auto& call : calls)
    if (call && 2 * std::ranges::count(calls, call) > std::ssize(calls))
      return static_cast<int>(std::ranges::find(calls, call) - calls.begin());
  return -1;
}

int rank_that_differs(const CallsOfRanks& calls, const CallSignature& call) {
  const auto found = std::ranges::find_if(calls, [&](const auto& c) { return c && *c != call; });
  return found == calls.end() ? -1 : static_cast<int>(found - calls.begin());
}

void fail_mismatched(const CallsOfRanks& calls, int own) {
  const int majority = rank_of_majority(calls), other = majority < 0 ? own : majority;
  const auto call_of = [&](int rank) { return *calls[static_cast<std::size_t>(rank)]; };
  const int deviating = rank_that_differs(calls, call_of(other));
  throw Error(Errc::mismatch,
              concat("mismatched collectives: rank ", deviating, " called ", describe(call_of(deviating)),
                     " while rank ", other, " called ", describe(call_of(other)),
                     "; every rank must make the same calls in the same order"),
              majority < 0 ? -1 : deviating);
}

}  // namespace rz
