#pragma once
/// The ranks of a training run as a grid of three dimensions.
///
///     Mesh mesh(comm, {.replicate = 2, .shard = 4});  // of 8 ranks
///     mesh.shard().all_reduce(…);                     // among the 4 ranks that divide one copy of the model
///
/// As torch.distributed.device_mesh.init_device_mesh() of PyTorch with the dimensions of its HSDP and tensor
/// parallelism.

#include <memory>

#include "../../comm/communicator.h"
#include "mesh_sizes.h"

namespace rz {

struct CommunicationMeter;
struct CountedGroup;

/// The ranks of a communicator in row-major order: those of a tp group are neighbours. Copies share their
/// communicators, and what counts the traffic of training. Functions may be called by any thread.
class Mesh {
 public:
  /// {.shard = size of the communicator}. Not collective. The communicator must outlive the mesh.
  // NOLINTNEXTLINE(google-explicit-constructor)
  Mesh(Communicator&);
  /// Makes the communicators of the dimensions with Communicator::split(). Collective. Sizes and errors as in
  /// resolved(); Errc::mismatch if the sizes differ over the ranks. The communicator must outlive the mesh.
  Mesh(Communicator&, const MeshSizes&, int ranks_per_node = 0);
  /// Null where a mesh has none.
  struct Groups {
    std::shared_ptr<Communicator> all, data, shard, replicas, tp;
  };
  /// A mesh of finished communicators. Not collective.
  Mesh(const MeshSizes&, Groups);

  /// The same ranks with other sizes of replicate and shard, and the same count of traffic. Collective.
  Mesh resized(const MeshSizes&) const;

  const MeshSizes& sizes() const { return sizes_; }
  /// All ranks.
  Communicator& communicator() const { return *groups_.all; }
  /// The ranks with other data: those of this rank's tp coordinate.
  Communicator& data() const { return *groups_.data; }
  /// The ranks that divide one copy of the model: those that differ in their shard coordinate only.
  Communicator& shard() const { return *groups_.shard; }
  /// The ranks that hold the same shard of the other copies; null if there is one copy.
  Communicator* replicas() const { return groups_.replicas.get(); }
  /// The ranks that share the layers of this one; null if a rank has whole layers.
  Communicator* tp() const { return groups_.tp.get(); }
  /// tp(), which there is, for what layers exchange (sharding/parallel/traffic.h): Strategy::traffic() counts
  /// it. It overlaps unless the ranks share the memory of a host, where the processors that add are those
  /// that multiply.
  CountedGroup layers() const;
  const std::shared_ptr<CommunicationMeter>& meter() const { return meter_; }

  // This rank's coordinates.
  MeshCoordinates place() const { return coordinates(sizes_, communicator().rank()); }
  RankOf replica() const { return place().replica; }
  RankOf part() const { return place().part; }

 private:
  MeshSizes sizes_;
  Groups groups_;
  std::shared_ptr<CommunicationMeter> meter_;
};

}  // namespace rz
