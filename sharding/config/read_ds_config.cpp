#include <algorithm>
#include <filesystem>

#include "comm/core/environment.h"
#include "comm/core/error.h"
#include "sharding/config/ds_config.h"
#include "sharding/config/settings.h"

namespace rz {
namespace ds {
namespace {

using nlohmann::json;

/// Sections whose keys are shown only where they are in use.
bool in_use(const Settings& s, std::string_view path) {
  if (path.starts_with("ringzero.checkpoint.")) return !s.text("ringzero.checkpoint.output_dir").empty();
  if (path.starts_with("ringzero.mesh."))
    return s.integer("ringzero.mesh.replicate") != 1 || s.integer("ringzero.mesh.tp") != 1;
  if (path.starts_with("ringzero.trace.")) return !s.text("ringzero.trace.path").empty();
  for (const char* switched :
       {"fp16", "bf16", "csv_monitor", "tensorboard", "comms_logger", "flops_profiler"})
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

/// lora_target_modules adds the section.
void add_lora_section(json& document, const TrainingArguments& a) {
  if (!a.lora_target_modules) return;
  json& own = document["ringzero"];
  if (own.is_null()) own = json::object();
  if (own.is_object() && (!own.contains("lora") || own["lora"].is_null())) own["lora"] = json::object();
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

}  // namespace
}  // namespace ds

DsConfig parse_ds_config(std::string_view text, const std::string& file, const TrainingArguments& arguments,
                         const RunFacts& facts) {
  ds::Draft config;
  config.file = file;
  nlohmann::json document = parse_json(text, file, JsonDialect::relaxed);
  const JsonObject root(document, file);  // an object, or an error
  if (facts.adamw_by_default) ds::add_default_optimizer(document);
  ds::add_lora_section(document, arguments);
  ds::ConfigErrors errors;
  std::vector<std::string> added;
  errors.collect(ds::ConfigErrors::Kind::combination, "",
                 [&] { added = ds::add_scheduler(document, arguments, file); });
  auto origins = ds::rename_old_spellings(document, file, config.warnings, errors);
  for (const std::string& path : added) origins[path] = concat("lr_scheduler_type (", arguments.origin, ")");
  ds::Settings settings;
  ds::ArgumentResolver resolver(arguments, facts, settings, errors, file);
  ds::SettingsReader reader(file, resolver, std::move(origins), settings, errors);
  reader.read(document);
  if (errors.empty()) resolver.require_all_used(errors);
  for (std::string& warning : reader.warnings()) config.warnings.push_back(std::move(warning));
  for (const auto& entry : settings.entries())
    if (entry.key->field.set) entry.key->field.set(config, *entry.key, entry.value);
  ds::complete(config, settings, facts, errors);
  errors.throw_all();
  for (const auto& entry : settings.entries())
    config.settings.push_back(ds::resolved(settings, entry, config));
  return config;
}

DsConfig read_ds_config(const std::string& path, const TrainingArguments& arguments, const RunFacts& facts) {
  return parse_ds_config(read_text_file(path), path, arguments, facts);
}

DsConfig find_ds_config(const std::string& config, const std::string& text_name,
                        const TrainingArguments& arguments, const RunFacts& facts) {
  const std::string variable = config.empty() ? environment_variable("RZ_CONFIG").value_or("") : "";
  const std::string& found = config.empty() ? variable : config;
  if (found.empty()) return parse_ds_config("{}", text_name, arguments, facts);
  if (found.front() == '{')
    return parse_ds_config(found, config.empty() ? "RZ_CONFIG" : text_name, arguments, facts);
  require(!config.empty() || std::filesystem::exists(found), Errc::config, "RZ_CONFIG: there is no file ",
          found, "; it is a path, or JSON that begins with '{'");
  return read_ds_config(found, arguments, facts);
}

BatchSizes required_sizes(const DsConfig& config) {
  return config.sizes.train > 0 ? config.sizes : ds::resolve_batch(config.batch, {.shard = 1}, config.file);
}

std::string resolved_json(const DsConfig& config) {
  nlohmann::ordered_json all = nlohmann::ordered_json::object();
  for (const ResolvedSetting& s : config.settings) {
    if (!s.shown) continue;
    nlohmann::ordered_json* node = &all;
    std::string_view rest = s.path;
    for (auto dot = rest.find('.'); dot != rest.npos; dot = rest.find('.')) {
      node = &(*node)[std::string(rest.substr(0, dot))];
      rest.remove_prefix(dot + 1);
    }
    (*node)[std::string(rest)] = nlohmann::ordered_json::parse(s.value);
  }
  return all.dump(2) + "\n";
}

std::string resolved_table(const DsConfig& config) {
  std::size_t path_width = 0, value_width = 0;
  constexpr std::size_t max_value_width = 24;
  for (const ResolvedSetting& s : config.settings) {
    if (!s.shown) continue;
    path_width = std::max(path_width, s.path.size());
    value_width = std::max(value_width, std::min(max_value_width, s.value.size()));
  }
  const auto padded = [](const std::string& text, std::size_t width) {
    return text + std::string(width > text.size() ? width - text.size() : 0, ' ');
  };
  std::string table = concat("configuration: ", config.file, "\n");
  for (const ResolvedSetting& s : config.settings)
    if (s.shown)
      table +=
          concat("  ", padded(s.path, path_width), "  ", padded(s.value, value_width), "  ", s.origin, "\n");
  return table;
}

}  // namespace rz
