#include "comm/transport/mismatched_calls.h"

#include <algorithm>

#include "comm/core/error.h"

namespace rz {

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
