#pragma once
/// Converts measured times to a tuning table. Pure functions.

#include "tools/tune/measure.h"

namespace rz::tune {

/// Rules for groups of the measured size: for each range of sizes the fastest algorithm, and the fastest that
/// sums in rank order if that is another one. A range ends where the times of two algorithms cross,
/// interpolated between measured sizes. Small advantages, and those at a single size, are ignored as noise.
tuning::Table make_table(const Measured&);

/// Header comment of a table: where, when and how it was measured.
std::string header(const Measured&, const Options&);

}  // namespace rz::tune
