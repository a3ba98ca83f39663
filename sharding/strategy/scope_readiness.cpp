#include "sharding/strategy/scope_readiness.h"

#include <algorithm>

#include "comm/core/error.h"

namespace rz {

ScopeReadiness::ScopeReadiness(FlatParameters& flat, const ModelParameters& parameters,
                               const FlatLayout& layout)
    : flat_(flat),
      parameters_(parameters),
      layout_(layout),
      progress_(parameters.members().size()),
      queued_(static_cast<std::size_t>(flat.size())),
      first_(static_cast<std::size_t>(flat.size())) {}

void ScopeReadiness::begin_pass() {
  std::ranges::fill(progress_, Progress::untouched);
  std::ranges::fill(queued_, 0);
}

void ScopeReadiness::begin_forward() {
  std::ranges::fill(first_, nullptr);
  ran_backward_ = false;
}

void ScopeReadiness::enter(const Scope& scope, Pass pass) {
  if (pass == Pass::backward) {
    ++backward_depth_;
    ran_backward_ = true;
    return;
  }
  if (backward_depth_ > 0) return;
  if (ran_backward_) begin_forward();
  for (const int u : flat_.of(scope))
    if (const Scope*& first = first_[static_cast<std::size_t>(u)]; !first) first = &scope;
}

void ScopeReadiness::touch(int member) {
  require(!queued_[static_cast<std::size_t>(layout_.place(member).bucket)], Errc::unsupported,
          "zero3: a gradient for ", parameters_.member(member).name,
          " was computed after backward of the first of the scopes that list it; list it in every scope that "
          "uses it");
  progress_[static_cast<std::size_t>(member)] = Progress::touched;
}

void ScopeReadiness::ready(int member) { progress_[static_cast<std::size_t>(member)] = Progress::ready; }

/// Members that backward has not touched by now will not be touched: no scope that uses them is left. A scope
/// that runs several times leaves several times; its flat parameters are complete at the last.
bool ScopeReadiness::is_complete(const std::vector<int>& members) const {
  return std::ranges::none_of(
      members, [&](int m) { return progress_[static_cast<std::size_t>(m)] == Progress::touched; });
}

void ScopeReadiness::leave(const Scope& scope, BucketScheduler* scheduler, const Stream& stream) {
  if (backward_depth_ > 0) --backward_depth_;
  if (!scheduler) return;
  for (const int u : flat_.of(scope)) {
    if (!flat_[u].trainable || first_[static_cast<std::size_t>(u)] != &scope) continue;
    const std::vector<int>& members = layout_.bucket(u).members;
    char& queued = queued_[static_cast<std::size_t>(u)];
    if (queued || !is_complete(members)) continue;
    queued = 1;
    for (const int m : members) scheduler->ready(m, stream);
  }
}

}  // namespace rz
