#include "sharding/strategy/replicas.h"

#include <algorithm>
#include <utility>

#include "autograd_lite/models/lora.h"
#include "autograd_lite/nn/layers.h"
#include "comm/core/error.h"
#include "comm/device/meta.h"

namespace rz {

namespace {

void require_in_f32(const Parameter& p) {
  require(!p.value.defined() || p.value.dtype() == DType::f32, Errc::unsupported, "parameter ", p.name,
          " is ", name(p.value.dtype()),
          "; strategies take f32 parameters (StrategyOptions::precision selects what they become)");
}

void add_facts(const GatherLimits& limits, std::vector<Fact>& facts) {
  facts.push_back({"prefetch_bucket_size", concat(limits.prefetch_bucket_size)});
  facts.push_back({"max_live_parameters", concat(limits.max_live_parameters)});
  facts.push_back({"max_reuse_distance", concat(limits.max_reuse_distance)});
  facts.push_back({"param_persistence_threshold", concat(limits.param_persistence_threshold)});
  facts.push_back({"model_persistence_threshold", concat(limits.model_persistence_threshold)});
}

void add_facts(const WireFormat& wire, std::vector<Fact>& facts) {
  const auto& type = wire.communication_data_type;
  facts.push_back({"communication_data_type", type ? name(*type) : "that of gradients"});
  facts.push_back({"prescale_gradients", wire.prescale_gradients ? "yes" : "no"});
  facts.push_back({"gradient_predivide_factor", concat(wire.gradient_predivide_factor)});
}

void add_facts(const char* key, const OffloadOptions& offload, std::vector<Fact>& facts) {
  facts.push_back({concat(key, ".device"), name(offload.device)});
  facts.push_back({concat(key, ".pin_memory"), offload.pin_memory ? "yes" : "no"});
  facts.push_back({concat(key, ".ratio"), concat(offload.ratio)});
}

void require_same_options(StrategyKind kind, const StrategyOptions& options, Communicator& communicator) {
  const auto yes = [](bool x) { return x ? "yes" : "no"; };
  std::vector<Fact> facts{
      {"the strategy", name(kind)},
      {"reduce_bucket_size", options.reduce_bucket_size ? concat(*options.reduce_bucket_size) : "default"},
      {"first_bucket_size", concat(options.first_bucket_size)},
      {"allgather_bucket_size", concat(options.allgather_bucket_size)},
      {"overlap_comm", yes(options.overlap_comm)},
      {"rebuild", yes(options.rebuild)},
      {"precision.parameters", name(options.precision.parameters)},
      {"precision.gradients", name(options.precision.gradients)},
      {"zero_hpz_partition_size", concat(options.zero_hpz_partition_size)},
      {"sub_group_size", concat(options.sub_group_size)},
      {"unused_parameters", name(options.unused_parameters)},
      {"find_unused_parameters", yes(options.find_unused_parameters)},
      {"static_graph", yes(options.static_graph)},
      {"broadcast_buffers", yes(options.broadcast_buffers)},
      {"pairwise_passes", concat(options.pairwise_passes)}};
  add_facts("offload_optimizer", options.offload_optimizer, facts);
  add_facts("offload_param", options.offload_param, facts);
  add_facts(options.gathers, facts);
  add_facts(options.wire, facts);
  const auto& hook = options.communication_hook;
  facts.push_back({"communication_hook", hook ? hook->describe() : "none"});
  require_same("StrategyOptions", facts, "give every rank the same", communicator);
}

std::string sorted_names(std::vector<std::string> names) {
  std::ranges::sort(names);
  std::string text;
  for (const std::string& name : names) text += concat(text.empty() ? "" : ", ", name);
  return text.empty() ? "none" : text;
}

/// Options of add_lora(), which parts of a model may have of their own, and the factors of each layer.
std::vector<Fact> lora_facts(Module& module) {
  std::vector<Fact> facts;
  const LoraOptions* before = nullptr;
  for (const auto& [name, layer] : lora_layers(module)) {
    const LoraOptions* o = layer->lora->options.get();
    const std::string of = concat(" of ", name);
    if (o && o != std::exchange(before, o)) {
      const TargetModules& targets = o->target_modules;
      facts.push_back({concat("target_modules", of),
                       targets.names.empty() ? targets.expression : sorted_names(targets.names)});
      facts.push_back({concat("r", of), concat(o->r)});
      facts.push_back({concat("lora_alpha", of), concat(o->lora_alpha)});
      facts.push_back({concat("lora_dropout", of), concat(o->lora_dropout)});
      facts.push_back({concat("use_rslora", of), o->use_rslora ? "true" : "false"});
      facts.push_back({concat("modules_to_save", of), sorted_names(o->modules_to_save)});
    }
    facts.push_back({concat("the scale", of), concat(layer->lora->scale)});
    facts.push_back({concat("the dropout", of), concat(layer->lora->dropout)});
  }
  return facts;
}

Fact fact_of(const Parameter& p, const void* values, std::size_t bytes) {
  return {p.name, concat("of hash ", hash_text(hash_bytes(values, bytes)))};
}

Fact fact_of(const Parameter& p, const Tensor& value, const Stream& stream) {
  if (is_meta(value.device())) return {p.name, "without data"};
  const Tensor on_host = value.on_host(stream);
  return fact_of(p, on_host.raw(), on_host.bytes());
}

}  // namespace

ModelParameters agree_on_model(StrategyKind kind, Module& module, const StrategyOptions& options,
                               Runtime& runtime) {
  Communicator& communicator = runtime.communicator;
  const auto all = module.parameters();
  require_distinct_names(all);
  require_same("LoRA", lora_facts(module), "call add_lora() with the same options on every rank",
               communicator);
  require_same_model(all, communicator);
  for (const Parameter* p : all) require_in_f32(*p);
  ModelParameters parameters(all);
  require_same_options(kind, options, communicator);
  broadcast_values(all, runtime.data);
  return parameters;
}

void ReplicaComparison::record(const std::function<void(const Parameter&, Range elements, float* out)>& fill,
                               const std::function<bool(const Parameter&)>& selected) {
  if (model_.options().plan.values == Placement::replicated) return;
  for (const auto* list : {&model_.parameters().members(), &model_.parameters().frozen()})
    for (const Parameter* p : *list) {
      if (selected && !selected(*p)) continue;
      std::vector<float> values(std::min<std::size_t>(p->count(), 64));
      fill(*p, {0, values.size()}, values.data());
      filled_[p->name] = fact_of(*p, values.data(), values.size() * sizeof(float));
    }
}

/// The values that this rank holds: in mixed precision the working copies.
std::vector<Fact> ReplicaComparison::held_values() const {
  std::vector<Fact> facts;
  for (const StoredValue& stored : model_.values().stored())
    facts.push_back(fact_of(*stored.parameter, stored.values, runtime_.stream));
  return facts;
}

/// What this rank updates, and the values that it holds, of its shards.
std::vector<Fact> ReplicaComparison::held_shards() const {
  std::vector<Fact> facts;
  if (model_.options().plan.values == Placement::sharded) facts = held_values();
  const FlatLayout& layout = model_.layout();
  for (int b = 0; model_.options().precision.mixed() && b < layout.size(); ++b) {
    const Range all = layout.updated(b);
    const Tensor values = model_.updated_f32(b);
    for (const ParameterSlice& slice : layout.slices(b, all))
      facts.push_back(fact_of(model_.parameters().member(slice.member),
                              values.view(slice.offset - all.begin, {slice.elements.count()}),
                              runtime_.stream));
  }
  return facts;
}

void ReplicaComparison::require_same_values(const std::function<Tensor(const Parameter&)>& whole) {
  const StorageOptions& options = model_.options();
  const bool replicated = options.plan.values == Placement::replicated;
  std::vector<Fact> facts;
  if (replicated) facts = held_values();
  if (!replicated)
    for (const auto& [parameter, fact] : filled_) facts.push_back(fact);
  if (options.plan.state == Placement::replicated && options.precision.mixed())
    for (const Parameter* p : model_.parameters().members())
      facts.push_back(fact_of(*p, whole(*p), runtime_.stream));
  const auto compare = [&](const std::vector<Fact>& list, int group) {
    require_same("a parameter's value", list,
                 "fill or load the same on every rank (the same seed, the same checkpoint)",
                 runtime_.communicator, group);
  };
  const MeshCoordinates& place = runtime_.place;
  compare(facts, place.part.rank);
  if (runtime_.mesh.tp()) {
    for (const auto* list : {&model_.parameters().members(), &model_.parameters().frozen()})
      for (const Parameter* p : *list)
        if (is_split(*p)) std::erase_if(facts, [&](const Fact& fact) { return fact.name == p->name; });
    compare(facts, 0);
  }
  if (runtime_.replicas && options.plan.state == Placement::sharded)
    compare(held_shards(), place.part.rank * place.shard.ranks + place.shard.rank);
}

void ReplicaComparison::require_same_scopes(const PassRules& rules) {
  const ScopeTrace* trace = model_.trace();
  if (!trace) return;
  const std::uint64_t since = std::exchange(compared_scopes_, trace->visits());
  if (rules.same_scopes()) return;
  std::vector<Fact> facts;
  for (const auto& visit : trace->last(trace->visits() - since))
    facts.push_back({concat("number ", facts.size()),
                     concat(visit.scope->name, visit.pass == Pass::forward ? " forward" : " backward")});
  require_same("the order of scopes", facts, "run the same scopes in the same order on every rank",
               runtime_.communicator);
}

}  // namespace rz
