#include "sharding/model/partition.h"

#include <algorithm>
#include <utility>

#include "comm/core/error.h"

namespace rz {

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

std::vector<MemberRun> member_runs(const BucketLayout& layout, int bucket, Range range,
                                   std::span<const MemberUpdate> updates, std::vector<MemberRun> reused) {
  std::vector<MemberRun> out = std::move(reused);
  out.clear();
  const auto& members = layout.buckets[static_cast<std::size_t>(bucket)].members;
  for (std::size_t i = 0; i < members.size(); ++i) {
    const int m = members[i];
    const Range here = intersect(padded_extent(layout, bucket, i), range);
    const MemberUpdate& update = updates[static_cast<std::size_t>(m)];
    if (!here.count() || update.skip) continue;
    if (!update.alone && !out.empty() && out.back().update == update && out.back().range.end == here.begin)
      out.back().range.end = here.end;
    else
      out.push_back({here, m, update});
  }
  return out;
}

}  // namespace rz
