#include "comm/transport/failure_election.h"

#include <algorithm>
#include <cstring>
#include <utility>

namespace rz {

FailureElection::FailureElection(int rank, std::vector<shm::Header*> headers)
    : rank_(rank), headers_(std::move(headers)) {
  leader_ = *std::find_if(headers_.begin(), headers_.end(), [](const shm::Header* h) { return h; });
}

Failure FailureElection::record_of(std::size_t rank) const {
  const shm::Header& h = *headers_[rank];
  return {h.culprit, static_cast<Errc>(h.code), std::string(h.reason, strnlen(h.reason, sizeof h.reason)),
          h.cancelled_after.load(std::memory_order_acquire)};
}

/// Each rank writes its own record and then competes for the leader's word with one compare-and-swap. So a
/// rank that dies while it writes its record does not block the others.
Failure FailureElection::elect(const Failure& failure) {
  if (!leader_) return failure;
  shm::Header& own = *headers_[static_cast<std::size_t>(rank_)];
  if (failure.code == Errc::cancelled)
    own.cancelled_after = std::min(own.cancelled_after.load(), failure.calls);
  if (std::exchange(proposed_, true)) return *elected();
  own.culprit = failure.culprit;
  own.code = static_cast<std::uint32_t>(failure.code);
  const std::size_t n = failure.reason.copy(own.reason, sizeof own.reason - 1);
  own.reason[n] = 0;
  std::uint32_t none = 0;
  leader_->elected_rank.compare_exchange_strong(none, static_cast<std::uint32_t>(rank_) + 1);
  return *elected();
}

std::optional<std::uint32_t> FailureElection::cancelled_after() const {
  std::uint32_t fewest = shm::not_cancelled;
  for (const shm::Header* h : headers_)
    if (h) fewest = std::min(fewest, h->cancelled_after.load(std::memory_order_acquire));
  return fewest == shm::not_cancelled ? std::nullopt : std::optional(fewest);
}

}  // namespace rz
