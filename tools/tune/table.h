#pragma once
/// From times to a tuning table: pure functions.

#include "tools/tune/measure.h"

namespace rz::tune {

/// Lines for groups of that size: at each range of sizes the fastest, and the fastest that sums in rank order
/// where that is another; and the link's costs. A range ends where two lines of times cross, between the
/// sizes that were measured. Who is faster by little, or by chance at one size, is left out.
Tuning make_table(const Measured&);

/// What fits the times best, each counted by its own size, none of the three below 0.
LinkCost fit_link(const Measured&);

/// A text for people above a table: where, when and how it was measured.
std::string header(const Measured&, const Options&);

}  // namespace rz::tune
