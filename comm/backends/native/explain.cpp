#include "comm/backends/native/explain.h"

#include "comm/core/error.h"
#include "comm/intranode/plan/explain.h"

namespace rz {

namespace {

AlgorithmChoice explain_on_one_node(const ExplainQuery& call, const ScheduleEngine& schedules,
                                    const intranode::Engine& intranode) {
  const tuning::IntranodeAlgorithm& entry = intranode.table().find(call.kind, call.bytes);
  AlgorithmChoice choice = intranode::explain_intranode(call.kind, call.bytes, call.size, entry,
                                                        intranode.limits(), call.reachable);
  if (!entry.schedule) return choice;
  if (!schedules.is_allowed(*entry.schedule, call.kind, rounds_partial_sums(call.dtype, call.op))) {
    choice.reason +=
        concat("; not ", entry.schedule->name, ", which rounds ", name(call.dtype), " on the way");
    return choice;
  }
  return {concat("schedule:", entry.schedule->name), call.transport,
          entry.slice ? entry.slice : schedule::default_slice_bytes, entry.reason};
}

}  // namespace

AlgorithmChoice explain_call(const ExplainQuery& query, const ScheduleEngine& schedules,
                             const intranode::Engine* intranode) {
  if (traits(query.kind).point_to_point) return {"message", query.transport, 0, "messages take no algorithm"};
  ExplainQuery call = query;
  if (call.kind == Collective::barrier || call.kind == Collective::all_to_all_v)
    call.bytes = 0;  // as in the tables
  if (intranode) return explain_on_one_node(call, schedules, *intranode);
  const tuning::SelectedAlgorithm s =
      schedules.schedule_for(call.kind, call.bytes, rounds_partial_sums(call.dtype, call.op));
  return {s.algorithm->name, call.transport, s.slice ? s.slice : schedule::default_slice_bytes,
          schedules.reason(call.kind, s)};
}

}  // namespace rz
