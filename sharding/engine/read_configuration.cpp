#include "sharding/engine/read_configuration.h"

#include <algorithm>
#include <array>

#include "autograd_lite/models/lora.h"
#include "comm/core/error.h"
#include "sharding/engine/training_step.h"
#include "sharding/parallel/rank_agreement.h"
#include "sharding/parallel/rank_consistency.h"

namespace rz {

namespace {

DsConfig read(const EngineOptions& o, const RunFacts& facts) {
  if (o.ds_config) return *o.ds_config;
  if (!o.config.empty() && o.config.front() != '{') return read_ds_config(o.config, o.arguments, facts);
  return parse_ds_config(o.config.empty() ? "{}" : o.config, "configuration", o.arguments, facts);
}

void check_schedule(const DsConfig& config, const LrSchedule& schedule, const Optimizer& optimizer) {
  try {
    check(schedule, optimizer);
  } catch (const Error& e) {
    fail(Errc::config, config.file, ": scheduler.params: ", e.what());
  }
}

/// Forward passes of rank 0 change them.
void check_buffers(const DsConfig& config, Module& model) {
  if (!config.world_size_invariant) return;
  for (const ModuleBuffer* b : model.buffers())
    require(!b->persistent, Errc::config, config.file, ": ringzero.deterministic: world_size_invariant: the ",
            "buffer ", b->name, " follows the samples of rank 0, whose number depends on that of the ranks; ",
            "remove the key, or train a model without buffers that are saved");
}

/// A model is trained if there is an optimizer.
void check_training(const DsConfig& config, const EngineOptions& o) {
  const bool own = o.optimizer != nullptr;
  if (!own && !config.optimizer) return;
  required_sizes(config);
  const auto configured = own ? nullptr : make_optimizer(*config.optimizer, o.decay);
  check_schedule(config, o.lr_schedule ? *o.lr_schedule : config.schedule, own ? *o.optimizer : *configured);
}

void require_same_configuration(World& world, const DsConfig& config, const EngineOptions& o) {
  const std::array facts{Fact{"configuration", resolved_json(config)}, Fact{"seed", concat(o.seed)},
                         Fact{"decay", o.decay == Decay::all ? "all" : "matrices"},
                         Fact{"optimizer", o.optimizer ? o.optimizer->describe() : ""}};
  require_same("the engine", facts, "give all ranks the same options", world.communicator());
}

}  // namespace

void prepare_model(Module& model, const DsConfig& config) {
  if (config.checkpoint_activations) model.checkpoint_activations();
  if (!config.lora) return;
  try {
    add_lora(model, *config.lora);
  } catch (const Error& e) {
    fail(Errc::config, config.file, ": ringzero.lora.", e.what());
  }
}

std::optional<std::int64_t> hidden_size(Module& model) {
  std::optional<std::int64_t> width;
  for (const Parameter* p : model.parameters()) {
    if (p->shape.dims() != 2) continue;
    const auto smaller = static_cast<std::int64_t>(std::min(p->shape[0], p->shape[1]));
    width = std::max(width.value_or(0), smaller);
  }
  return width;
}

DsConfig read_configuration(int ranks, Module& model, const EngineOptions& o) {
  auto updates = o.updates;
  const std::int64_t max_steps = o.arguments.max_steps.value_or(-1);
  if (max_steps > 0) updates = [max_steps](const BatchSizes&) { return max_steps; };
  DsConfig config = read(o, {.ranks = ranks,
                             .hidden_size = o.hidden_size ? o.hidden_size : hidden_size(model),
                             .updates = updates,
                             .adamw_by_default = o.arguments.learning_rate.has_value() && !o.optimizer});
  check_training(config, o);
  check_buffers(config, model);
  strategy_options(config, o.strategy ? *o.strategy : strategy_kind(config));
  return config;
}

DsConfig read_configuration(World& world, Module& model, const EngineOptions& o) {
  DsConfig config;
  check_on_all_ranks(world.communicator(), [&] { config = read_configuration(world.size(), model, o); });
  require_same_configuration(world, config, o);
  return config;
}

}  // namespace rz
