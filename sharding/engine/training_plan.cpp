#include "sharding/engine/training_plan.h"

#include <algorithm>
#include <memory>

#include "comm/core/error.h"
#include "sharding/engine/dry_run.h"
#include "sharding/engine/engine_options.h"
#include "sharding/engine/read_configuration.h"
#include "sharding/strategy/prediction.h"
#include "sharding/strategy/sharding_plan.h"

namespace rz {

namespace {

/// What stays in memory lies where offload puts it; the rest is the dry run's.
MemoryReport with_offload(MemoryReport predicted, const MemoryReport& run, std::size_t tiles) {
  predicted.transient = std::max(run.transient, tiles);
  predicted.transient_in_use = run.transient_in_use;
  predicted.transient_peak = std::max(run.transient_peak, tiles);
  return predicted;
}

/// A run as its options describe it.
class Run {
 public:
  Run(Module& module, const EngineOptions& o, const RecordLoss& record, int ranks, Device::Kind device,
      int ranks_per_node)
      : module_(module),
        record_(record),
        device_(device),
        config_(read_configuration(ranks, module, o, ranks_per_node)),
        mesh_(resolved(config_.mesh, ranks, ranks_per_node)) {
    require(mesh_.tp == 1, Errc::unsupported, config_.file, ": ringzero.mesh.tp: is ", mesh_.tp,
            "; a plan does not count what ranks that share layers exchange: plan with tp 1");
    require(o.optimizer || config_.optimizer, Errc::config, config_.file,
            ": optimizer: missing; a plan is of training: add the section");
    if (!o.optimizer) made_ = make_optimizer(*config_.optimizer, o.decay);
    optimizer_ = o.optimizer ? o.optimizer.get() : made_.get();
    kind_ = o.strategy ? *o.strategy : strategy_kind(config_);
    options_ = strategy_options(config_, kind_, o.configure_strategy);
    prepare_model(module, config_);
  }

  /// What stays in memory.
  MemoryReport kept(RankOf rank) const {
    return predicted_memory(kind_, module_, *optimizer_, coordinates(mesh_, rank.rank), options_, device_);
  }
  /// Whether ranks that keep the same memory are alike in all.
  bool shards_evenly() const {
    for (int g = 0; g < optimizer_->groups(); ++g)
      if (optimizer_->grain(g) == Grain::matrix) return false;
    return true;
  }
  TrainingPlan plan(RankOf rank) const {
    const auto [memory, update] = dry_run(module_, *optimizer_, record_,
                                          {.strategy = kind_,
                                           .options = options_,
                                           .mesh = mesh_,
                                           .rank = rank.rank,
                                           .accumulation = static_cast<int>(config_.sizes.accumulation),
                                           .autocast = config_.precision.autocast});
    TrainingPlan plan{.strategy = kind_,
                      .mesh = mesh_of(mesh_, options_),
                      .rank = rank,
                      .memory = memory,
                      .update = update};
    if (device_ != Device::host && offloads(options_))
      plan.memory.model = with_offload(
          kept(rank), plan.memory.model,
          predicted_tiles(kind_, module_, *optimizer_, coordinates(mesh_, rank.rank), options_, device_));
    return plan;
  }

 private:
  Module& module_;
  const RecordLoss& record_;
  Device::Kind device_;
  DsConfig config_;
  MeshSizes mesh_;  // numbers
  std::unique_ptr<Optimizer> made_;
  const Optimizer* optimizer_ = nullptr;
  StrategyKind kind_ = StrategyKind::ddp;
  StrategyOptions options_;
};

}  // namespace

TrainingPlan plan_training(Module& module, const EngineOptions& o, const RecordLoss& record, RankOf rank,
                           Device::Kind device, int ranks_per_node) {
  return Run(module, o, record, rank.ranks, device, ranks_per_node).plan(rank);
}

std::vector<TrainingPlan> plan_all_ranks(Module& module, const EngineOptions& o, const RecordLoss& record,
                                         int ranks, Device::Kind device, int ranks_per_node) {
  const Run run(module, o, record, ranks, device, ranks_per_node);
  std::vector<TrainingPlan> plans;
  std::vector<MemoryReport> kept;
  for (int r = 0; r < ranks; ++r) {
    kept.push_back(run.kept({r, ranks}));
    const auto same = std::ranges::find(kept, kept.back()) - kept.begin();
    if (same == r || !run.shards_evenly()) {
      plans.push_back(run.plan({r, ranks}));
    } else {
      plans.push_back(plans[static_cast<std::size_t>(same)]);
      plans.back().rank.rank = r;
    }
  }
  return plans;
}

}  // namespace rz
