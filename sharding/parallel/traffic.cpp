#include "sharding/parallel/traffic.h"

#include "comm/core/error.h"

namespace rz {

CallCount& Traffic::of(Collective kind) {
  switch (kind) {
    case Collective::all_reduce:
      return all_reduce;
    case Collective::reduce_scatter:
      return reduce_scatter;
    case Collective::all_gather:
      return all_gather;
    case Collective::broadcast:
      return broadcast;
    default:
      fail(Errc::unsupported, "a count of ", name(kind));
  }
}

Traffic MeshTraffic::total() const {
  Traffic sum;
  for (const Traffic* t : {&all, &data, &shard, &replicate, &tp}) sum += *t;
  return sum;
}

std::uint64_t MeshTraffic::sent(const MeshSizes& sizes) const {
  return all.sent(sizes.ranks()) + data.sent(sizes.data()) + shard.sent(sizes.shard) +
         replicate.sent(sizes.replicate) + tp.sent(sizes.tp);
}

MeshTraffic MeshTraffic::operator-(const MeshTraffic& before) const {
  return {all - before.all, data - before.data, shard - before.shard, replicate - before.replicate,
          tp - before.tp};
}

}  // namespace rz
