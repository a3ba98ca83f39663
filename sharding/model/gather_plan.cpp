#include "sharding/model/gather_plan.h"

#include <algorithm>
#include <utility>

namespace rz {

GatherPlan::GatherPlan(FlatParameters& flat, const GatherLimits& limits, ScopeTrace& trace)
    : flat_(flat), limits_(limits), trace_(trace), values_(static_cast<std::size_t>(flat.size())) {
  planned_.reserve(values_.size());
  for (int u = 0; u < flat.size(); ++u) at(u).gathered = flat[u].persistent;
}

/// Selects flat parameters in the order of their next use, so that the limits drop those that are used last.
void GatherPlan::plan() {
  ++plans_;
  planned_.clear();
  Budget budget;
  for (int u = 0; u < flat_.size(); ++u)
    if (at(u).active_scopes > 0 && !flat_[u].persistent) budget.live += flat_[u].count;
  trace_.for_each_ahead([&](const ScopeTrace::Visit& visit) {
    for (const int u : flat_.of(*visit.scope))
      if (!flat_[u].persistent && !plan_use(u, budget)) return false;
    return budget.ahead < limits_.prefetch_bucket_size || budget.distance < limits_.max_reuse_distance;
  });
}

/// False if a limit ends the plan.
bool GatherPlan::plan_use(int index, Budget& budget) {
  Value& u = at(index);
  const std::size_t count = flat_[index].count;
  const bool prefetches = budget.ahead < limits_.prefetch_bucket_size;
  const bool keeps = budget.distance < limits_.max_reuse_distance && u.gathered;
  budget.distance += count;
  if (std::exchange(u.seen, plans_) == plans_ || !(prefetches || keeps)) return true;
  if (u.active_scopes == 0) {
    if (count > limits_.max_live_parameters - std::min(budget.live, limits_.max_live_parameters))
      return false;
    budget.live += count;
    planned_.push_back(index);
    u.wanted = plans_;
  }
  budget.ahead += prefetches ? count : 0;
  return true;
}

void GatherPlan::drop_unplanned() {
  steps_.drop.clear(), steps_.gather.clear();
  for (int u = 0; u < flat_.size(); ++u) {
    if (at(u).active_scopes != 0 || !at(u).gathered || at(u).wanted == plans_ || flat_[u].persistent)
      continue;
    at(u).gathered = false;
    steps_.drop.push_back(u);
  }
}

void GatherPlan::gather(int u) {
  if (!std::exchange(at(u).gathered, true)) steps_.gather.push_back(u);
}

const GatherPlan::Steps& GatherPlan::enter(const ScopeUse& use) {
  trace_.enter(use.scope, use.pass);
  for (const int u : use.flat) ++at(u).active_scopes;
  plan();
  drop_unplanned();
  for (const int u : use.flat) gather(u);
  for (const int u : planned_) gather(u);
  return steps_;
}

const GatherPlan::Steps& GatherPlan::leave(const ScopeUse& use) {
  for (const int u : use.flat) --at(u).active_scopes;
  plan();
  drop_unplanned();
  return steps_;
}

const GatherPlan::Steps& GatherPlan::release() {
  trace_.release();
  for (Value& u : values_) u.active_scopes = 0;
  ++plans_;
  drop_unplanned();
  return steps_;
}

const GatherPlan::Steps& GatherPlan::need(int u) {
  at(u).wanted = ++plans_;
  drop_unplanned();
  gather(u);
  return steps_;
}

}  // namespace rz
