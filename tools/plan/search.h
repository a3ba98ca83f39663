#pragma once
/// Plans of a run at several numbers of ranks, and of what it could be instead.

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "sharding/lm/engine_of_run.h"
#include "tools/plan/options.h"

namespace rz::plan {

/// The run at one number of ranks.
struct PlannedRun {
  int ranks = 1;
  BatchSizes sizes;
  std::vector<TrainingPlan> plans;  ///< of each rank
};
/// Errors are those of train_lm's inputs.
PlannedRun plan_at(const Options&, int ranks);

/// The rank that holds the maximum on its device.
const TrainingPlan& largest(const PlannedRun&);

/// The run with another strategy.
struct Alternative {
  StrategyKind strategy = StrategyKind::ddp;
  bool recompute = false;
  std::optional<TrainingPlan> plan;  ///< of rank 0; none if the configuration does not go with the strategy
  std::string reason;                ///< why there is none
};
/// Every strategy, without and with recomputation of activations. Errors but Errc::config and
/// Errc::unsupported are thrown.
std::vector<Alternative> alternatives(const Options&, int ranks);

/// The ranks of each node: 0 if nodes would have different numbers.
int ranks_per_node(const Options&, int ranks);
/// A division of the ranks into copies of the model, and into ranks that share layers.
struct MeshAlternative {
  MeshSizes mesh;                    ///< numbers
  std::optional<TrainingPlan> plan;  ///< of rank 0; none: `reason`
  std::string reason;
};
/// Every number of copies, from stage 1 on, with the tp of the run; with a limit of memory also with every
/// other tp that divides the ranks of a node. The smallest tp and number of copies first. Of a tp that the
/// model or the configuration refuses, the first mesh with the reason. Empty if there is one mesh only.
std::vector<MeshAlternative> meshes(const Options&, const PlannedRun&);
/// "replicate=2,shard=4": what --mesh has for it.
std::string flag_of(const MeshSizes&);

/// The largest micro-batch with which rank 0 holds at most `memory`; 0 if none does.
std::int64_t largest_micro_batch(const Options&, int ranks, std::size_t memory);

}  // namespace rz::plan
