#pragma once
/// Sizes of the dimensions of a mesh, and the place of a rank in it.

#include <string>

#include "../../comm/core/range.h"

namespace rz {

/// Sizes of the dimensions, outermost first. 0: "auto".
struct MeshSizes {
  int replicate = 1;  ///< copies of the sharded model: HSDP, MiCS
  int shard = 0;      ///< ranks between which values, gradients and optimizer state are divided
  int tp = 1;         ///< ranks that share each layer: tensor parallelism

  /// The ranks of the mesh. Requires sizes without "auto".
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
  /// For ranks that all divide one copy of the model.
  // NOLINTNEXTLINE(google-explicit-constructor)
  MeshCoordinates(RankOf shard_) : shard(shard_) {}
  /// Among the ranks with data of their own.
  RankOf data() const { return {replica.rank * shard.ranks + shard.rank, replica.ranks * shard.ranks}; }
  bool operator==(const MeshCoordinates&) const = default;
};

/// The coordinates of a rank. Requires sizes without "auto".
MeshCoordinates coordinates(const MeshSizes&, int rank);

/// "replicate 2 x shard auto x tp 4"; replicate and tp of 1 are left out.
std::string describe(const MeshSizes&);

/// Sizes without "auto". One "auto" takes the ranks that are left. Of two, the inner one takes what is left
/// of a node, and the outer one the rest: {.shard = 0, .tp = 0} is tp within nodes and shard between them.
/// `ranks_per_node`: 0 if nodes have different numbers of ranks. Errc::config has the numbers, and sizes that
/// would fit.
MeshSizes resolved(const MeshSizes&, int ranks, int ranks_per_node);

}  // namespace rz
