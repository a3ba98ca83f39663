#include "sharding/parallel/mesh.h"

#include <array>
#include <utility>

#include "comm/core/error.h"
#include "sharding/parallel/communication_meter.h"
#include "sharding/parallel/rank_consistency.h"

namespace rz {

namespace {

/// Refers to a communicator that outlives the result.
std::shared_ptr<Communicator> borrowed(Communicator& communicator) {
  return {std::shared_ptr<Communicator>(), &communicator};
}

/// The ranks with equal `color`. `size`: their number.
std::shared_ptr<Communicator> group(Communicator& all, int size, int color) {
  if (size == all.size()) return borrowed(all);
  return std::make_shared<Communicator>(*all.split(color, all.rank(), {}, true));
}

}  // namespace

Mesh::Mesh(Communicator& communicator)
    : sizes_{.shard = communicator.size()},
      groups_{borrowed(communicator), borrowed(communicator), borrowed(communicator), nullptr, nullptr},
      meter_(std::make_shared<CommunicationMeter>()) {}

Mesh::Mesh(Communicator& communicator, const MeshSizes& sizes, int ranks_per_node)
    : sizes_(resolved(sizes, communicator.size(), ranks_per_node)),
      meter_(std::make_shared<CommunicationMeter>()) {
  const std::array facts{Fact{"the mesh", describe(sizes_)}};
  require_same("the mesh", facts, "give every rank the same sizes", communicator);
  const int rank = communicator.rank();
  const int part = rank % sizes_.tp, replica = rank / (sizes_.shard * sizes_.tp);
  groups_.all = borrowed(communicator);
  groups_.data = group(communicator, sizes_.data(), part);
  groups_.shard =
      sizes_.replicate == 1 ? groups_.data : group(communicator, sizes_.shard, replica * sizes_.tp + part);
  if (sizes_.replicate > 1)
    groups_.replicas = sizes_.shard == 1
                           ? groups_.data
                           : group(communicator, sizes_.replicate, rank % (sizes_.shard * sizes_.tp));
  if (sizes_.tp > 1) groups_.tp = group(communicator, sizes_.tp, rank / sizes_.tp);
}

Mesh::Mesh(const MeshSizes& sizes, Groups groups)
    : sizes_(sizes), groups_(std::move(groups)), meter_(std::make_shared<CommunicationMeter>()) {
  require(sizes.ranks() == groups_.all->size() && sizes.data() == groups_.data->size() &&
              sizes.shard == groups_.shard->size() &&
              (sizes.replicate > 1) == (groups_.replicas != nullptr) &&
              (sizes.tp > 1) == (groups_.tp != nullptr),
          Errc::invalid_argument, "Mesh: the communicators are not those of ", describe(sizes));
}

CountedGroup Mesh::layers() const {
  CountedGroup group(*groups_.tp, meter_);
  group.overlaps = groups_.tp->explain(Collective::all_reduce, 0).transport != "shm";
  return group;
}

Mesh Mesh::resized(const MeshSizes& sizes) const {
  Mesh other(communicator(), sizes);
  other.meter_ = meter_;
  return other;
}

}  // namespace rz
