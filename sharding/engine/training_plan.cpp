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
class RunToPlan {
 public:
  /// `any`: the module, or one like it.
  RunToPlan(Module& any, const EngineOptions& o, int ranks, Device::Kind device, int ranks_per_node)
      : engine_(o),
        device_(device),
        ranks_per_node_(ranks_per_node),
        config_(read_configuration(ranks, any, o, ranks_per_node)),
        mesh_(resolved(config_.mesh, ranks, ranks_per_node)) {
    require(o.optimizer || config_.optimizer, Errc::config, config_.file,
            ": optimizer: missing; a plan is of training: add the section");
    if (!o.optimizer) made_ = make_optimizer(*config_.optimizer, o.decay);
    optimizer_ = o.optimizer ? o.optimizer.get() : made_.get();
    kind_ = o.strategy ? *o.strategy : strategy_kind(config_);
    options_ = strategy_options(config_, kind_, o.configure_strategy);
  }

  const DsConfig& config() const { return config_; }
  int tp() const { return mesh_.tp; }

  /// Gives the module what a rank has. Returns the mesh of what its layers exchange.
  Mesh prepare(Module& module, RankOf rank) const {
    prepare_model(module, config_);
    Mesh mesh = meta_mesh(mesh_of(mesh_, options_), rank.rank, transport_of_layers(rank.rank));
    divide_layers(module, mesh, config_, engine_);
    return mesh;
  }
  /// What stays in memory.
  MemoryReport kept(Module& module, RankOf rank) const {
    return predicted_memory(kind_, module, *optimizer_, coordinates(mesh_, rank.rank), options_, device_);
  }
  /// Whether ranks with equal parts of layers that keep the same memory are alike in all.
  bool shards_evenly() const {
    for (int g = 0; g < optimizer_->groups(); ++g)
      if (optimizer_->grain(g) == Grain::matrix) return false;
    return true;
  }
  /// Of a module that is not prepared.
  TrainingPlan plan(Module& module, const RecordLoss& record, RankOf rank) const {
    const Mesh mesh = prepare(module, rank);
    const auto [memory, update] = dry_run(module, *optimizer_, record,
                                          {.strategy = kind_,
                                           .options = options_,
                                           .mesh = mesh,
                                           .accumulation = static_cast<int>(config_.sizes.accumulation),
                                           .autocast = config_.precision.autocast});
    TrainingPlan plan{
        .strategy = kind_, .mesh = mesh.sizes(), .rank = rank, .memory = memory, .update = update};
    if (device_ != Device::host && offloads(options_))
      plan.memory.model = with_offload(
          kept(module, rank), plan.memory.model,
          predicted_tiles(kind_, module, *optimizer_, coordinates(mesh_, rank.rank), options_, device_));
    return plan;
  }

 private:
  /// AlgorithmChoice::transport among the ranks that share the layers of this one.
  std::string transport_of_layers(int rank) const {
    const int first = rank / mesh_.tp * mesh_.tp, last = first + mesh_.tp - 1;
    const bool one_node = ranks_per_node_ == 0 || first / ranks_per_node_ == last / ranks_per_node_;
    return device_ == Device::host && one_node ? "shm" : "of devices or several nodes";
  }

  const EngineOptions& engine_;
  Device::Kind device_;
  int ranks_per_node_;
  DsConfig config_;
  MeshSizes mesh_;  // numbers
  std::unique_ptr<Optimizer> made_;
  const Optimizer* optimizer_ = nullptr;
  StrategyKind kind_ = StrategyKind::ddp;
  StrategyOptions options_;
};

/// Ranks with equal parts of layers that keep the same memory are planned once.
std::vector<TrainingPlan> all_ranks(const RunToPlan& run, const MakePlanned& make, int ranks) {
  std::vector<TrainingPlan> plans(static_cast<std::size_t>(ranks));
  for (int part = 0; part < run.tp(); ++part) {
    const PlannedModule parts = make();
    run.prepare(*parts.module, {part, ranks});
    std::vector<MemoryReport> kept;
    for (int r = part; r < ranks; r += run.tp()) {
      kept.push_back(run.kept(*parts.module, {r, ranks}));
      const auto same = std::ranges::find(kept, kept.back()) - kept.begin();
      TrainingPlan& plan = plans[static_cast<std::size_t>(r)];
      if (same + 1 < std::ssize(kept) && run.shards_evenly()) {
        plan = plans[static_cast<std::size_t>(part + same * run.tp())];
        plan.rank.rank = r;
        continue;
      }
      const PlannedModule one = make();
      plan = run.plan(*one.module, one.record, {r, ranks});
    }
  }
  return plans;
}

}  // namespace

TrainingPlan plan_training(Module& module, const EngineOptions& o, const RecordLoss& record, RankOf rank,
                           Device::Kind device, int ranks_per_node) {
  return RunToPlan(module, o, rank.ranks, device, ranks_per_node).plan(module, record, rank);
}

std::vector<TrainingPlan> plan_all_ranks(Module& module, const EngineOptions& o, const RecordLoss& record,
                                         int ranks, Device::Kind device, int ranks_per_node) {
  const RunToPlan run(module, o, ranks, device, ranks_per_node);
  require(run.tp() == 1, Errc::invalid_argument, run.config().file, ": ringzero.mesh.tp: is ", run.tp(),
          ", and one module has the parts of one rank: give plan_all_ranks() a function that makes modules");
  const PlannedModule borrowed{{std::shared_ptr<Module>(), &module}, record};
  return all_ranks(
      run, [&] { return borrowed; }, ranks);
}

std::vector<TrainingPlan> plan_all_ranks(const MakePlanned& make, const EngineOptions& o, int ranks,
                                         Device::Kind device, int ranks_per_node) {
  return all_ranks(RunToPlan(*make().module, o, ranks, device, ranks_per_node), make, ranks);
}

}  // namespace rz
