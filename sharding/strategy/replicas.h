#pragma once
/// Comparison of models and values over the ranks.

#include <functional>
#include <map>
#include <string>
#include <vector>

#include "autograd_lite/nn/module.h"
#include "sharding/model/flat_layout.h"
#include "sharding/model/sharded_model.h"
#include "sharding/parallel/rank_consistency.h"

namespace rz {

/// Checks that the ranks have the same model, in f32, and broadcasts the values of rank 0. Collective.
ModelParameters agree_on_model(Module&, Runtime&);

/// Compares the values that several ranks hold: whole ones, and the shards of the copies of a model. Values
/// that one rank holds are compared as they were filled in.
class ReplicaComparison {
 public:
  /// Both must outlive this object.
  ReplicaComparison(const ShardedModel& model, Runtime& runtime) : model_(model), runtime_(runtime) {}

  /// Call before values are filled in. If they are sharded, calls fill for the first 64 elements of each
  /// selected parameter.
  void record(const std::function<void(const Parameter&, Range elements, float* out)>& fill,
              const std::function<bool(const Parameter&)>& selected);
  /// Errc::mismatch names the parameter and the rank that differ. `whole` returns a whole parameter in f32.
  /// Collective.
  void require_same_values(const std::function<Tensor(const Parameter&)>& whole);

 private:
  std::vector<Fact> held_values() const;
  std::vector<Fact> held_shards() const;

  const ShardedModel& model_;
  Runtime& runtime_;
  std::map<std::string, Fact> filled_;  // by parameter: hashes of the first elements that fill() wrote
};

}  // namespace rz
