#include "sharding/engine/checkpoints/engine_state.h"

#include <algorithm>
#include <array>
#include <limits>
#include <nlohmann/json.hpp>
#include <set>
#include <type_traits>
#include <utility>

#include "comm/core/environment.h"
#include "sharding/io/json.h"
#include "sharding/io/text.h"

namespace rz {
namespace {

using nlohmann::json;

constexpr std::int64_t any = std::numeric_limits<std::int64_t>::max();
constexpr double huge = std::numeric_limits<double>::max();

// ---- comparison

/// Sections, and keys, that decide on what an update computes.
constexpr std::array compared{"train_batch_size",
                              "dataloader_drop_last",
                              "gradient_clipping",
                              "optimizer",
                              "scheduler",
                              "bf16",
                              "fp16",
                              "torch_autocast",
                              "data_types",
                              "communication_data_type",
                              "prescale_gradients",
                              "gradient_predivide_factor",
                              "ringzero.deterministic",
                              "ringzero.comm_hook",
                              "ringzero.comm_state_option",
                              "ringzero.lora",
                              "ringzero.unused_parameters"};

bool is_compared(std::string_view key, bool fixed_batches) {
  if (fixed_batches && key == "train_micro_batch_size_per_gpu") return true;
  return std::ranges::any_of(compared, [&](std::string_view section) {
    return key.starts_with(section) && (key.size() == section.size() || key[section.size()] == '.');
  });
}

/// Values by path, "optimizer.params.lr".
void add_values(const json& node, const std::string& path, std::map<std::string, json>& all) {
  if (!node.is_object()) {
    all[path] = node;
    return;
  }
  for (const auto& [key, value] : node.items()) add_values(value, path.empty() ? key : path + "." + key, all);
}

/// What an absent key stands for in most sections; other versions have other keys.
bool stands_for_absence(const json& value) {
  return value.is_null() || value == json(false) || value == json(0) || value == json("no");
}

std::string groups_text(const OptimizerProgress& o, bool rates) {
  std::string text;
  for (const auto& g : o.groups)
    text += concat(text.empty() ? "" : ", ", g.name, rates ? concat(" of lr ", g.base_lr) : "");
  return text;
}

// ---- writing

/// JSON has no infinities and no NaN.
json number(double x) { return std::isfinite(x) ? json(x) : json(concat(x)); }

json client_json(const ClientState& state) {
  json all = json::object();
  for (const auto& [key, value] : state)
    all[key] = std::visit(
        [](const auto& v) {
          if constexpr (std::is_same_v<std::decay_t<decltype(v)>, double>) return json{{"f64", number(v)}};
          return json(v);
        },
        value);
  return all;
}

json scaler_json(const LossScaler::State& s) {
  return {{"scale", s.scale},
          {"hysteresis_left", s.hysteresis_left},
          {"updates", s.updates},
          {"last_overflow", s.last_overflow},
          {"growth_tracker", s.growth_tracker},
          {"skipped", s.skipped}};
}

json plateau_json(const PlateauState& s) {
  return {{"best", s.best ? number(*s.best) : json()},
          {"num_bad_epochs", s.num_bad_epochs},
          {"cooldown_counter", s.cooldown_counter}};
}

json optimizer_json(const OptimizerProgress& o) {
  json groups = json::array();
  for (const auto& g : o.groups) groups.push_back({{"name", g.name}, {"base_lr", g.base_lr}, {"lr", g.lr}});
  return {{"name", o.name}, {"updates", o.updates}, {"groups", groups}, {"missed_updates", o.missed_updates}};
}

json loaders_json(const LoaderPositions::ByName& positions) {
  json all = json::object();
  for (const auto& [name, p] : positions) {
    all[name] = {{"epoch", p.epoch}, {"samples", p.samples}};
    if (!p.data.empty()) all[name]["data"] = p.data;
  }
  return all;
}

// ---- reading

double number_of(const JsonObject& o, std::string_view key) {
  if (o.has(key) && o.at(key).is_string()) {
    const std::string text = o.text(key, "");
    if (text == "inf") return std::numeric_limits<double>::infinity();
    if (text == "-inf") return -std::numeric_limits<double>::infinity();
    return std::numeric_limits<double>::quiet_NaN();
  }
  return o.number(key, 0, -huge, huge);
}

ClientValue client_value(const JsonObject& o, const std::string& key) {
  const json& v = o.at(key);
  if (v.is_boolean()) return v.get<bool>();
  if (v.is_number_integer()) return v.get<std::int64_t>();
  if (v.is_string()) return v.get<std::string>();
  if (v.is_object() && v.contains("f64")) return number_of(o.object(key), "f64");
  o.fail_at(key, "expected true, false, a number or a text");
}

std::uint64_t unsigned_of(const JsonObject& o, std::string_view key) {
  if (!o.has(key) || !o.at(key).is_number_unsigned()) o.fail_at(key, "missing, or no whole number");
  return o.at(key).get<std::uint64_t>();
}

LossScaler::State scaler_of(const JsonObject& o) {
  return {.scale = o.number("scale", 1, 0, huge),
          .hysteresis_left = static_cast<int>(o.required_integer("hysteresis_left", 0, INT32_MAX)),
          .updates = o.required_integer("updates", 0, any),
          .last_overflow = o.required_integer("last_overflow", -any, any),
          .growth_tracker = o.required_integer("growth_tracker", 0, any),
          .skipped = o.required_integer("skipped", 0, any)};
}

PlateauState plateau_of(const JsonObject& o) {
  PlateauState s{.num_bad_epochs = o.required_integer("num_bad_epochs", 0, any),
                 .cooldown_counter = o.required_integer("cooldown_counter", 0, any)};
  if (o.has("best") && !o.at("best").is_null()) s.best = number_of(o, "best");
  return s;
}

UpdateLoop::State updates_of(const JsonObject& o) {
  UpdateLoop::State s;
  s.count = {o.required_integer("steps", 0, any), o.required_integer("skipped_steps", 0, any),
             o.required_integer("samples", 0, any)};
  s.training.epochs = o.required_integer("epochs", 0, any);
  if (o.has("skipped_in_a_row")) s.training.skipped_in_a_row = o.required_integer("skipped_in_a_row", 0, any);
  s.passes = unsigned_of(o, "passes");
  if (o.has("loss_scaler")) s.training.scaler = scaler_of(o.object("loss_scaler"));
  if (o.has("plateau")) s.training.plateau = plateau_of(o.object("plateau"));
  if (o.has("expected_terms")) s.expected_terms = o.number("expected_terms", 1, 0, huge);
  return s;
}

OptimizerProgress optimizer_of(const JsonObject& o) {
  OptimizerProgress out{.name = o.text("name", ""), .updates = o.required_integer("updates", 0, any)};
  if (!o.has("groups") || !o.at("groups").is_array()) o.fail_at("groups", "missing, or no list");
  for (const json& node : o.at("groups")) {
    const JsonObject g(node, o.file(), o.path("groups"));
    out.groups.push_back(
        {g.text("name", ""), g.number("base_lr", 0, -huge, huge), g.number("lr", 0, -huge, huge)});
  }
  const JsonObject missed = o.object("missed_updates");
  for (const std::string& name : missed.keys())
    out.missed_updates[name] = missed.required_integer(name, 0, any);
  return out;
}

LoaderPositions::ByName loaders_of(const JsonObject& o) {
  LoaderPositions::ByName all;
  for (const std::string& name : o.keys()) {
    const JsonObject p = o.object(name);
    all[name] = {unsigned_of(p, "epoch"), unsigned_of(p, "samples"), p.text("data", "")};
  }
  return all;
}

}  // namespace

std::vector<LauncherJob> jobs_of_launchers() { return jobs_of_launchers_from(environment_variable); }

std::vector<LauncherJob> jobs_of_launchers_from(const Variables& variables) {
  std::vector<LauncherJob> jobs;
  const auto add = [&](const char* kind, const char* name, const char* restarts) {
    const std::string job = variables(name).value_or(""), count = variables(restarts).value_or("");
    if (!job.empty() && job != "none")  // torchrun's name of a run without one
      jobs.push_back({concat(kind, job), !count.empty() && count != "0"});
  };
  add("run ", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT");
  add("slurm job ", "SLURM_JOB_ID", "SLURM_RESTART_COUNT");
  return jobs;
}

std::string differences(const EngineState& saved, const EngineState& now) {
  std::map<std::string, json> before, after;
  add_values(json::parse(saved.config), "", before);
  add_values(json::parse(now.config), "", after);
  const auto invariant = after.find("ringzero.deterministic");
  const bool fixed_batches = invariant != after.end() && invariant->second == "world_size_invariant";
  std::string text;
  const auto add = [&](const std::string& key, const std::string& old_value, const std::string& new_value) {
    text += concat(text.empty() ? "" : "; ", escaped(key), ": ", escaped(old_value), ", now ", new_value);
  };
  std::set<std::string> keys;
  for (const auto* values : {&before, &after})
    for (const auto& [key, value] : *values)
      if (is_compared(key, fixed_batches)) keys.insert(key);
  for (const std::string& key : keys) {
    const json a = before.contains(key) ? before[key] : json(), b = after.contains(key) ? after[key] : json();
    if (a == b || (stands_for_absence(a) && stands_for_absence(b))) continue;
    add(key, a.is_null() ? "absent" : a.dump(), b.is_null() ? "absent" : b.dump());
  }
  if (saved.optimizer.name.empty() || now.optimizer.name.empty()) return text;
  // The configuration has the rates unless the program has made the optimizer.
  const bool rates = !after.contains("optimizer.type");
  const std::string groups = groups_text(saved.optimizer, rates), own = groups_text(now.optimizer, rates);
  if (groups != own) add("groups of parameters", groups, own);
  return text;
}

std::string to_json(const EngineState& s) {
  json all{{"strategy", s.strategy},
           {"jobs", s.jobs},
           {"ranks", s.ranks},
           {"accumulation", s.accumulation},
           {"seed", s.seed},
           {"steps", s.updates.count.steps},
           {"skipped_steps", s.updates.count.skipped_steps},
           {"skipped_in_a_row", s.updates.training.skipped_in_a_row},
           {"samples", s.updates.count.samples},
           {"epochs", s.updates.training.epochs},
           {"passes", s.updates.passes},
           {"optimizer", optimizer_json(s.optimizer)},
           {"loaders", loaders_json(s.loaders)},
           {"config", json::parse(s.config)},
           {"trainer_state", json::parse(s.trainer_state)},
           {"client_state", client_json(s.client_state)}};
  if (s.without_frozen) all["exclude_frozen_parameters"] = true;
  if (s.base && (s.without_frozen || !s.base->empty())) all["base"] = *s.base;
  if (!s.adapter.empty()) all["adapter"] = json::parse(s.adapter);
  if (s.updates.training.scaler) all["loss_scaler"] = scaler_json(*s.updates.training.scaler);
  if (const auto& plateau = s.updates.training.plateau) all["plateau"] = plateau_json(*plateau);
  if (s.updates.expected_terms) all["expected_terms"] = *s.updates.expected_terms;
  return all.dump();
}

EngineState parse_engine_state(std::string_view text, const std::string& file) {
  const json document = parse_json(text, file, JsonDialect::strict);
  const JsonObject o(document, file, "state");
  EngineState s{.strategy = o.text("strategy", ""),
                .ranks = static_cast<int>(o.required_integer("ranks", 1, INT32_MAX)),
                .accumulation = o.required_integer("accumulation", 1, any),
                .seed = unsigned_of(o, "seed"),
                .updates = updates_of(o),
                .optimizer = optimizer_of(o.object("optimizer")),
                .loaders = loaders_of(o.object("loaders"))};
  if (o.has("jobs") && o.at("jobs").is_array())
    for (const json& job : o.at("jobs"))
      if (job.is_string()) s.jobs.push_back(job.get<std::string>());
  s.without_frozen = o.boolean("exclude_frozen_parameters", false);
  if (o.has("base") && o.at("base").is_array()) {
    s.base.emplace();
    for (const json& name : o.at("base"))
      if (name.is_string()) s.base->push_back(name.get<std::string>());
  }
  if (o.has("adapter")) o.object("adapter"), s.adapter = o.at("adapter").dump();
  o.object("config");
  s.config = o.at("config").dump();
  o.object("trainer_state");
  if (o.has("trainer_state")) s.trainer_state = o.at("trainer_state").dump();
  const JsonObject client = o.object("client_state");
  for (const std::string& key : client.keys()) s.client_state[key] = client_value(client, key);
  return s;
}

// ---- what decides on the best checkpoint and on early stopping

namespace {

nlohmann::json or_null(const std::optional<double>& x) { return x ? nlohmann::json(*x) : nlohmann::json(); }

/// The value of "best_metric", null or a number.
std::optional<double> read_best_value(const JsonObject& o) {
  if (!o.has("best_metric")) o.fail_at("best_metric", "is missing");
  if (o.at("best_metric").is_null()) return {};
  constexpr double max = std::numeric_limits<double>::max();
  return o.number("best_metric", 0, -max, max);
}

}  // namespace

nlohmann::json to_json(const BestMetric& b) {
  return {{"best_metric", or_null(b.value)},
          {"best_global_step", b.step},
          {"best_model_checkpoint", b.tag},
          {"greater_is_better", b.greater_is_better}};
}

BestMetric best_metric_from_json(const JsonObject& o) {
  for (const char* key : {"best_model_checkpoint", "greater_is_better"})
    if (!o.has(key)) o.fail_at(key, "is missing");
  BestMetric b;
  b.value = read_best_value(o);
  b.step = static_cast<std::uint64_t>(
      o.required_integer("best_global_step", 0, std::numeric_limits<std::int64_t>::max()));
  b.tag = o.text("best_model_checkpoint", "");
  b.greater_is_better = o.boolean("greater_is_better", false);
  return b;
}

nlohmann::json to_json(const EarlyStopping::State& s) {
  return {{"best_metric", or_null(s.best_metric)}, {"early_stopping_patience_counter", s.patience_counter}};
}

EarlyStopping::State early_stopping_from_json(const JsonObject& o) {
  EarlyStopping::State s{.best_metric = read_best_value(o)};
  s.patience_counter = static_cast<int>(
      o.required_integer("early_stopping_patience_counter", 0, std::numeric_limits<int>::max() - 1));
  return s;
}

TrainerState initial_trainer_state(const CheckpointConfig& c) {
  TrainerState s{.metric = c.metric_for_best_model, .best = {.greater_is_better = c.greater_is_better}};
  if (c.early_stopping_patience)
    s.early_stopping.emplace(
        EarlyStopping::Options{.early_stopping_patience = static_cast<int>(*c.early_stopping_patience),
                               .early_stopping_threshold = c.early_stopping_threshold,
                               .greater_is_better = c.greater_is_better});
  return s;
}

std::string to_json(const TrainerState& s) {
  // A run that is resumed with early stopping, and had none before, counts from the best value.
  const EarlyStopping::State none{.best_metric = s.best.value};
  const nlohmann::json all{{"metric_for_best_model", s.metric},
                           {"best", to_json(s.best)},
                           {"evaluation_due", s.evaluation_due},
                           {"early_stopping", to_json(s.early_stopping ? s.early_stopping->state() : none)}};
  return all.dump();
}

void restore(TrainerState& s, const std::string& text, const std::string& file) {
  const nlohmann::json document = parse_json(text, file, JsonDialect::strict);
  if (document.empty()) return;
  const JsonObject o(document, file, "state.trainer_state");
  s.evaluation_due = o.boolean("evaluation_due", false);
  const BestMetric best = best_metric_from_json(o.object("best"));
  const EarlyStopping::State stopping = early_stopping_from_json(o.object("early_stopping"));
  if (o.text("metric_for_best_model", "") != s.metric || best.greater_is_better != s.best.greater_is_better)
    return;
  if (s.early_stopping) s.early_stopping->set_state(stopping);
  s.best = best;
}

}  // namespace rz
