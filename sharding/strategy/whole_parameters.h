#pragma once
/// What updates must know of whole parameters, whose elements several ranks have: norms (LAMB), and
/// directions of matrices (Muon).

#include <functional>
#include <map>
#include <span>
#include <vector>

#include "sharding/model/runtime.h"
#include "sharding/model/sharded_model.h"
#include "sharding/optim/grad_norm.h"
#include "sharding/optim/optimizer.h"
#include "sharding/strategy/update_tiles.h"

namespace rz {

/// Norms of whole parameters and their updates, for optimizers of grain parameter.
///
/// Sums the squares of the elements that each rank updates, exactly, and adds them over the ranks in one
/// small all_reduce per update, none if the state is replicated; and in another one over the parts of layers
/// that a tp group splits.
class ParameterNorms {
 public:
  /// Both must outlive the object.
  ParameterNorms(const ShardedModel& model, Runtime& runtime) : model_(model), runtime_(runtime) {}

  /// Advances the state of the members that the filter accepts, and sets the norms of the scale, which are
  /// valid until the next call. Collective; on a device the host does not wait.
  void measure(const Optimizer&, UpdateTiles&, UpdateSpans&, std::span<const MemberUpdate>,
               const DeviceConstants&, UpdateScale&, const std::function<bool(int member)>& filter,
               const Stream&);

 private:
  void add_over_ranks(Communicator&, const Stream&);
  void count_once(const Stream&);

  const ShardedModel& model_;
  Runtime& runtime_;
  std::vector<ExactSum> sums_;  // two per member
  std::vector<std::int64_t> words_;
  std::vector<SquaredNorms> norms_;
  Tensor device_sums_, device_norms_;
};

/// Directions of whole matrices, for optimizers of grain matrix.
///
/// Gives each matrix whole to one rank, its owner, which orthogonalizes it, and distributes the result.
/// Owners are chosen so that the ranks have about the same work.
class MatrixDirections {
 public:
  /// Both must outlive the object.
  MatrixDirections(const ShardedModel& model, Runtime& runtime) : model_(model), runtime_(runtime) {}

  /// Chooses an owner for each member that the filter accepts.
  void assign(const std::function<bool(int member)>& filter);
  /// Advances the state of the matrices, collects the directions of those that this rank owns, and
  /// orthogonalizes them. Collective.
  void compute(const Optimizer&, UpdateSpans&, std::span<const MemberUpdate>, const UpdateScale&,
               const Stream&);
  /// The final directions of a bucket; undefined if no member in it is updated as a matrix. Collective.
  Tensor distribute(int bucket, std::span<const MemberUpdate>, const Stream&);

 private:
  bool is_matrix(int member) const { return owner_[static_cast<std::size_t>(member)] >= 0; }
  /// The matrices of a bucket that are updated.
  std::vector<int> matrices(int bucket, std::span<const MemberUpdate>) const;
  Tensor part(const Tensor& directions, int member) const;
  void collect(int bucket, const Optimizer&, UpdateSpans&, std::span<const MemberUpdate>, const UpdateScale&,
               const Stream&);

  const ShardedModel& model_;
  Runtime& runtime_;
  std::vector<int> owner_;       // rank, by member; -1: no matrix
  std::map<int, Tensor> owned_;  // during an update, by member
};

}  // namespace rz
