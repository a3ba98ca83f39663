#pragma once
/// Who owns which elements.

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "autograd_lite/parameter.h"
#include "comm/bucket_scheduler.h"

namespace rz {

struct Range {
  std::size_t begin = 0, end = 0;
  std::size_t count() const { return end - begin; }
  bool operator==(const Range&) const = default;
};

/// Part `rank` of `size` of `count` elements, which `size` divides.
Range shard_range(std::size_t count, int rank, int size);

/// What two ranges have in common; empty (begin == end) if nothing.
Range intersect(Range, Range);

/// A run of a parameter's elements that lies in some range of a bucket.
struct ParameterSlice {
  int member;
  Range elements;      ///< of the flat parameter
  std::size_t offset;  ///< of elements.begin, from the bucket's start
};
/// The pieces in elements `range` of a bucket, in the order of their offsets.
std::vector<ParameterSlice> parameter_slices(const BucketLayout&, std::span<Parameter* const> members,
                                             int bucket, Range range);

/// Where the bucket's member number `i`, in the bucket's order, begins, and ends if the padding behind it is
/// taken along.
Range padded_extent(const BucketLayout&, int bucket, std::size_t i);

/// How an update treats a member.
struct MemberUpdate {
  bool skip = false;        ///< it stays as it is
  bool decay = true;        ///< weight decay applies
  std::int64_t missed = 0;  ///< earlier updates that skipped it
  bool operator==(const MemberUpdate&) const = default;
};

/// A run of members that are updated alike.
struct MemberRun {
  Range range;  ///< of a bucket
  int first;    ///< its first member
  MemberUpdate update;
  bool operator==(const MemberRun&) const = default;
};
/// A bucket's range, cut where `updates`, one a member, change; what is skipped is left out. Padding goes
/// with the member before it. The memory of `reused` becomes the result's.
std::vector<MemberRun> member_runs(const BucketLayout&, int bucket, Range range,
                                   std::span<const MemberUpdate> updates, std::vector<MemberRun> reused = {});

}  // namespace rz
