#pragma once
/// Sums of the gradients of several passes in pairwise order (ReductionOrder).

#include <cstddef>
#include <cstdint>
#include <vector>

#include "tensor/tensor.h"

namespace rz {

/// Partial sums of an update on this rank. Its passes, q · 2^k of them with an odd q, are 2^k groups of q
/// that follow each other. Passes of a group add up in their order, where backward writes them; groups are
/// the leaves of a balanced binary tree. With 2^j ranks, each with q · 2^k / 2^j of the passes, the sum in
/// pairwise order over the ranks is the same tree.
///
/// The roots of a bucket's complete subtrees are kept, as a binary counter keeps its digits: at most k.
/// They keep their memory from one update to the next. Not thread-safe.
class PairwiseSums {
 public:
  PairwiseSums(std::int64_t passes, int buckets);

  /// A pass begins. Errc::invalid_argument unless the last pass of an update synchronises, and no other.
  void begin_pass(bool synchronises);
  /// After begin_pass(): the passes before it are complete groups, and the last group is not kept yet.
  bool group_ended() const { return passes_begun_ > 1 && (passes_begun_ - 1) % group_ == 0; }
  /// Keeps the sum of the group that has ended. The bucket may then be overwritten.
  void keep(int bucket, const Tensor& group, const Stream&);
  /// group = what was kept + group. After the last pass this is the sum of the update.
  void add_kept(int bucket, const Tensor& group, const Stream&);
  /// Drops what was kept; the next pass is the first of an update.
  void reset() { passes_begun_ = 0; }

  /// The bytes of partial sums.
  std::size_t bytes() const;
  /// Copies of a bucket that updates of so many passes keep.
  static std::size_t max_kept(std::int64_t passes);

 private:
  /// Number of the group that ends, from 0 on: its binary digits are the subtrees that are kept.
  std::uint64_t group_number() const { return static_cast<std::uint64_t>((passes_begun_ - 2) / group_); }

  std::int64_t passes_, group_;
  std::int64_t passes_begun_ = 0;
  std::vector<std::vector<Tensor>> kept_;  // by bucket: subtrees from the largest to the smallest
};

}  // namespace rz
