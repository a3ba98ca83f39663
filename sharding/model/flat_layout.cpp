#include "sharding/model/flat_layout.h"

#include <algorithm>
#include <numeric>
#include <utility>

#include "comm/core/error.h"

namespace rz {

// ---- ranges

Range shard_range(std::size_t count, int rank, int size) {
  require(size > 0 && count % static_cast<std::size_t>(size) == 0, Errc::invalid_argument, count,
          " elements cannot be shared out evenly over ", size, " ranks");
  const std::size_t each = count / static_cast<std::size_t>(size);
  return {each * static_cast<std::size_t>(rank), each * (static_cast<std::size_t>(rank) + 1)};
}

Range intersect(Range a, Range b) {
  const std::size_t begin = std::max(a.begin, b.begin);
  return {begin, std::max(begin, std::min(a.end, b.end))};
}

std::vector<ParameterSlice> parameter_slices(const BucketLayout& layout, std::span<Parameter* const> members,
                                             int bucket, Range range) {
  std::vector<ParameterSlice> out;
  for (const int m : layout.buckets[static_cast<std::size_t>(bucket)].members) {
    const std::size_t offset = layout.offsets[static_cast<std::size_t>(m)].offset;
    const Range here = intersect({offset, offset + members[static_cast<std::size_t>(m)]->count()}, range);
    if (here.count()) out.push_back({m, {here.begin - offset, here.end - offset}, here.begin});
  }
  return out;
}

Range padded_extent(const BucketLayout& layout, int bucket, std::size_t i) {
  const auto& b = layout.buckets[static_cast<std::size_t>(bucket)];
  const auto begin = [&](std::size_t k) {
    return layout.offsets[static_cast<std::size_t>(b.members[k])].offset;
  };
  return {begin(i), i + 1 < b.members.size() ? begin(i + 1) : b.count};
}

// ---- members

ModelParameters::ModelParameters(std::span<Parameter* const> parameters) {
  for (Parameter* p : parameters) {
    had_values_ |= p->value.defined();
    if (p->requires_grad) member_of_[p] = static_cast<int>(members_.size());
    (p->requires_grad ? members_ : frozen_).push_back(p);
  }
}

int ModelParameters::member_of(const Parameter& p) const {
  const auto found = member_of_.find(&p);
  return found == member_of_.end() ? -1 : found->second;
}

void ModelParameters::require_trainable(const char* call) const {
  for (const Parameter* p : members_)
    require(p->requires_grad, Errc::invalid_argument, call, ": ", p->name,
            " was frozen after the strategy was made, which still has its gradient and state; make a new "
            "strategy");
}

// ---- buckets

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
