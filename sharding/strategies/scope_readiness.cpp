#include "sharding/strategies/scope_readiness.h"

#include <algorithm>

#include "comm/core/error.h"

namespace rz {

ScopeReadiness::ScopeReadiness(FlatParameters& flat, const ModelParameters& parameters,
                               const FlatLayout& layout)
    : flat_(flat),
      parameters_(parameters),
      layout_(layout),
      progress_(parameters.members().size()),
      queued_(static_cast<std::size_t>(flat.size())) {}

void ScopeReadiness::begin_pass() {
  std::ranges::fill(progress_, Progress::untouched);
  std::ranges::fill(queued_, 0);
}

void ScopeReadiness::touch(int member) {
  require(
      !queued_[static_cast<std::size_t>(layout_.place(member).bucket)], Errc::unsupported,
      "zero3: a gradient for ", parameters_.member(member).name,
      " was computed after backward of the first scope that lists it; list it in every scope that uses it");
  progress_[static_cast<std::size_t>(member)] = Progress::touched;
}

void ScopeReadiness::ready(int member) { progress_[static_cast<std::size_t>(member)] = Progress::ready; }

/// Members that backward has not touched by now will not be touched: no scope that uses them is left. A scope
/// that runs several times leaves several times; its flat parameters are complete at the last.
bool ScopeReadiness::is_complete(const std::vector<int>& members) const {
  return std::ranges::none_of(
      members, [&](int m) { return progress_[static_cast<std::size_t>(m)] == Progress::touched; });
}

void ScopeReadiness::leave(const Scope& scope, BucketScheduler& scheduler, const Stream& stream) {
  const std::ptrdiff_t position = flat_.position(scope);
  if (position == FlatParameters::unknown) return;
  for (const int u : flat_.of(scope)) {
    const bool is_first = flat_[u].first_scope == static_cast<std::size_t>(position);
    if (!flat_[u].trainable || !is_first) continue;
    const std::vector<int>& members = layout_.bucket(u).members;
    char& queued = queued_[static_cast<std::size_t>(u)];
    if (queued || !is_complete(members)) continue;
    queued = 1;
    for (const int m : members) scheduler.ready(m, stream);
  }
}

}  // namespace rz
