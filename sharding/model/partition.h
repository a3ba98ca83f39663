#pragma once
/// Ranges of elements: shards of ranks, slices of parameters in a bucket, and runs of members that share an
/// update.

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "autograd_lite/parameter.h"
#include "comm/bucket_scheduler.h"

namespace rz {

/// Elements [begin, end).
struct Range {
  std::size_t begin = 0, end = 0;
  std::size_t count() const { return end - begin; }
  bool operator==(const Range&) const = default;
};

/// A rank of a group.
struct RankOf {
  int rank = 0, ranks = 1;
};

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

/// A range of the elements of a flat parameter.
struct ParameterElements {
  const Parameter* parameter;
  Range elements;
};

/// Range of member `i` of a bucket, in the order of the bucket, including the padding after it.
Range padded_extent(const BucketLayout&, int bucket, std::size_t i);

/// How an update treats one member.
struct MemberUpdate {
  bool skip = false;        ///< the member keeps its values
  int group = 0;            ///< parameter group of the optimizer
  bool alone = false;       ///< no run joins the member with others
  std::int64_t missed = 0;  ///< earlier updates that skipped the member
  bool operator==(const MemberUpdate&) const = default;
};

/// A run of consecutive members with equal MemberUpdate.
struct MemberRun {
  Range range;  ///< in the bucket
  int first;    ///< index of its first member
  MemberUpdate update;
  bool operator==(const MemberRun&) const = default;
};
/// Splits a range of a bucket where `updates` (one per member) change, and leaves out skipped members.
/// Padding belongs to the member before it. The result uses the storage of `reused`.
std::vector<MemberRun> member_runs(const BucketLayout&, int bucket, Range range,
                                   std::span<const MemberUpdate> updates, std::vector<MemberRun> reused = {});

}  // namespace rz
