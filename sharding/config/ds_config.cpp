#include "sharding/config/ds_config.h"

#include <algorithm>
#include <nlohmann/json.hpp>

#include "comm/core/error.h"
#include "sharding/config/argument_resolver.h"
#include "sharding/config/old_spellings.h"
#include "sharding/config/typed.h"

namespace rz {
namespace ds {
namespace {

using nlohmann::json;

MonitorConfig typed_monitor(const Settings& s) {
  MonitorConfig m;
  m.steps_per_print = s.optional_integer("steps_per_print");
  m.wall_clock_breakdown = s.boolean("wall_clock_breakdown");
  m.memory_breakdown = s.boolean("memory_breakdown");
  m.dump_state = s.boolean("dump_state");
  m.csv_enabled = s.boolean("csv_monitor.enabled");
  m.csv_output_path = s.text("csv_monitor.output_path");
  m.csv_job_name = s.text("csv_monitor.job_name");
  using enum MonitorConfig::TagValidation;
  const std::string tags = s.text("checkpoint.tag_validation");
  m.tag_validation = tags == "WARN" ? warn : tags == "FAIL" ? fail : ignore;
  return m;
}

ActivationCheckpointingConfig typed_checkpointing(const Settings& s) {
  ActivationCheckpointingConfig c;
  c.partition_activations = s.boolean("activation_checkpointing.partition_activations");
  c.cpu_checkpointing = s.boolean("activation_checkpointing.cpu_checkpointing");
  c.number_checkpoints = s.optional_integer("activation_checkpointing.number_checkpoints");
  return c;
}

/// Sections whose keys are shown only where they are in use.
bool in_use(const Settings& s, std::string_view path) {
  if (path.starts_with("ringzero.checkpoint.")) return !s.text("ringzero.checkpoint.output_dir").empty();
  for (const char* switched : {"fp16", "bf16", "csv_monitor"})
    if (path.starts_with(std::string(switched) + ".")) return s.boolean(concat(switched, ".enabled"));
  return true;
}

ResolvedSetting resolved(const Settings& s, const Settings::Entry& e, const DsConfig& c) {
  ResolvedSetting r{e.path, e.value.dump(), e.origin, false};
  const auto derive = [&](std::string_view path, std::int64_t size) {
    if (e.path != path || size == 0 || !e.value.is_null()) return;
    r.value = std::to_string(size);
    r.origin = e.origin == "default" ? "from the other batch sizes" : e.origin;
  };
  derive("train_batch_size", c.sizes.train);
  derive("train_micro_batch_size_per_gpu", c.sizes.micro);
  derive("gradient_accumulation_steps", c.sizes.accumulation);
  const bool is_auto = e.origin.starts_with("auto");
  r.shown = e.given || is_auto ||
            (e.key->treatment == Treatment::applied && r.value != "null" && in_use(s, e.path));
  return r;
}

/// Hugging Face's Trainer has AdamW from its arguments where the file names no optimizer.
void add_default_optimizer(json& document) {
  if (document.contains("optimizer") && !document["optimizer"].is_null()) return;
  document["optimizer"] = {
      {"type", "AdamW"},
      {"params", {{"lr", "auto"}, {"betas", "auto"}, {"eps", "auto"}, {"weight_decay", "auto"}}}};
}

/// The section that stands for a type of Hugging Face's schedules; null: a constant rate. Without a warm-up
/// it is torch's, whose rates are those of Trainer: DeepSpeed's warm-up takes two updates at least.
json scheduler_of(std::string_view type, bool warms_up) {
  const auto section = [](const char* name, json params) {
    return json{{"type", name}, {"params", std::move(params)}};
  };
  const json warmup{{"warmup_num_steps", "auto"}, {"warmup_type", "linear"}};
  const auto warmed = [&](json params) {
    params.update(warmup);
    return params;
  };
  if (type == "reduce_lr_on_plateau") return section("ReduceLROnPlateau", json::object());
  if (type == "linear" && warms_up)
    return section("WarmupDecayLR",
                   warmed({{"warmup_min_lr", 0}, {"warmup_max_lr", "auto"}, {"total_num_steps", "auto"}}));
  if (type == "linear")
    return section("LinearLR", {{"start_factor", 1}, {"end_factor", 0}, {"total_iters", "auto"}});
  if (type == "cosine" && warms_up)
    return section("WarmupCosineLR",
                   warmed({{"total_num_steps", "auto"}, {"warmup_min_ratio", 0}, {"cos_min_ratio", 0}}));
  if (type == "cosine") return section("CosineAnnealingLR", {{"T_max", "auto"}});
  if (type == "constant_with_warmup" && warms_up)
    return section("WarmupLR", warmed({{"warmup_min_lr", 0}, {"warmup_max_lr", "auto"}}));
  return {};
}

/// The section of lr_scheduler_type, which must agree with one that the file has. Returns the paths that it
/// has added.
std::vector<std::string> add_scheduler(json& document, const TrainingArguments& a, const std::string& file) {
  if (!a.lr_scheduler_type) return {};
  const bool warms_up = a.warmup_steps.value_or(0) > 0 || a.warmup_ratio.value_or(0) > 0;
  const json section = scheduler_of(*a.lr_scheduler_type, warms_up);
  const json found = document.contains("scheduler") ? document["scheduler"] : json();
  const bool has_type = found.is_object() && found.contains("type") && !found["type"].is_null();
  if (!has_type) {
    if (section.is_null()) return {};
    document["scheduler"] = section;
    std::vector<std::string> added{"scheduler.type"};
    for (const auto& [key, value] : section["params"].items()) added.push_back("scheduler.params." + key);
    return added;
  }
  std::string names;
  for (const json& fits :
       {scheduler_of(*a.lr_scheduler_type, true), scheduler_of(*a.lr_scheduler_type, false)}) {
    if (fits.is_null()) continue;
    if (found["type"] == fits["type"]) return {};
    if (names.find(to_display(fits["type"])) == names.npos)
      names += (names.empty() ? "" : " or ") + to_display(fits["type"]);
  }
  fail(Errc::config, file, ": scheduler.type: is ", to_display(found["type"]), ", but lr_scheduler_type (",
       a.origin, ") ", *a.lr_scheduler_type, " stands for ", names.empty() ? "no section" : names,
       "; remove one of them");
}

/// A dynamic loss scale of f16 has a minimum, which ends a run of skipped updates sooner or later.
std::int64_t typed_max_skipped_updates(const Settings& s, const PrecisionConfig& precision) {
  const LossScaleOptions& scale = precision.loss_scale;
  const bool has_minimum =
      precision.scales_loss() && scale.fixed == 0 && scale.rule != LossScaleRule::grad_scaler;
  return s.optional_integer("ringzero.max_skipped_updates").value_or(has_minimum ? 0 : 50);
}

/// Sections without a wrong value, so that no error follows from another.
void fill_sections(Settings& s, const RunFacts& facts, DsConfig& c, ConfigErrors& errors) {
  const auto fill = [&](std::initializer_list<std::string_view> sections, const auto& read) {
    return !errors.has_wrong(sections) && errors.collect(ConfigErrors::Kind::combination, "", read);
  };
  fill({"train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"}, [&] {
    c.batch = with_batch_defaults(batch_of(s), s);
    if (c.batch.train || c.batch.micro) c.sizes = resolve_batch(c.batch, facts.ranks, c.file);
  });
  fill({"optimizer"}, [&] {
    if (s.has_section("optimizer")) c.optimizer = typed_optimizer(s, c.file, c.warnings);
  });
  fill({"scheduler"}, [&] { c.schedule = typed_schedule(s, c.file, c.warnings); });
  const bool has_precision = fill({"fp16", "bf16", "data_types", "torch_autocast", "communication_data_type",
                                   "prescale_gradients", "gradient_predivide_factor"},
                                  [&] { c.precision = typed_precision(s, c.file); });
  if (has_precision)
    fill({"ringzero", "zero_optimization"}, [&] { c.ddp = typed_ddp(s, c.precision, c.file); });
  fill({"zero_optimization"}, [&] { c.zero = typed_zero(s, c.file, c.warnings); });
  fill({"ringzero.checkpoint"}, [&] { c.checkpoint = typed_checkpoint(s, c.file); });
  if (!errors.empty()) return;
  c.activation_checkpointing = typed_checkpointing(s);
  c.monitor = typed_monitor(s);
  c.gradient_clipping = s.number("gradient_clipping");
  c.max_skipped_updates = typed_max_skipped_updates(s, c.precision);
  c.drop_last = s.boolean("dataloader_drop_last");
  fill({}, [&] { c.world_size_invariant = typed_world_size_invariant(s, c, facts.ranks); });
  c.unused_parameters = unused_parameter_policy_from_name(s.text("ringzero.unused_parameters"));
}

}  // namespace
}  // namespace ds

DsConfig parse_ds_config(std::string_view text, const std::string& file, const TrainingArguments& arguments,
                         const RunFacts& facts) {
  DsConfig config;
  config.file = file;
  nlohmann::json document = parse_json(text, file, JsonDialect::relaxed);
  const JsonObject root(document, file);  // an object, or an error
  if (facts.adamw_by_default) ds::add_default_optimizer(document);
  ds::ConfigErrors errors;
  std::vector<std::string> added;
  errors.collect(ds::ConfigErrors::Kind::combination, "",
                 [&] { added = ds::add_scheduler(document, arguments, file); });
  auto origins = ds::rename_old_spellings(document, file, config.warnings, errors);
  for (const std::string& path : added) origins[path] = concat("lr_scheduler_type (", arguments.origin, ")");
  ds::Settings settings;
  ds::ArgumentResolver resolver(arguments, facts, settings, errors, file);
  ds::SettingsReader reader(file,
                            {[&](ds::Argument a) { return resolver.given(a); },
                             [&](ds::Argument a) { return resolver.automatic(a); }},
                            std::move(origins), settings, errors);
  reader.read(document);
  if (errors.empty()) resolver.require_all_used(errors);
  for (std::string& warning : reader.warnings()) config.warnings.push_back(std::move(warning));
  ds::fill_sections(settings, facts, config, errors);
  errors.throw_all();
  for (const auto& entry : settings.entries())
    config.settings.push_back(ds::resolved(settings, entry, config));
  return config;
}

DsConfig read_ds_config(const std::string& path, const TrainingArguments& arguments, const RunFacts& facts) {
  return parse_ds_config(read_text_file(path), path, arguments, facts);
}

BatchSizes required_sizes(const DsConfig& config) {
  return config.sizes.train > 0 ? config.sizes : resolve_batch(config.batch, 1, config.file);
}

}  // namespace rz
