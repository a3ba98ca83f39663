#pragma once
/// Comparison of models, options and values over the ranks.

#include <map>
#include <string>
#include <vector>

#include "autograd_lite/nn/module.h"
#include "sharding/model/model_parameters.h"
#include "sharding/parallel/rank_consistency.h"
#include "sharding/strategy/pass_rules.h"
#include "sharding/strategy/strategy_options.h"
#include "sharding/strategy/value_access.h"

namespace rz {

/// Checks that the ranks have the same model, in f32, and the same options, and broadcasts the values of
/// rank 0. Collective.
ModelParameters agree_on_model(StrategyKind, Module&, const StrategyOptions&, Communicator&);

/// Compares the values that several ranks hold. Values that one rank holds are compared as they were filled
/// in.
class ReplicaComparison {
 public:
  ReplicaComparison(const ShardedModel&, ValueAccess&, Runtime&);

  /// Call before ValueAccess::fill(). If values are sharded, calls fill for the first 64 elements of each
  /// selected parameter.
  void record(const ValueAccess::Fill&, const ValueAccess::Selection&);
  /// Errc::mismatch names the parameter and the rank that differ. Collective.
  void require_same_values();
  /// Errc::mismatch names the first scope that ranks have not run alike since the last call, and the rank.
  /// Collective.
  void require_same_scopes(const PassRules&);

 private:
  std::vector<Fact> held_values() const;
  void add_masters(std::vector<Fact>&);

  const ShardedModel& model_;
  ValueAccess& access_;
  Runtime& runtime_;
  std::uint64_t compared_scopes_ = 0;
  std::map<std::string, Fact> filled_;  // by parameter: hashes of the first elements that fill() wrote
};

}  // namespace rz
