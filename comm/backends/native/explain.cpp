// The algorithm of a call and the reason, for Communicator::explain().

#include "comm/backends/native/dispatcher.h"
#include "comm/core/error.h"

namespace rz {

namespace {

// An explanation cannot include run-time state: whether CMA is permitted on all ranks, and the last samples.
constexpr const char* adaptive_words =
    "; single_copy instead while all ranks may read each other's memory and that takes less time";

/// How the intra-node engine runs a message of `bytes`, of the whole buffer. `reachable`: all ranks have
/// mapped its buffers.
AlgorithmChoice explain_intranode(Collective kind, std::size_t bytes, int size,
                                  const tuning::IntranodeAlgorithm& entry,
                                  const intranode::StagingLimits& limits, bool reachable) {
  using namespace intranode;
  if (reachable && entry.try_zero_copy) return {"zero_copy", "shm", zero_copy_chunk, entry.zero_copy_reason};
  if (entry.single_copy == tuning::SingleCopyPolicy::always)
    return {"single_copy", "shm", single_copy_chunk, entry.single_copy_reason};
  const std::size_t bytes_per_rank = bytes / (message_bytes(kind, 1, size));
  const CallPlan plan = plan_call(kind, bytes_per_rank, size, entry, limits);
  const char* const algorithm = plan.protocol == Protocol::two_shot ? "two_shot"
                                : kind == Collective::all_reduce    ? "one_shot"
                                                                    : "staged";
  const std::size_t chunk =
      plan.inline_slots ? 0
                        : std::min(plan.chunking.chunk_bytes, std::max(plan.shard_bytes, cache_line_bytes));
  const std::string why =
      entry.single_copy == tuning::SingleCopyPolicy::adaptive ? entry.reason + adaptive_words : entry.reason;
  return {algorithm, "shm", kind == Collective::all_to_all_v ? 0 : chunk, why};
}

}  // namespace

AlgorithmChoice Dispatcher::explain(Collective kind, std::size_t bytes, bool reachable, DType dtype,
                                    ReduceOp op) const {
  const std::string transport = transport_->describe();
  if (traits(kind).point_to_point) return {"message", transport, 0, "messages take no algorithm"};
  if (kind == Collective::barrier || kind == Collective::all_to_all_v) bytes = 0;  // as in the tables
  const bool rounds = rounds_partial_sums(dtype, op);
  if (!intranode_) {
    const tuning::SelectedAlgorithm s = schedules_.schedule_for(kind, bytes, rounds);
    return {s.algorithm->name, transport, s.slice ? s.slice : schedule::default_slice_bytes,
            schedules_.reason(kind, s)};
  }
  const tuning::IntranodeAlgorithm& entry = intranode_->table().find(kind, bytes);
  if (entry.schedule && schedules_.is_allowed(*entry.schedule, kind, rounds))
    return {concat("schedule:", entry.schedule->name), transport,
            entry.slice ? entry.slice : schedule::default_slice_bytes, entry.reason};
  AlgorithmChoice choice = explain_intranode(kind, bytes, size_, entry, intranode_->limits(), reachable);
  if (entry.schedule)
    choice.reason += concat("; not ", entry.schedule->name, ", which rounds ", name(dtype), " on the way");
  return choice;
}

}  // namespace rz
