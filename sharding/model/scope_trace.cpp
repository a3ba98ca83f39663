#include "sharding/model/scope_trace.h"

#include <algorithm>

namespace rz {

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
    : ring_(std::max<std::size_t>(4096, 16 * 2 * expected.size())) {
  for (const Scope* scope : expected) enter(*scope, Pass::forward);
  for (std::size_t i = expected.size(); i-- > 0;) enter(*expected[i], Pass::backward);
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

}  // namespace rz
