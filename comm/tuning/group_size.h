#pragma once
/// Rules for group sizes that a tuning table does not have.

#include <vector>

#include "comm/tuning/tuning.h"

namespace rz::tuning {

/// The table's rules, followed by copies of its rules for another number of ranks (`ranks=N`), for each
/// collective and scope that has none for `size`: those of the next larger N, else those of the next smaller
/// N, if 2 < N and size <= 2 N (docs/decisions/0017).
std::vector<Rule> rules_for(const Table&, int size);

}  // namespace rz::tuning
