#pragma once
/// The arithmetic of the limit: what two processes cannot do without, at its fastest. Memory is walked once.

#include <cstddef>

namespace rz::bench::limit {

/// Where a result goes: into the caches, or past them (non-temporal stores), which spares reading what is
/// overwritten and pays where it would not stay in a cache anyhow. Streamed memory starts at a multiple of 64
/// bytes.
enum class Stores : bool { cached, streamed };

void copy(float* to, const float* from, std::size_t count, Stores);
/// to = a + b. `to` may be a or b.
void add(float* to, const float* a, const float* b, std::size_t count, Stores);
/// to = too = a + b. Either may be a or b.
void add_twice(float* to, Stores, float* too, Stores, const float* a, const float* b, std::size_t count);

}  // namespace rz::bench::limit
