#pragma once
/// Parameters of one measurement of a _perf program.

#include <cstddef>

#include "bench/collectives.h"

namespace rz::bench {

/// The out-of-place or the in-place half of a table row.
struct Case {
  std::size_t bytes = 0;
  DType dtype{};
  ReduceOp op;
  int root = 0;
  bool in_place = false;
};

inline ElementCounts counts_of(const Collective& collective, const Case& c, RankInfo self) {
  return collective.counts(c.bytes / size_of(c.dtype), size_of(c.dtype), self);
}

}  // namespace rz::bench
