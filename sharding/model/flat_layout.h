#pragma once
/// Elements of the members in flat buckets, and the rank that owns each.

#include <span>
#include <utility>
#include <vector>

#include "comm/bucket_scheduler.h"
#include "sharding/model/model_parameters.h"
#include "sharding/model/partition.h"
#include "sharding/model/sharding_plan.h"

namespace rz {

/// Every bucket consists of equal shards, one per rank. Its owner exports a shard, and updates it if the
/// state is sharded.
class FlatLayout {
 public:
  /// The parameters must outlive the layout.
  FlatLayout(const ModelParameters&, BucketLayout, Placement state, RankOf);

  const BucketLayout& buckets() const { return buckets_; }
  /// Number of buckets.
  int size() const { return static_cast<int>(buckets_.buckets.size()); }
  const BucketLayout::Bucket& bucket(int b) const { return buckets_.buckets[static_cast<std::size_t>(b)]; }
  BucketLayout::MemberOffset place(int member) const {
    return buckets_.offsets[static_cast<std::size_t>(member)];
  }

  Placement state() const { return state_; }
  /// The shard of this rank.
  Range shard(int bucket) const;
  /// The elements that this rank updates: its shard, or all.
  Range updated(int bucket) const;
  /// The pieces of members in a range of a bucket.
  std::vector<ParameterSlice> slices(int bucket, Range) const;

  /// Places the same members otherwise.
  void replace(BucketLayout layout) { buckets_ = std::move(layout); }

 private:
  const ModelParameters& parameters_;
  BucketLayout buckets_;
  Placement state_;
  RankOf rank_;
};

/// Buckets of elements of one dtype, over the members in the order of first use.
BucketLayout plan_member_buckets(const ModelParameters&, DType, const BucketOptions&);
/// The same in an order; no bucket holds members of both parts of it, order[0, split) and the rest.
BucketLayout plan_member_buckets(const ModelParameters&, DType, const BucketOptions&,
                                 std::span<const int> order, std::size_t split);

}  // namespace rz
