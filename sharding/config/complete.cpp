// What follows from several keys, and combinations that exclude each other.

#include <algorithm>
#include <bit>
#include <filesystem>

#include "comm/core/error.h"
#include "sharding/config/settings.h"

namespace rz {

namespace {
constexpr const char* hook_names[] = {"no", "fp16", "bf16", "power_sgd", "batched_power_sgd"};
}

const char* name(DdpConfig::CommHook hook) { return hook_names[static_cast<std::size_t>(hook)]; }

namespace ds {
namespace {

using Type = OptimizerConfig::Type;

// ---- optimizer

/// As in DeepSpeed: "Adam" decouples weight decay unless adam_w_mode is off; "AdamW" always does. torch's own
/// AdamW has another default of weight_decay, which enters the settings.
void complete_adam(const Draft& d, OptimizerConfig& o, Settings& s, std::vector<std::string>& warnings) {
  const auto was_given = [&](const char* key) { return s.find(concat("optimizer.params.", key))->given; };
  const bool decouples = d.adam_w_mode || o.type == Type::adamw;
  constexpr double torch_decay = 0.01;
  if (d.torch_adam && decouples && !was_given("weight_decay")) {
    o.weight_decay = torch_decay;
    s.replace("optimizer.params.weight_decay", torch_decay, "default of torch.optim.AdamW");
  }
  if (o.type == Type::adam && decouples && o.weight_decay != 0 && !was_given("adam_w_mode"))
    warnings.push_back(concat(d.file,
                              ": optimizer.type: Adam decays weights as AdamW does; \"adam_w_mode\": false "
                              "adds the decay to the gradient instead"));
  o.type = decouples ? Type::adamw : Type::adam;
}

/// Both groups have the rate lr unless they have one of their own.
void complete_muon(const Draft& d, OptimizerConfig& o) {
  o.muon_lr = d.muon_lr.value_or(d.muon_base_lr.value_or(o.muon_lr));
  o.adam_lr = d.adam_lr.value_or(d.muon_base_lr.value_or(o.adam_lr));
  o.lr = o.muon_lr;
}

OptimizerConfig optimizer_of(const Draft& d, Settings& s, std::vector<std::string>& warnings) {
  OptimizerConfig o = d.optimizer_params;
  o.type = optimizer_type(d.optimizer_type);
  require(!o.nesterov || (o.momentum > 0 && o.dampening == 0), Errc::config, d.file,
          ": optimizer.params.nesterov: needs a momentum above 0 and no dampening");
  if (o.type == Type::adam || o.type == Type::adamw) complete_adam(d, o, s, warnings);
  if (o.type == Type::muon) complete_muon(d, o);
  return o;
}

// ---- scheduler

/// DeepSpeed warns of a total that the warm-up exceeds.
void warn_of_total(const Settings& s, Draft& d) {
  const auto* total = s.find("scheduler.params.total_num_steps");
  const auto* warm = s.find("scheduler.params.warmup_num_steps");
  if (total && warm && total->value.get<std::int64_t>() < warm->value.get<std::int64_t>())
    d.warnings.push_back(concat(d.file, ": scheduler.params.total_num_steps: is ", total->value.dump(),
                                ", less than the warm-up of ", warm->value.dump()));
}

void complete_schedule(const Settings& s, Draft& d) {
  warn_of_total(s, d);
  if (d.schedule_type != "OneCycleLR") return;
  const bool both = d.epochs && d.steps_per_epoch;
  require(d.total_steps || both, Errc::config, d.file,
          ": scheduler.params.total_steps: missing; give it, or both epochs and steps_per_epoch");
  std::get<OneCycleLr>(d.schedule).total_steps =
      d.total_steps ? *d.total_steps : *d.epochs * *d.steps_per_epoch;
}

// ---- precision

/// Gradients are accumulated in the dtype of the parameters, as in DeepSpeed, unless the key sets another.
DType gradient_dtype(const Draft& d, DType parameters) {
  const DType type = d.grad_accum_dtype.value_or(parameters);
  require(type == DType::f32 || type == parameters, Errc::config, d.file,
          ": data_types.grad_accum_dtype: gradients in ", name(type), " of a model in ", name(parameters),
          "; choose ", name(parameters), parameters == DType::f32 ? "" : " or fp32");
  return type;
}

std::optional<DType> autocast_dtype(const Draft& d) {
  if (!d.autocasts) return std::nullopt;
  const DType type = d.autocast_dtype.value_or(DType::bf16);
  require(type != DType::f32, Errc::config, d.file,
          ": torch_autocast.dtype: is f32; choose bf16 or fp16, or disable torch_autocast");
  return type;
}

void complete_precision(Draft& d) {
  require(!d.half || !d.brain, Errc::config, d.file, ": fp16: is enabled, and bf16 too; enable one of them");
  const DType parameters = d.half ? DType::f16 : d.brain ? DType::bf16 : DType::f32;
  const DType named = d.param_dtype.value_or(parameters);
  require(named == parameters, Errc::config, d.file, ": data_types.param_dtype: is ", name(named),
          ", but fp16 and bf16 make it ", name(parameters), "; remove the key");
  d.strategy.precision = {parameters, gradient_dtype(d, parameters)};
  PrecisionConfig& p = d.precision;
  p.autocast = autocast_dtype(d);
  if (!d.half) p.loss_scale = {};
  if (!d.half && p.autocast == DType::f16)
    p.loss_scale.rule = LossScaleRule::grad_scaler;  // DeepSpeed uses torch's here
  p.skip_overflow = d.scales_loss() || (d.brain && d.check_grad_overflow);
}

// ---- the mesh

void check_data_ranks(const Draft& d, const MeshSizes& mesh) {
  const std::optional<std::int64_t>& size = d.data_parallel_size;
  require(!size || *size == mesh.data(), Errc::config, d.file, ": data_parallel_size: is ", size.value_or(0),
          ", but the mesh ", describe(mesh), " has ", mesh.data(),
          " ranks with data of their own; remove it, or change ringzero.mesh");
}

/// hpZ divides a group of shards further, or its ranks are one group.
void check_partition(const Draft& d, const MeshSizes& mesh) {
  const int size = d.strategy.zero_hpz_partition_size;
  if (size <= 1 || d.stage < 3) return;
  require(mesh.replicate == 1 ? mesh.shard % size == 0 : mesh.shard == size, Errc::config, d.file,
          ": zero_optimization.zero_hpz_partition_size: is ", size, ", but the mesh is ", describe(mesh),
          mesh.replicate == 1 ? "; use a divisor of shard" : "; use the size of shard, or no replicas");
}

// ---- zero_optimization

/// DeepSpeed offloads nothing below these stages.
void check_zero(const Settings& s, Draft& d) {
  for (const char* key : {"offload_param", "offload_optimizer"}) {
    const auto* device = s.find(concat("zero_optimization.", key, ".device"));
    require(!device || device->value != "nvme", Errc::unsupported, d.file, ": zero_optimization.", key,
            ".device: not supported in this build yet: \"nvme\"; use \"cpu\" or \"none\"");
  }
  const StrategyOptions& z = d.strategy;
  const auto warn = [&](const char* key, const char* stages) {
    d.warnings.push_back(concat(d.file, ": zero_optimization.", key, ": has no effect: it needs stage ",
                                stages, ", found ", d.stage));
  };
  if (z.offload_param.device != OffloadDevice::none && d.stage < 3) warn("offload_param", "3");
  if (z.zero_hpz_partition_size > 1 && d.stage < 3) warn("zero_hpz_partition_size", "3");
  if (z.offload_optimizer.device != OffloadDevice::none && d.stage < 1)
    warn("offload_optimizer", "1, 2 or 3");
  require(z.offload_optimizer.ratio == 1 || d.stage == 3, Errc::config, d.file,
          ": zero_optimization.offload_optimizer.ratio: below 1 needs stage 3, found ", d.stage);
}

// ---- ringzero

bool is_power_sgd(DdpConfig::CommHook hook) {
  return hook == DdpConfig::CommHook::power_sgd || hook == DdpConfig::CommHook::batched_power_sgd;
}

/// DeepSpeed's key of the same meaning gets the same value.
bool finds_unused_parameters(const Draft& d, Settings& s) {
  const char* const path = "zero_optimization.ignore_unused_parameters";
  const bool ignores = d.ignore_unused_parameters;
  if (!d.find_unused_parameters) return ignores;
  const bool finds = *d.find_unused_parameters;
  require(finds == ignores || !s.find(path)->given, Errc::config, d.file,
          ": ringzero.find_unused_parameters: is ", finds, ", but ", path, " is ", ignores,
          "; remove one of them");
  if (finds != ignores) s.replace(path, finds, "ringzero.find_unused_parameters");
  return finds;
}

void check_hook(DdpConfig::CommHook hook, const StrategyOptions& o, const std::string& file) {
  if (hook == DdpConfig::CommHook::no) return;
  require(o.wire == WireFormat{}, Errc::config, file, ": ringzero.comm_hook: ", name(hook),
          " forms the means itself; remove communication_data_type, prescale_gradients and "
          "gradient_predivide_factor");
  const DType gradients = o.precision.gradients;
  require(!is_power_sgd(hook) || gradients == DType::f32, Errc::config, file,
          ": ringzero.comm_hook: ", name(hook), " needs gradients in f32, found ", name(gradients),
          "; set data_types.grad_accum_dtype to fp32");
}

void complete_ddp(Draft& d, Settings& s) {
  d.strategy.find_unused_parameters = finds_unused_parameters(d, s);
  check_hook(d.ddp.comm_hook, d.strategy, d.file);
  require(!s.has_section("ringzero.comm_state_option") || is_power_sgd(d.ddp.comm_hook), Errc::config, d.file,
          ": ringzero.comm_state_option: is of power_sgd and batched_power_sgd, but comm_hook is ",
          name(d.ddp.comm_hook), "; set comm_hook, or remove the section");
}

/// A dynamic loss scale of f16 has a minimum, which ends a run of skipped updates sooner or later.
std::int64_t max_skipped_updates(const Draft& d) {
  const LossScaleOptions& scale = d.precision.loss_scale;
  const bool has_minimum = d.scales_loss() && scale.fixed == 0 && scale.rule != LossScaleRule::grad_scaler;
  return d.max_skipped.value_or(has_minimum ? 0 : d.max_skipped_updates);
}

constexpr const char* deterministic_key = ": ringzero.deterministic: world_size_invariant ";

/// A wire format would round sums of as many micro-batches as a rank has.
void check_wire(const StrategyOptions& o, const std::string& file) {
  const auto refuse = [&](const char* key, const std::string& found, const char* remedy) {
    fail(Errc::config, file, deterministic_key, "needs sums of gradients in f32, found ", key, " ", found,
         "; ", remedy);
  };
  const DType gradients = o.precision.gradients;
  const WireFormat& wire = o.wire;
  if (gradients != DType::f32)
    refuse("data_types.grad_accum_dtype", name(gradients), "set data_types.grad_accum_dtype to fp32");
  if (wire.communication_data_type.value_or(DType::f32) != DType::f32)
    refuse("communication_data_type", name(*wire.communication_data_type), "remove it, or set it to fp32");
  if (wire.prescale_gradients) refuse("prescale_gradients", "true", "remove it");
  if (wire.gradient_predivide_factor != 1)
    refuse("gradient_predivide_factor", concat(wire.gradient_predivide_factor), "remove it");
}

/// Refuses a number of ranks, and keys, with which results would depend on the number of ranks.
void complete_determinism(Draft& d, const Settings& s, int ranks) {
  d.world_size_invariant = d.deterministic == Determinism::world_size_invariant;
  if (!d.world_size_invariant) return;
  require(std::has_single_bit(static_cast<unsigned>(ranks)), Errc::config, d.file, deterministic_key,
          "needs 1, 2, 4, 8, … ranks with data of their own, found ", ranks,
          "; start as many, or remove the key");
  check_wire(d.strategy, d.file);
  require(d.ddp.comm_hook == DdpConfig::CommHook::no, Errc::config, d.file, deterministic_key,
          "sums gradients in an order of its own, but ringzero.comm_hook is ", name(d.ddp.comm_hook),
          "; remove one of them");
  require(!s.has_section("ringzero.join") || !d.ddp.join.enable, Errc::config, d.file, deterministic_key,
          "has equally many micro-batches on all ranks; remove ringzero.join");
}

/// What needs whole matrices, which ranks of a tp group do not have.
void check_shared_layers(const Draft& d, const MeshSizes& mesh) {
  const auto refuse = [&](const std::string& what, const char* remedy) {
    fail(Errc::config, d.file, ": ", what, ", but on the mesh ", describe(mesh),
         " ranks have parts of them; ", remedy, ", or choose tp 1");
  };
  if (d.optimizer && d.optimizer->type == OptimizerConfig::Type::muon)
    refuse("optimizer.type: Muon needs whole matrices", "choose another optimizer");
  if (d.ddp.comm_hook != DdpConfig::CommHook::no)
    refuse(concat("ringzero.comm_hook: ", name(d.ddp.comm_hook), " compresses gradients of whole layers"),
           "remove it");
}

/// The texts of a list.
std::vector<std::string> texts_of(const nlohmann::json& value, const char* path, const std::string& file) {
  const auto is_text = [](const nlohmann::json& v) { return v.is_string() && !v.get<std::string>().empty(); };
  require(value.is_array() && std::ranges::all_of(value, is_text), Errc::config, file, ": ", path,
          ": expected a list of names, found ", to_display(value));
  return value.get<std::vector<std::string>>();
}

// ---- ringzero.lora

LoraOptions lora_of(const Draft& d) {
  LoraOptions o = d.lora_params;
  const nlohmann::json& targets = d.target_modules;
  require(targets.is_null() || (!targets.empty() && targets != ""), Errc::config, d.file,
          ": ringzero.lora.target_modules: empty; name the layers, such as [\"q_proj\", \"v_proj\"], or "
          "\"all-linear\", or remove the key for those of the family");
  if (targets.is_string())
    o.target_modules = targets.get<std::string>();
  else if (!targets.is_null())
    o.target_modules = texts_of(targets, "ringzero.lora.target_modules", d.file);
  if (!d.modules_to_save.is_null())
    o.modules_to_save = texts_of(d.modules_to_save, "ringzero.lora.modules_to_save", d.file);
  return o;
}

// ---- ringzero.checkpoint

std::string checkpoint_key(const char* key) { return concat("ringzero.checkpoint.", key); }

/// A folder, "true" or empty. The words true and false come from command lines.
std::string resumed_folder(const Draft& d) {
  const nlohmann::json& value = d.resume;
  if (value.is_boolean()) return value.get<bool>() ? "true" : "";
  require(value.is_string(), Errc::config, d.file, ": ", checkpoint_key("resume_from_checkpoint"),
          ": expected true, false or a folder, found ", to_display(value));
  const auto text = value.get<std::string>();
  return text == "false" || text == "False" ? "" : text == "True" ? "true" : text;
}

/// DIR of DIR, of a checkpoint DIR/TAG, and of the files DIR/best and DIR/latest.
std::string folder_of_checkpoints(const std::string& path) {
  namespace fs = std::filesystem;
  const fs::path resumed = fs::path(path).has_filename() ? fs::path(path) : fs::path(path).parent_path();
  std::error_code none;
  const bool names_one = resumed.filename() == "best" || resumed.filename() == "latest" ||
                         fs::exists(resumed / "checkpoint.json", none);
  return names_one ? (resumed.has_parent_path() ? resumed.parent_path().string() : ".") : resumed.string();
}

/// What makes no sense without a folder, and has no effect there.
void require_output_dir(const CheckpointConfig& c, bool resumes, const std::string& file) {
  const auto needs = [&](const char* key, bool set) {
    require(!set, Errc::config, file, ": ", checkpoint_key(key), ": needs a folder; set ",
            checkpoint_key("output_dir"));
  };
  needs("save_steps", c.save_steps != 0);
  needs("save_minutes", c.save_minutes != 0);
  needs("save_total_limit", c.save_total_limit != 0);
  needs("async_save", c.async_save);
  needs("load_best_model_at_end", c.load_best_model_at_end);
  needs("resume_from_checkpoint", resumes);
}

/// A folder that follows from resume_from_checkpoint enters the settings.
void complete_checkpoint(Draft& d, Settings& s) {
  CheckpointConfig& c = d.checkpoint;
  const std::string resumed = resumed_folder(d);
  const bool names_folder = !resumed.empty() && resumed != "true";
  if (c.output_dir.empty() && names_folder) {
    c.output_dir = folder_of_checkpoints(resumed);
    s.replace(checkpoint_key("output_dir"), c.output_dir, "resume_from_checkpoint");
  }
  if (!c.saves()) require_output_dir(c, resumed == "true", d.file);
  c.resume_from_checkpoint = resumed == "true" ? c.output_dir : resumed;
  c.resume_required = names_folder;
  // Hugging Face's names of metrics begin with "eval_", which may be left out.
  require(!c.metric_for_best_model.empty(), Errc::config, d.file, ": ",
          checkpoint_key("metric_for_best_model"), ": is empty; name a metric, e.g. eval_loss");
  if (!c.metric_for_best_model.starts_with("eval_"))
    c.metric_for_best_model = "eval_" + c.metric_for_best_model;
  c.greater_is_better = d.greater_is_better.value_or(!c.metric_for_best_model.ends_with("loss"));
}

}  // namespace

void complete(Draft& d, Settings& s, const RunFacts& facts, ConfigErrors& errors) {
  const auto fill = [&](std::initializer_list<std::string_view> sections, const auto& derive) {
    return !errors.has_wrong(sections) && errors.collect(ConfigErrors::Kind::combination, "", derive);
  };
  ConfiguredMesh mesh;
  const bool has_mesh = fill({"ringzero.mesh", "tensor_parallel", "zero_optimization.mics_shard_size"}, [&] {
    mesh = mesh_of(s, facts, d.file);
    d.mesh = mesh.is_default ? MeshSizes{} : mesh.sizes;
    if (!mesh.is_default) show_mesh(mesh.sizes, s);
    check_data_ranks(d, mesh.sizes);
    check_partition(d, mesh.sizes);
  });
  if (has_mesh)
    fill({"train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"}, [&] {
      d.batch = batch_of(s);
      if (d.batch.train || d.batch.micro) d.sizes = resolve_batch(d.batch, mesh.sizes, d.file);
    });
  fill({"optimizer"}, [&] {
    if (s.has_section("optimizer")) d.optimizer = optimizer_of(d, s, d.warnings);
  });
  fill({"scheduler"}, [&] { complete_schedule(s, d); });
  const bool has_precision = fill({"fp16", "bf16", "data_types", "torch_autocast", "communication_data_type",
                                   "prescale_gradients", "gradient_predivide_factor"},
                                  [&] { complete_precision(d); });
  if (has_precision) fill({"ringzero", "zero_optimization"}, [&] { complete_ddp(d, s); });
  fill({"zero_optimization"}, [&] { check_zero(s, d); });
  fill({"ringzero.lora"}, [&] {
    if (s.has_section("ringzero.lora")) d.lora = lora_of(d);
  });
  fill({"comms_logger"}, [&] {
    if (!d.prof_ops.is_null())
      d.monitor.comms_prof_ops = texts_of(d.prof_ops, "comms_logger.prof_ops", d.file);
  });
  fill({"ringzero.checkpoint"}, [&] { complete_checkpoint(d, s); });
  if (!errors.empty()) return;
  d.checkpoint_activations = d.partition_activations || d.cpu_checkpointing || d.number_checkpoints;
  d.max_skipped_updates = max_skipped_updates(d);
  fill({}, [&] { complete_determinism(d, s, mesh.sizes.data()); });
  if (mesh.sizes.tp > 1) fill({}, [&] { check_shared_layers(d, mesh.sizes); });
}

}  // namespace ds
}  // namespace rz
