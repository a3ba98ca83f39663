#pragma once
/// A call with its plan, as the protocols see it, and what makes it.

#include <cstddef>
#include <span>
#include <utility>

#include "comm/collective.h"
#include "comm/intranode/plan/call_plan.h"
#include "comm/reduce/reduce.h"

namespace rz::intranode {

/// How a call stores its results: by which kernel, and past the caches or not. A plain value.
struct OutputStores {
  static constexpr std::size_t block_bytes = 8 << 10;  ///< fits L1: several passes over the same bytes

  /// Reduces the operands into `to`, and into `too` unless that is null, through the caches.
  void reduce_block(void* to, void* too, std::span<const void* const> operands, std::size_t bytes) const {
    if (bytes) kernel(to, too, operands, bytes / element_bytes, mean);
  }
  /// Reduces the operands into `to`, and into `too`, from where peers read it, unless that is null. Advances
  /// the operands if stores are non-temporal.
  void reduce(std::byte* to, std::byte* too, std::span<const void*> operands, std::size_t bytes) const;
  /// Copies `bytes`, which may be 0, unless both are the same memory.
  void copy(std::byte* to, const std::byte* from, std::size_t bytes) const;

  ReduceKernel kernel = nullptr;  ///< of collectives that reduce
  std::size_t element_bytes = 1;
  AverageStep mean;
  bool nontemporal = false;  ///< results are stored past the caches
};

/// A call with its plan. A plain value.
struct PlannedCall {
  const CollectiveCall* op = nullptr;
  CallLayout layout;
  CallPlan plan;             ///< staged
  Reservation contribution;  ///< of this rank, in each round of `plan`
  CallPlan in_place;         ///< zero_copy
  OutputStores stores;
  const tuning::IntranodeAlgorithm* algorithm = nullptr;  ///< tuning entry of the plan
  tuning::SingleCopyPolicy single_copy = tuning::SingleCopyPolicy::never;

  bool defers_ack = false;      ///< may_defer_ack()
  bool exceeds_caches = false;  ///< all ranks' buffers do

  /// Begins a call with the same plan.
  void bind(const CollectiveCall& call) {
    op = &call;
    layout.counts = call.counts;
    const bool reads_output = traits(call.kind).reduces && call.in.data == call.out.data;  // so it is cached
    stores.nontemporal = exceeds_caches && !reads_output;
  }
  const CallRanks& ranks() const { return layout.ranks; }
  const std::byte* in() const { return static_cast<const std::byte*>(op->in.data); }
  std::byte* out() const { return static_cast<std::byte*>(op->out.data); }
  bool inlined() const { return plan.inline_slots > 0; }
  bool may_exchange_handles() const {
    return algorithm->try_zero_copy || single_copy != tuning::SingleCopyPolicy::never;
  }
};

/// True if both calls have the same plan: they differ in their addresses at most. Compared for every small
/// call.
inline bool same_plan(const CollectiveCall& a, const CollectiveCall& b) {
  return a.kind == b.kind && a.in.count == b.in.count && a.out.count == b.out.count &&
         a.in.dtype == b.in.dtype && a.out.dtype == b.out.dtype && a.op.kind == b.op.kind && a.root == b.root;
}

/// Makes the plans of calls, for one rank of a node. Thread safe, as it is immutable.
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
