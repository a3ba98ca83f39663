#pragma once
/// Where the elements of a model lie: its members, ranges of them, flat buckets, the rank that owns each
/// element, and the units in which sharded values are gathered.

#include <cstddef>
#include <limits>
#include <span>
#include <unordered_map>
#include <utility>
#include <vector>

#include "autograd_lite/parameter.h"
#include "comm/bucket_scheduler.h"
#include "comm/core/range.h"
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

/// Whether the ranks of a tp group have different elements of the parameter. Others are equal there, and
/// count on the first of these ranks alone.
inline bool is_split(const Parameter& p) { return p.part && !p.part->is_whole(); }

// ---- buckets

/// Every bucket consists of equal shards, one for each rank of a copy of the model. A shard consists of equal
/// parts, one for each copy: so each element has one owner, which adds its square and exports it.
class FlatLayout {
 public:
  /// Counts of buckets are multiples of the number of data ranks. The parameters must outlive the layout.
  FlatLayout(const ModelParameters&, BucketLayout, Placement state, MeshCoordinates);

  const BucketLayout& buckets() const { return buckets_; }
  /// Number of buckets.
  int size() const { return static_cast<int>(buckets_.buckets.size()); }
  const BucketLayout::Bucket& bucket(int b) const { return buckets_.buckets[static_cast<std::size_t>(b)]; }
  BucketLayout::MemberOffset place(int member) const {
    return buckets_.offsets[static_cast<std::size_t>(member)];
  }

  Placement state() const { return state_; }
  /// The shard of this rank; each copy of the model has one like it.
  Range shard(int bucket) const;
  /// The elements that this rank updates: its shard, or all.
  Range updated(int bucket) const;
  /// The elements that this rank owns, a part of its shard.
  Range owned(int bucket) const;
  /// The pieces of members in a range of a bucket.
  std::vector<ParameterSlice> slices(int bucket, Range) const;

  /// Places the same members otherwise.
  void replace(BucketLayout layout) { buckets_ = std::move(layout); }

 private:
  const ModelParameters& parameters_;
  BucketLayout buckets_;
  Placement state_;
  MeshCoordinates place_;
};

/// Buckets of elements of one dtype, over the members in the order of first use.
BucketLayout plan_member_buckets(const ModelParameters&, DType, const BucketOptions&);
/// The same in an order; no bucket holds members of both parts of it, order[0, split) and the rest.
BucketLayout plan_member_buckets(const ModelParameters&, DType, const BucketOptions&,
                                 std::span<const int> order, std::size_t split);

// ---- units of gathers

/// Parameters of the same scopes in one buffer: trainable and frozen ones, persistent and other ones apart.
/// If they exceed a limit, there are several such buffers.
struct FlatParameter {
  std::vector<Parameter*> parameters;
  std::vector<std::size_t> offsets;  ///< of the parameters, in elements
  std::size_t count = 0;             ///< elements, including padding
  std::size_t first_scope = 0;       ///< index of the earliest scope
  bool trainable = false;
  bool persistent = false;  ///< every rank holds the values whole
};

/// In elements.
struct FlatParameterLimits {
  std::size_t align = 1;  ///< parameters start at multiples of it, and what a rank owns
  /// The most elements of one flat parameter, with the padding between its parameters. A larger parameter has
  /// its own.
  std::size_t count = std::numeric_limits<std::size_t>::max();
  /// Parameters of up to `persistent` elements are persistent, while all of them together have no more than
  /// `all_persistent`.
  std::size_t persistent = 0, all_persistent = std::numeric_limits<std::size_t>::max();
};

/// The flat parameters of a model, trainable ones first, in the order of reduction. A trainable one has the
/// number of its bucket.
class FlatParameters {
 public:
  using Indices = std::vector<int>;
  /// `scopes`, preferably in the order of use in forward, which is the order of reduction reversed.
  /// Errc::invalid_argument names a parameter that belongs to no scope.
  FlatParameters(const std::vector<const Scope*>& scopes, const ModelParameters&, const FlatParameterLimits&,
                 MeshCoordinates);

  int size() const { return static_cast<int>(list_.size()); }
  const FlatParameter& operator[](int u) const { return list_[static_cast<std::size_t>(u)]; }
  /// The flat parameter that contains a parameter of the model.
  int containing(const Parameter& p) const { return containing_.at(&p); }
  /// Shard of this rank.
  Range shard(int u) const;
  /// The trainable ones as buckets.
  BucketLayout buckets(DType) const;

  /// The flat parameters that a scope uses. Errc::invalid_argument if it uses a parameter of another model.
  const Indices& of(const Scope&);

 private:
  const ModelParameters& parameters_;
  RankOf rank_;  // of those that divide a copy of the model
  std::unordered_map<const Scope*, Indices> of_;
  std::unordered_map<const Parameter*, int> containing_;
  std::vector<FlatParameter> list_;
};

/// Calls f(parameter, elements, offset in the range) for each piece of a parameter in a range of a flat
/// parameter.
template <class F>
void for_each_piece(const FlatParameter& u, Range range, const F& f) {
  for (std::size_t i = 0; i < u.parameters.size(); ++i) {
    const std::size_t offset = u.offsets[i];
    const Range here = intersect({offset, offset + u.parameters[i]->count()}, range);
    if (here.count())
      f(*u.parameters[i], Range{here.begin - offset, here.end - offset}, here.begin - range.begin);
  }
}

}  // namespace rz
