#pragma once
/// Election of the group's first failure among the ranks of a node, in the headers of their shared memory.

#include <optional>
#include <vector>

#include "comm/transport/failure.h"
#include "comm/transport/shm_layout.h"

namespace rz {

/// Thread-safe once it is constructed.
class FailureElection {
 public:
  FailureElection() = default;
  /// `headers`: of each rank; null for those of other nodes. The lowest rank of the node is the leader.
  FailureElection(int rank, std::vector<shm::Header*> headers);

  /// Empty if there is no failure.
  std::optional<Failure> elected() const {
    const std::uint32_t word = leader_ ? leader_->elected_rank.load(std::memory_order_acquire) : 0;
    return word ? std::optional(record_of(word - 1)) : std::nullopt;
  }
  /// Proposes a failure as the first and returns the elected one; of later calls only Failure::calls counts.
  /// Without peers it returns the proposed one. One thread at a time.
  Failure elect(const Failure&);
  /// The fewest Failure::calls of all ranks' failures that are Errc::cancelled; empty if none is.
  std::optional<std::uint32_t> cancelled_after() const;

 private:
  Failure record_of(std::size_t rank) const;

  int rank_ = 0;
  std::vector<shm::Header*> headers_;
  shm::Header* leader_ = nullptr;
  bool proposed_ = false;
};

}  // namespace rz
