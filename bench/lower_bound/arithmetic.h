#pragma once
/// Arithmetic of the lower bound: copies and sums, each in one pass over memory.

#include <cstddef>

namespace rz::bench::lower_bound {

/// How results are stored: through the caches, or with non-temporal stores. The latter do not read the
/// destination lines, and are faster if the result would not stay in a cache. They need destinations aligned
/// to 64 bytes.
enum class StoreKind : bool { cached, streamed };

void copy(float* to, const float* from, std::size_t count, StoreKind);
/// to = a + b. `to` may alias a or b.
void add(float* to, const float* a, const float* b, std::size_t count, StoreKind);
/// to = too = a + b. Either may alias a or b.
void add_twice(float* to, StoreKind, float* too, StoreKind, const float* a, const float* b,
               std::size_t count);

}  // namespace rz::bench::lower_bound
