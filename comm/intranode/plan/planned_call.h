#pragma once
/// A call with its plan, as the protocols see it. A plain value.

#include "comm/collective.h"
#include "comm/intranode/plan/call_layout.h"
#include "comm/intranode/plan/call_plan.h"
#include "comm/intranode/plan/output_stores.h"

namespace rz::intranode {

struct PlannedCall {
  const CollectiveCall* op = nullptr;
  CallLayout layout;
  CallPlan plan;      ///< staged
  CallPlan in_place;  ///< zero_copy
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

}  // namespace rz::intranode
