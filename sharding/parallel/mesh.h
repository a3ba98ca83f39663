#pragma once
/// The ranks of a training run as a grid of three dimensions.
///
///     Mesh mesh(comm, {.replicate = 2, .shard = 4});  // of 8 ranks
///     mesh.shard().all_reduce(…);                     // among the 4 ranks that divide one copy of the model
///
/// As torch.distributed.device_mesh.init_device_mesh() of PyTorch with the dimensions of its HSDP and tensor
/// parallelism.

#include <memory>
#include <string>
#include <utility>

#include "comm/communicator.h"
#include "comm/core/range.h"

namespace rz {

/// Sizes of the dimensions, outermost first. 0: "auto".
struct MeshSizes {
  int replicate = 1;  ///< copies of the sharded model: HSDP, MiCS
  int shard = 0;      ///< ranks between which values, gradients and optimizer state are divided
  int tp = 1;         ///< ranks that share each layer: tensor parallelism

  /// Of sizes without "auto".
  int ranks() const { return replicate * shard * tp; }
  /// Ranks with data of their own.
  int data() const { return replicate * shard; }
  bool operator==(const MeshSizes&) const = default;
};

/// The place of a rank along each dimension.
struct MeshCoordinates {
  RankOf replica, shard, part;

  MeshCoordinates(RankOf replica_, RankOf shard_, RankOf part_)
      : replica(replica_), shard(shard_), part(part_) {}
  /// Of ranks that all divide one copy of the model.
  // NOLINTNEXTLINE(google-explicit-constructor)
  MeshCoordinates(RankOf shard_) : shard(shard_) {}
  /// Among the ranks with data of their own.
  RankOf data() const { return {replica.rank * shard.ranks + shard.rank, replica.ranks * shard.ranks}; }
  bool operator==(const MeshCoordinates&) const = default;
};

/// Of a rank of a mesh, whose sizes are numbers.
MeshCoordinates coordinates(const MeshSizes&, int rank);

/// "replicate 2 x shard auto x tp 4"; replicate and tp of 1 are left out.
std::string describe(const MeshSizes&);

/// Sizes without "auto". One "auto" takes the ranks that are left. Of two, the inner one takes what is left
/// of a node, and the outer one the rest: {.shard = 0, .tp = 0} is tp within nodes and shard between them.
/// `ranks_per_node`: 0 if nodes have different numbers of ranks. Errc::config has the numbers, and sizes that
/// would fit.
MeshSizes resolved(const MeshSizes&, int ranks, int ranks_per_node);

struct CommunicationMeter;

/// The ranks of collectives on a tape. `meter` counts the calls; null: nothing does. The communicator must
/// outlive what has a copy.
struct CountedGroup {
  // NOLINTNEXTLINE(google-explicit-constructor)
  CountedGroup(Communicator& c, std::shared_ptr<CommunicationMeter> m = nullptr)
      : communicator(&c), meter(std::move(m)) {}
  Communicator* communicator;
  std::shared_ptr<CommunicationMeter> meter;
};

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
  /// Of finished communicators. Not collective.
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
  /// tp(), which there is, for what layers exchange: Strategy::traffic() counts it.
  CountedGroup layers() const { return {*groups_.tp, meter_}; }
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
