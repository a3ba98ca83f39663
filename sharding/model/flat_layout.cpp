#include "sharding/model/flat_layout.h"

#include <numeric>
#include <utility>

namespace rz {

FlatLayout::FlatLayout(const ModelParameters& parameters, BucketLayout buckets, Placement state, RankOf rank)
    : parameters_(parameters), buckets_(std::move(buckets)), state_(state), rank_(rank) {}

Range FlatLayout::shard(int b) const { return shard_range(bucket(b).count, rank_.rank, rank_.ranks); }

Range FlatLayout::updated(int b) const {
  return state_ == Placement::replicated ? Range{0, bucket(b).count} : shard(b);
}

std::vector<ParameterSlice> FlatLayout::slices(int b, Range range) const {
  return parameter_slices(buckets_, parameters_.members(), b, range);
}

BucketLayout plan_member_buckets(const ModelParameters& parameters, DType dtype,
                                 const BucketOptions& options) {
  std::vector<BucketMember> counts;
  for (const Parameter* p : parameters.members()) counts.push_back({p->count(), dtype});
  return plan_buckets(counts, options);
}

BucketLayout plan_member_buckets(const ModelParameters& parameters, DType dtype, const BucketOptions& options,
                                 std::span<const int> order, std::size_t split) {
  BucketLayout out;
  out.offsets.resize(order.size());
  for (const auto part : {order.first(split), order.subspan(split)}) {
    std::vector<BucketMember> counts;
    for (const int m : part) counts.push_back({parameters.member(m).count(), dtype});
    std::vector<int> sequence(part.size());
    std::iota(sequence.begin(), sequence.end(), 0);
    BucketLayout buckets = plan_buckets(counts, options, sequence);
    const int before = static_cast<int>(out.buckets.size());
    for (std::size_t i = 0; i < part.size(); ++i) {
      const auto [bucket, offset] = buckets.offsets[i];
      out.offsets[static_cast<std::size_t>(part[i])] = {before + bucket, offset};
    }
    for (auto& bucket : buckets.buckets) {
      for (int& member : bucket.members) member = part[static_cast<std::size_t>(member)];
      out.buckets.push_back(std::move(bucket));
    }
  }
  return out;
}

}  // namespace rz
