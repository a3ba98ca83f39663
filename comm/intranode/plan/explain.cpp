#include "comm/intranode/plan/explain.h"

#include "comm/transport/mailbox.h"

namespace rz::intranode {

namespace {

// An explanation cannot include run-time state: whether CMA is permitted on all ranks, and the last samples.
constexpr const char* adaptive_words =
    "; single_copy instead while all ranks may read each other's memory and that takes less time";

}  // namespace

AlgorithmChoice explain_intranode(Collective kind, std::size_t bytes, int size,
                                  const tuning::IntranodeAlgorithm& entry, const StagingLimits& limits,
                                  bool reachable) {
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

}  // namespace rz::intranode
