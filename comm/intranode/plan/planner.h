#pragma once
/// Makes the plans of calls, for one rank of a node. Thread safe, as it is immutable.

#include <utility>

#include "comm/intranode/plan/planned_call.h"

namespace rz::intranode {

/// True if both calls have the same plan: they differ in their addresses at most. Compared for every small
/// call.
inline bool same_plan(const CollectiveCall& a, const CollectiveCall& b) {
  return a.kind == b.kind && a.in.count == b.in.count && a.out.count == b.out.count &&
         a.in.dtype == b.in.dtype && a.out.dtype == b.out.dtype && a.op.kind == b.op.kind && a.root == b.root;
}

class CallPlanner {
 public:
  CallPlanner(tuning::IntranodeTable table, int rank, int size, std::size_t ring_bytes, bool oversubscribed)
      : table_(std::move(table)),
        rank_(rank),
        size_(size),
        ring_bytes_(ring_bytes),
        limits_(staging_limits(ring_bytes, oversubscribed)) {}

  /// The plan of a call, without its counts.
  PlannedCall plan(const CollectiveCall&) const;
  /// Divides an all_to_all_v whose largest shard has that many elements.
  void divide(PlannedCall&, std::size_t max_count) const;
  /// The part of the staging ring that the call uses.
  std::size_t window(const PlannedCall& c) const {
    return staging_window(c.plan, c.ranks().kind, size_, limits_, ring_bytes_);
  }
  /// The tuning entry whose schedule serves the call, by the executor; null: this engine serves it.
  const tuning::IntranodeAlgorithm* schedule_for(const CollectiveCall& op) const {
    return table_.has_schedule(op.kind) ? find_schedule(op) : nullptr;
  }

  const tuning::IntranodeTable& table() const { return table_; }
  const StagingLimits& limits() const { return limits_; }
  int size() const { return size_; }

 private:
  const tuning::IntranodeAlgorithm* find_schedule(const CollectiveCall&) const;

  const tuning::IntranodeTable table_;
  const int rank_, size_;
  const std::size_t ring_bytes_;
  const StagingLimits limits_;
};

}  // namespace rz::intranode
