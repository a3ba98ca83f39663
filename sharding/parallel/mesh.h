#pragma once
/// A grid of ranks with named dimensions.
///
///     Mesh mesh(comm, {{"replicate", 2}, {"shard", 4}});  // of 8 ranks
///     mesh.along("shard").all_reduce(…);                  // among the 4 ranks of this rank's row
///
/// As torch.distributed.device_mesh.init_device_mesh() of PyTorch: along() is get_group(), coordinate() is
/// get_local_rank().

#include <cstddef>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "comm/communicator.h"

namespace rz {

/// A rank of a group.
struct RankOf {
  int rank = 0, ranks = 1;
};

struct MeshDimension {
  std::string name;
  int size = 1;
};

/// The ranks of a communicator in row-major order: the coordinate of the last dimension changes fastest.
/// Copies share their communicators. Functions may be called by any thread.
class Mesh {
 public:
  /// One dimension, "data", of all ranks. Not collective. The communicator must outlive the mesh.
  // NOLINTNEXTLINE(google-explicit-constructor)
  Mesh(Communicator&);
  /// Makes the communicators of all dimensions with Communicator::split(); a dimension of all ranks needs
  /// none of its own. Collective. Errc::invalid_argument if the product of the sizes is not the number of
  /// ranks, or a name is empty or occurs twice; Errc::mismatch if the dimensions differ over the ranks. The
  /// communicator must outlive the mesh.
  Mesh(Communicator&, std::vector<MeshDimension>);

  /// All ranks.
  Communicator& communicator() const { return *all_; }
  const std::vector<MeshDimension>& dimensions() const { return dimensions_; }
  /// The ranks that differ from this one in their coordinate of a dimension only; each rank of it is its
  /// coordinate. Lives as long as a copy of the mesh. Errc::invalid_argument for an unknown name, as in the
  /// functions below.
  Communicator& along(std::string_view dimension) const { return *lines_[find(dimension)]; }
  /// This rank's place in a dimension.
  int coordinate(std::string_view dimension) const { return along(dimension).rank(); }
  /// Number of ranks in a dimension.
  int size(std::string_view dimension) const { return dimensions_[find(dimension)].size; }

 private:
  std::size_t find(std::string_view dimension) const;

  Communicator* all_;
  std::vector<MeshDimension> dimensions_;
  std::vector<std::shared_ptr<Communicator>> lines_;  // by dimension
};

/// "replicate 2 x shard 4".
std::string describe(const std::vector<MeshDimension>&);

}  // namespace rz
