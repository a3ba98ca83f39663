#include "sharding/engine/read_configuration.h"

#include <algorithm>
#include <array>

#include "autograd_lite/models/language_model.h"
#include "autograd_lite/models/lora.h"
#include "comm/core/error.h"
#include "sharding/engine/loop/training_step.h"
#include "sharding/parallel/parallelize.h"
#include "sharding/parallel/rank_agreement.h"
#include "sharding/parallel/rank_consistency.h"

namespace rz {

namespace {

/// The arguments, and EngineOptions::mesh as such, so that the configuration must agree with it.
TrainingArguments arguments_of(const EngineOptions& o) {
  TrainingArguments a = o.arguments;
  if (o.mesh == MeshSizes{}) return a;
  const auto set = [&](std::optional<std::int64_t>& argument, const char* name, int size) {
    require(!argument || *argument == size, Errc::config, "EngineOptions::mesh: ", name, " is ", size,
            ", but that of the arguments is ", argument.value_or(0), "; remove one of them");
    argument = size;
    a.flags.insert_or_assign(concat("mesh_", name), "EngineOptions::mesh");
  };
  set(a.mesh_replicate, "replicate", o.mesh.replicate);
  set(a.mesh_shard, "shard", o.mesh.shard);
  set(a.mesh_tp, "tp", o.mesh.tp);
  return a;
}

/// One that was read already has its own mesh.
DsConfig with_mesh(DsConfig config, const EngineOptions& o, const RunFacts& facts) {
  const MeshSizes mesh = resolved(config.mesh, facts.ranks, facts.ranks_per_node);
  require(o.mesh == MeshSizes{} || resolved(o.mesh, facts.ranks, facts.ranks_per_node) == mesh, Errc::config,
          config.file, ": the configuration was read for the mesh ", describe(mesh),
          ", and EngineOptions::mesh is ", describe(o.mesh), "; give the mesh as arguments when it is read");
  const BatchSizes& b = config.sizes;
  require(b.train == b.micro * b.accumulation * mesh.data(), Errc::config, config.file,
          ": train_batch_size: ", b.train, " is not micro-batches of ", b.micro, " × accumulation ",
          b.accumulation, " × ", mesh.data(), " ranks: read the configuration with the ranks of this run");
  return config;
}

DsConfig read(const EngineOptions& o, const RunFacts& facts) {
  if (o.ds_config) return with_mesh(*o.ds_config, o, facts);
  return find_ds_config(o.config, "configuration", arguments_of(o), facts);
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

void check_schedule(const DsConfig& config, const LrSchedule& schedule, const Optimizer& optimizer) {
  try {
    check(schedule, optimizer);
  } catch (const Error& e) {
    fail(Errc::config, config.file, ": scheduler.params: ", e.what());
  }
}

void prepare_model(Module& model, const DsConfig& config) {
  if (config.checkpoint_activations) model.checkpoint_activations();
  if (!config.lora) return;
  try {
    add_lora(model, *config.lora);
  } catch (const Error& e) {
    fail(Errc::config, config.file, ": ringzero.lora.", e.what());
  }
}

std::string divide_layers(Module& module, const Mesh& mesh, const DsConfig& config, const EngineOptions& o) {
  require(!o.parallelize || !config.sequence_parallel, Errc::config, config.file,
          ": ringzero.sequence_parallel: is true, but EngineOptions::parallelize divides the layers; set it "
          "there, in ParallelOptions");
  if (o.parallelize) return o.parallelize(module, mesh);
  const auto* model = dynamic_cast<const LanguageModel*>(&module);
  if (model && mesh.tp())
    return parallelize(module, model->parallel_plan(), mesh, {.sequence_parallel = config.sequence_parallel});
  require(mesh.tp() == nullptr, Errc::config, config.file, ": ringzero.mesh.tp: is ", mesh.sizes().tp,
          ", and the module has no plan of what ranks share; set EngineOptions::parallelize, or tp to 1");
  return "";
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

DsConfig read_configuration(int ranks, Module& model, const EngineOptions& o, int ranks_per_node) {
  auto updates = o.updates;
  const std::int64_t max_steps = o.arguments.max_steps.value_or(-1);
  if (max_steps > 0) updates = [max_steps](const BatchSizes&) { return max_steps; };
  DsConfig config = read(o, {.ranks = ranks,
                             .ranks_per_node = ranks_per_node,
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
  const int per_node = world.ranks_per_node();
  check_on_all_ranks(world.communicator(),
                     [&] { config = read_configuration(world.size(), model, o, per_node); });
  require_same_configuration(world, config, o);
  return config;
}

}  // namespace rz
