#include "comm/tuning/group_size.h"

#include <algorithm>

namespace rz::tuning {

namespace {

bool is_measured(const Rule& r) { return r.min_ranks == r.max_ranks; }

/// The number of ranks whose rules serve `size` too; 0: none, or the table has rules for `size`.
int nearest_size(const std::vector<Rule>& rules, Collective c, Scope scope, int size) {
  int larger = any_size, smaller = 0;
  for (const Rule& r : rules) {
    if (r.collective != c || r.scope != scope) continue;
    if (r.min_ranks <= size && size <= r.max_ranks) return 0;
    if (!is_measured(r)) continue;
    if (r.max_ranks > size) larger = std::min(larger, r.max_ranks);
    if (r.max_ranks < size) smaller = std::max(smaller, r.max_ranks);
  }
  if (larger != any_size) return larger;
  // Among two ranks the algorithms differ less than among more.
  return smaller > 2 && size <= 2 * smaller ? smaller : 0;
}

}  // namespace

std::vector<Rule> rules_for(const Table& tuning, int size) {
  std::vector<Rule> rules = tuning.rules;
  for (const Rule& r : tuning.rules) {
    if (!is_measured(r) || nearest_size(tuning.rules, r.collective, r.scope, size) != r.max_ranks) continue;
    Rule copy = r;
    copy.min_ranks = copy.max_ranks = size;
    copy.source = Source::other_size;
    rules.push_back(copy);
  }
  return rules;
}

}  // namespace rz::tuning
