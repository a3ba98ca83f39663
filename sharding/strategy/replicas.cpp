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

ModelParameters agree_on_model(Module& module, Runtime& runtime) {
  Communicator& communicator = runtime.communicator;
  const auto all = module.parameters();
  require_distinct_names(all);
  require_same("LoRA", lora_facts(module), "call add_lora() with the same options on every rank",
               communicator);
  require_same_model(all, communicator);
  for (const Parameter* p : all) require_in_f32(*p);
  ModelParameters parameters(all);
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

}  // namespace rz
