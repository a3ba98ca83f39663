#include "sharding/model/gather_plan.h"

#include <algorithm>
#include <utility>

namespace rz {

// ---- the order of scopes

namespace {

constexpr std::uint64_t min_context = 2, max_context = 16;  // equal visits that make a course

/// Equal on all ranks, unlike addresses.
std::uint64_t mixed(std::uint64_t hash, const ScopeTrace::Visit& visit) {
  constexpr std::uint64_t prime = 0x100000001b3u;
  for (const char c : visit.scope->name) hash = (hash ^ static_cast<unsigned char>(c)) * prime;
  return (hash ^ (visit.pass == Pass::forward ? 1 : 2)) * prime;
}

}  // namespace

ScopeTrace::ScopeTrace(std::span<const Scope* const> expected)
    : first_pass_(expected.begin(), expected.end()),
      ring_(std::max<std::size_t>(4096, 16 * 2 * expected.size())) {
  restart();
}

void ScopeTrace::restart() {
  count_ = 0;
  course_ = unknown;
  released_ = true;
  for (const Scope* scope : first_pass_) enter(*scope, Pass::forward);
  for (std::size_t i = first_pass_.size(); i-- > 0;) enter(*first_pass_[i], Pass::backward);
  expected_ = count_;
  course_ = unknown;
  hash_ = 0xcbf29ce484222325u;
  released_ = true;
}

void ScopeTrace::enter(const Scope& scope, Pass pass) {
  const Visit visit{&scope, pass, released_};
  released_ = false;
  const bool expected = course_ != unknown && course_ + 1 >= oldest() && at(course_ + 1) == visit;
  ring_[static_cast<std::size_t>(count_++ % ring_.size())] = visit;
  hash_ = mixed(hash_, visit);
  if (!expected)
    find_course();
  else if (++course_ < oldest())
    course_ = unknown;
}

/// Visits before and at `i` that equal the last ones; the maximum if they reach back to a release.
std::uint64_t ScopeTrace::equal_visits(std::uint64_t i) const {
  std::uint64_t n = 0;
  while (n < max_context && i >= oldest() + n && at(i - n) == at(count_ - 1 - n))
    n = at(i - n).after_release ? max_context : n + 1;
  return n;
}

/// The most recent of the earlier visits with the longest equal course before them. A single equal visit is
/// no evidence: the next scopes are then gathered on demand.
void ScopeTrace::find_course() {
  course_ = unknown;
  std::uint64_t longest = min_context - 1;
  for (std::uint64_t i = count_ - 1; i-- > oldest() && longest < max_context;)
    if (const std::uint64_t n = equal_visits(i); n > longest) {
      longest = n;
      course_ = i;
    }
}

std::vector<ScopeTrace::Visit> ScopeTrace::last(std::uint64_t n) const {
  std::vector<Visit> out;
  for (std::uint64_t i = std::max(oldest(), count_ - std::min(n, visits())); i < count_; ++i)
    out.push_back(at(i));
  return out;
}

// ---- the decision

GatherPlan::GatherPlan(FlatParameters& flat, const GatherLimits& limits, ScopeTrace& trace)
    : flat_(flat), limits_(limits), trace_(trace), values_(static_cast<std::size_t>(flat.size())) {
  planned_.reserve(values_.size());
  restart();
}

void GatherPlan::restart() {
  trace_.restart();
  for (int u = 0; u < flat_.size(); ++u) at(u) = {.gathered = flat_[u].persistent};
  plans_ = 0;
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
