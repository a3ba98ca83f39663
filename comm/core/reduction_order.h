#pragma once
/// Order in which a reduction combines the contributions of the ranks.

#include <cstdint>

namespace rz {

/// `rank`: ((x0 + x1) + x2) + …, from the left.
///
/// `pairwise`: a balanced binary tree over the ranks. Neighbours first, then pairs of those, and so on:
/// ((x0 + x1) + (x2 + x3)) + ((x4 + x5) + (x6 + x7)). A last value without a partner passes to the next level
/// unchanged: (x0 + x1) + x2 for 3 ranks, ((x0 + x1) + (x2 + x3)) + x4 for 5. So if W is a power of two and
/// each rank contributes the pairwise sum of G / W consecutive values of G, the result has the same bits for
/// every W.
///
/// `avg` divides in both (ReduceOp). 16- and 8-bit floats are combined in f32 and rounded once. For up to
/// three ranks both orders are the same.
enum class ReductionOrder : std::uint8_t { rank, pairwise };

constexpr const char* name(ReductionOrder order) {
  return order == ReductionOrder::rank ? "rank" : "pairwise";
}

}  // namespace rz
