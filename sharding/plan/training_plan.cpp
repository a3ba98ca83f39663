#include "sharding/plan/training_plan.h"

#include <algorithm>
#include <memory>

#include "comm/core/error.h"
#include "sharding/engine/configured.h"
#include "sharding/engine/read_configuration.h"
#include "sharding/strategies/prediction.h"

namespace rz {

namespace {

/// What stays in memory lies where offload puts it; the rest is the dry run's.
MemoryReport with_offload(MemoryReport predicted, const MemoryReport& run, std::size_t tiles) {
  predicted.transient = std::max(run.transient, tiles);
  predicted.transient_in_use = run.transient_in_use;
  predicted.transient_peak = std::max(run.transient_peak, tiles);
  return predicted;
}

}  // namespace

TrainingPlan plan_training(Module& module, const EngineOptions& o, const RecordLoss& record, RankOf rank,
                           Device::Kind device) {
  const DsConfig config = read_configuration(rank.ranks, module, o);
  require(o.optimizer || config.optimizer, Errc::config, config.file,
          ": optimizer: missing; a plan is of training: add the section");
  const auto made = o.optimizer ? nullptr : make_optimizer(*config.optimizer, o.decay);
  const Optimizer& optimizer = o.optimizer ? *o.optimizer : *made;
  const StrategyKind kind = o.strategy ? *o.strategy : strategy_kind(config);
  StrategyOptions options = strategy_options(config, kind);
  if (o.configure_strategy) o.configure_strategy(options);
  if (config.activation_checkpointing.enabled()) module.checkpoint_activations();
  DryRun run = dry_run(module, optimizer, record,
                       {.strategy = kind,
                        .options = options,
                        .rank = rank,
                        .accumulation = static_cast<int>(config.sizes.accumulation),
                        .autocast = config.precision.autocast});
  if (device != Device::host && offloads(options))
    run.memory.model =
        with_offload(predicted_memory(kind, module, optimizer, rank, options, device), run.memory.model,
                     predicted_tiles(kind, module, optimizer, rank, options, device));
  return {kind, rank, run.memory, run.update};
}

}  // namespace rz
