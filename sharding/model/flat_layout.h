#pragma once
/// Where the elements of a model lie: its members, ranges of them, flat buckets, and the rank that owns each
/// element.

#include <cstddef>
#include <span>
#include <unordered_map>
#include <utility>
#include <vector>

#include "autograd_lite/parameter.h"
#include "comm/bucket_scheduler.h"
#include "sharding/parallel/mesh.h"

namespace rz {

// ---- what is divided

/// `replicated`: every rank holds all elements. `sharded`: each rank holds its shard of every bucket.
enum class Placement { replicated, sharded };

/// What the ranks of a group share out: placement of the three kinds of memory of Rajbhandari et al.,
/// doi:10.1109/SC41405.2020.00024. Sharded values or gradients require a sharded state, since a rank updates
/// the elements whose state it holds.
struct ShardingPlan {
  Placement values = Placement::replicated;
  Placement gradients = Placement::replicated;  ///< after the reduction
  Placement state = Placement::replicated;      ///< optimizer state and masters
  bool operator==(const ShardingPlan&) const = default;
};

// ---- ranges

/// Shard `rank` of `size` equal shards of `count` elements; `size` must divide `count`.
Range shard_range(std::size_t count, int rank, int size);

/// Intersection of two ranges; begin == end if it is empty.
Range intersect(Range, Range);

/// The elements of one parameter that lie in a given range of a bucket.
struct ParameterSlice {
  int member;
  Range elements;      ///< in the flat parameter
  std::size_t offset;  ///< of elements.begin from the start of the bucket
};
/// Slices of all parameters in `range` of a bucket, in the order of their offsets.
std::vector<ParameterSlice> parameter_slices(const BucketLayout&, std::span<Parameter* const> members,
                                             int bucket, Range range);

/// Range of member `i` of a bucket, in the order of the bucket, including the padding after it.
Range padded_extent(const BucketLayout&, int bucket, std::size_t i);

// ---- members

/// The parameters of a model, as strategies number them. Trainable parameters, the members of buckets, are
/// numbered in the order of first use. The others are frozen.
class ModelParameters {
 public:
  explicit ModelParameters(std::span<Parameter* const>);

  const std::vector<Parameter*>& members() const { return members_; }
  const std::vector<Parameter*>& frozen() const { return frozen_; }
  Parameter& member(int m) const { return *members_[static_cast<std::size_t>(m)]; }
  /// -1: not a member.
  int member_of(const Parameter&) const;
  /// Whether one had a value before this object was made.
  bool had_values() const { return had_values_; }
  /// Errc::invalid_argument names a member that was frozen after it was numbered, and `call`.
  void require_trainable(const char* call) const;

 private:
  std::vector<Parameter*> members_, frozen_;
  std::unordered_map<const Parameter*, int> member_of_;
  bool had_values_ = false;
};

// ---- buckets

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
