#include "sharding/layout/flat_layout.h"

#include <utility>

namespace rz {

FlatLayout::FlatLayout(const ModelParameters& parameters, BucketLayout buckets, Placement state,
                       const Communicator& communicator)
    : parameters_(parameters),
      buckets_(std::move(buckets)),
      state_(state),
      rank_(communicator.rank()),
      ranks_(communicator.size()) {}

Range FlatLayout::shard(int b) const { return shard_range(bucket(b).count, rank_, ranks_); }

Range FlatLayout::updated(int b) const {
  return state_ == Placement::replicated ? Range{0, bucket(b).count} : shard(b);
}

std::vector<ParameterSlice> FlatLayout::slices(int b, Range range) const {
  return parameter_slices(buckets_, parameters_.members(), b, range);
}

BucketLayout plan_member_buckets(const ModelParameters& parameters, DType dtype, const BucketOptions& options,
                                 std::span<const int> order) {
  std::vector<BucketMember> counts;
  for (const Parameter* p : parameters.members()) counts.push_back({p->count(), dtype});
  return plan_buckets(counts, options, order);
}

}  // namespace rz
