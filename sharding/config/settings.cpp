#include "sharding/config/settings.h"

#include <algorithm>

#include "comm/core/error.h"
#include "comm/core/lazy.h"
#include "sharding/io/text.h"

namespace rz::ds {
namespace {

using nlohmann::json;

std::vector<ObjectSpec> all_objects() {
  std::vector<ObjectSpec> all;
  for (const auto part : {general_objects(), ringzero_objects(), optimizer_objects(), scheduler_objects(),
                          precision_objects(), zero_objects(), reporting_objects()})
    all.insert(all.end(), part.begin(), part.end());
  return all;
}

constexpr std::pair<DType, const char*> dtype_words[] = {
    {DType::f32, "fp32"}, {DType::f16, "fp16"}, {DType::bf16, "bf16"}};

bool same_word(const std::string& a, const std::string& b) { return lower_case(a) == lower_case(b); }

/// Types of other optimizers and schedulers that DeepSpeed has.
bool is_later_type(const std::string& type) {
  constexpr const char* later[] = {
      "OneBitAdam",   "ZeroOneAdam",     "OneBitLamb", "MuAdam",   "MuAdamW",  "MuSGD",
      "Adadelta",     "Adamax",          "NAdam",      "RAdam",    "Rprop",    "ASGD",
      "LBFGS",        "SparseAdam",      "Adafactor",  "CyclicLR", "LambdaLR", "MultiplicativeLR",
      "SequentialLR", "ChainedScheduler"};
  return std::ranges::any_of(later, [&](const char* name) { return same_word(name, type); });
}

/// The type of a section, spelled as in the tables.
std::string canonical_type(const JsonObject& section, const std::string& params) {
  const std::string type = section.text("type", "");
  std::string all;
  for (const ObjectSpec& o : objects()) {
    if (o.path != params) continue;
    if (same_word(o.variant, type)) return o.variant;
    all += (all.empty() ? "" : ", ") + std::string(o.variant);
  }
  if (type.empty()) section.fail_at("type", concat("missing; choose one of ", all));
  if (is_later_type(type))
    fail(Errc::unsupported, section.file(), ": ", section.path("type"),
         ": not supported in this build yet: ", type, "; choose one of ", all);
  section.fail_at("type", concat("unknown type \"", type, "\"; choose one of ", all));
}

/// True if no "enabled" in the value is true.
bool nothing_enabled(const json& value) {
  if (value.is_array()) return std::ranges::all_of(value, nothing_enabled);
  if (!value.is_object()) return true;
  if (value.contains("enabled")) return without_quotes(value["enabled"]) == false;
  return std::ranges::all_of(value, nothing_enabled);
}

bool is_harmless(const KeySpec& k, const json& value) {
  const auto has_switch = [](const json& v) { return v.dump().find("\"enabled\"") != std::string::npos; };
  if (is_listed(value, k.values)) return true;
  return value.is_object() && has_switch(value) && nothing_enabled(value);
}

bool is_for_stage_3(const KeySpec& k) { return std::string_view(k.key).starts_with("stage3_"); }

}  // namespace

// ---- keys

std::span<const ObjectSpec> objects() {
  static constinit Lazy<std::vector<ObjectSpec>> all;
  return all.get(all_objects);
}

const ObjectSpec* find_object(std::string_view path, std::string_view variant) {
  const auto found = std::ranges::find_if(
      objects(), [&](const ObjectSpec& o) { return o.path == path && o.variant == variant; });
  return found == objects().end() ? nullptr : &*found;
}

std::string_view KeySpec::meaning_of_auto() const {
  return by_hidden_size ? "the model's hidden size" : argument ? argument_spec(argument).shown() : "";
}

json KeySpec::initial() const {
  if (fallback != nullptr) return json::parse(fallback);
  json value = field.initial(*this);
  const bool real = kind == Kind::number || kind == Kind::per_group;
  return real && value.is_number() ? json(value.get<double>()) : value;
}

int word_index(const KeySpec& k, const json& word) {
  const json words = json::parse(k.values);
  return static_cast<int>(std::ranges::find(words, word) - words.begin());
}

json word_at(const KeySpec& k, int index) {
  return json::parse(k.values).at(static_cast<std::size_t>(index));
}

DType dtype_of(const json& word) {
  for (const auto& [dtype, text] : dtype_words)
    if (word == text) return dtype;
  fail(Errc::invalid_argument, "no dtype ", word.dump());
}

const char* word_of(DType type) {
  for (const auto& [dtype, text] : dtype_words)
    if (type == dtype) return text;
  fail(Errc::invalid_argument, "no dtype of a configuration");
}

// ---- values

const Settings::Entry* Settings::find(std::string_view path) const {
  const auto found = std::ranges::find(entries_, path, &Entry::path);
  return found == entries_.end() ? nullptr : &*found;
}

void Settings::replace(std::string_view path, json value, std::string origin) {
  Entry& entry = *std::ranges::find(entries_, path, &Entry::path);
  entry.value = std::move(value);
  entry.origin = std::move(origin);
}

void Settings::sort(const ObjectSpec& whole) {
  const auto place = [&](const Entry& e) {
    const std::string_view key = std::string_view(e.path).substr(0, e.path.find('.'));
    return std::ranges::find(whole.keys, key, &KeySpec::key) - whole.keys.begin();
  };
  std::ranges::stable_sort(entries_, {}, place);
}

bool Settings::has_section(std::string_view path) const {
  return std::ranges::any_of(entries_, [&](const Entry& e) {
    return e.path.starts_with(path) && e.path.size() > path.size() && e.path[path.size()] == '.';
  });
}

const json& Settings::at(std::string_view path) const {
  const Entry* entry = find(path);
  require(entry != nullptr, Errc::invalid_argument, "no setting ", path, " was read");
  return entry->value;
}

std::optional<std::int64_t> Settings::optional_integer(std::string_view path) const {
  const json& value = at(path);
  return value.is_null() ? std::nullopt : std::optional(value.get<std::int64_t>());
}

void ConfigErrors::add(Kind kind, const std::string& path, const Error& error) {
  if (!path.empty()) wrong_.push_back(path);
  if (error.code() == Errc::unsupported) kind = Kind::unsupported;
  const auto same = [&](const Entry& e) { return std::string_view(e.error.what()) == error.what(); };
  if (std::ranges::none_of(errors_, same)) errors_.push_back({kind, error});
}

bool ConfigErrors::has_wrong(std::initializer_list<std::string_view> paths) const {
  return std::ranges::any_of(wrong_, [&](const std::string& wrong) {
    return std::ranges::any_of(paths, [&](std::string_view path) {
      return wrong.starts_with(path) && (wrong.size() == path.size() || wrong[path.size()] == '.');
    });
  });
}

void ConfigErrors::throw_all() const {
  if (errors_.empty()) return;
  if (errors_.size() == 1) throw errors_.front().error;
  std::vector<Entry> sorted = errors_;
  std::ranges::stable_sort(sorted, {}, &Entry::kind);
  constexpr std::size_t max_lines = 20;
  std::string text;
  for (std::size_t i = 0; i < std::min(sorted.size(), max_lines); ++i)
    text += concat(i ? "\n" : "", sorted[i].error.what());
  if (sorted.size() > max_lines) text += concat("\nand ", sorted.size() - max_lines, " more");
  fail(sorted.front().kind == Kind::unsupported && sorted.back().kind == Kind::unsupported ? Errc::unsupported
                                                                                           : Errc::config,
       text);
}

/// Schedules count with the updates of the run, which depend on the mesh.
void SettingsReader::read(const json& document) {
  const JsonObject root(document, file_);
  const ObjectSpec& spec = *find_object("");
  const auto of_mesh = [](std::string_view key) {
    return key == "tensor_parallel" || key == "zero_optimization" || key == "ringzero" ||
           key == "data_parallel_size";
  };
  refuse_unknown_keys(root, spec);
  for (const bool first : {true, false})
    for (const KeySpec& k : spec.keys)
      if (of_mesh(k.key) == first) read_value(root, spec, k);
  settings_.sort(spec);
}

std::vector<std::string> SettingsReader::warnings() const {
  std::vector<std::string> all = warnings_;
  if (unused_.empty()) return all;
  std::string keys;
  for (const std::string& key : unused_) keys += (keys.empty() ? "" : ", ") + key;
  all.push_back(concat(file_, ": read and not applied in this build (docs/configuration.md): ", keys));
  return all;
}

void SettingsReader::refuse_unknown_keys(const JsonObject& object, const ObjectSpec& spec) {
  for (const std::string& key : object.keys()) {
    if (std::ranges::any_of(spec.keys, [&](const KeySpec& k) { return key == k.key; })) continue;
    std::vector<std::string_view> keys;
    for (const KeySpec& k : spec.keys) keys.emplace_back(k.key);
    errors_.collect(ConfigErrors::Kind::unknown_key, "",
                    [&] { object.fail_at(key, unknown_key(key, keys)); });
  }
}

void SettingsReader::read_object(const JsonObject& object, const ObjectSpec& spec) {
  refuse_unknown_keys(object, spec);
  for (const KeySpec& k : spec.keys) read_value(object, spec, k);
}

void SettingsReader::read_value(const JsonObject& object, const ObjectSpec& spec, const KeySpec& k) {
  if (k.kind == Kind::object) return read_section(object, k);
  if (!errors_.collect(ConfigErrors::Kind::value, object.path(k.key), [&] { read_key(object, spec, k); }))
    add(object, k, k.is_required() ? json() : k.initial(), "default", false);
}

void SettingsReader::read_section(const JsonObject& object, const KeySpec& k) {
  const json nothing = json::object();
  const std::string path = object.path(k.key);
  std::optional<JsonObject> section;
  if (object.has(k.key) && !object.at(k.key).is_null())
    errors_.collect(ConfigErrors::Kind::value, path, [&] { section = object.object(k.key); });
  if (!section && std::string_view(k.fallback) == "null") return;
  if (!section) section.emplace(nothing, file_, path);
  if (path == "scheduler" && section->has("type") && section->at("type").is_null()) return;
  if (std::string_view(k.key) != "params") return read_object(*section, *find_object(path));
  const Settings::Entry* type = settings_.find(object.path("type"));
  if (!type->value.is_null()) read_object(*section, *find_object(path, type->value.get<std::string>()));
}

void SettingsReader::read_key(const JsonObject& object, const ObjectSpec& spec, const KeySpec& k) {
  if (!object.has(k.key) && !(k.kind == Kind::text && k.is_required())) return read_absent(object, k);
  if (object.has(k.key) && object.at(k.key) == "auto") return read_auto(object, spec, k);
  const bool is_type = std::string_view(k.key) == "type" && k.is_required();
  json value = is_type ? json(canonical_type(object, std::string(spec.path) + ".params"))
                       : checked(object, k, object.at(k.key));
  require_agreement(object, k, value);
  apply_treatment(object, k, value);
  const auto origin = origins_.find(object.path(k.key));
  add(object, k, std::move(value), origin == origins_.end() ? "file" : origin->second, true);
}

void SettingsReader::read_auto(const JsonObject& object, const ObjectSpec& spec, const KeySpec& k) {
  std::optional<ArgumentValue> found;
  const auto& width = arguments_.hidden_size();
  if (k.argument) {
    found = arguments_.automatic(k.argument);
  } else if (!k.by_hidden_size) {
    if (!spec.auto_is_default && k.treatment != Treatment::accepted)
      object.fail_at(k.key, "\"auto\" stands for no argument here; write a value");
    return add(object, k, k.initial(), "auto: DeepSpeed's default", false);
  } else if (width) {
    found = ArgumentValue{k.by_hidden_size(*width), concat("hidden size ", *width)};
  }
  if (!found)
    object.fail_at(k.key, concat("\"auto\" stands for ", k.meaning_of_auto(),
                                 ", which is not given; give it, or write a value"));
  add(object, k, checked(object, k, found->value), "auto: " + found->origin, true);
}

void SettingsReader::read_absent(const JsonObject& object, const KeySpec& k) {
  const auto given = k.argument == nullptr ? std::nullopt : arguments_.given(k.argument);
  if (given) return add(object, k, checked(object, k, given->value), given->origin, true);
  if (k.is_required()) object.fail_at(k.key, "missing; give a value");
  add(object, k, k.initial(), "default", false);
}

json SettingsReader::checked(const JsonObject& object, const KeySpec& k, const json& value) const {
  const bool is_absent = value.is_null() && !k.is_required() && k.initial().is_null();
  return is_absent ? value : checked_value(value, k, k.key, file_, object.path());
}

void SettingsReader::require_agreement(const JsonObject& object, const KeySpec& k, const json& value) const {
  const auto given = k.argument == nullptr ? std::nullopt : arguments_.given(k.argument);
  if (given && given->value != value)
    object.fail_at(k.key, concat("is ", to_display(value), ", but ", given->origin, " is ",
                                 to_display(given->value), "; remove one of them, or write \"auto\" here"));
}

void SettingsReader::apply_treatment(const JsonObject& object, const KeySpec& k, const json& value) {
  const bool is_default = !k.is_required() && value == k.initial();
  if (k.treatment == Treatment::refused && !is_harmless(k, value))
    fail(Errc::unsupported,
         escaped(concat(file_, ": ", object.path(k.key),
                        ": not supported in this build yet: ", to_display(value), "; ", k.note)));
  if (k.treatment == Treatment::always && !is_default)
    warnings_.push_back(concat(file_, ": ", object.path(k.key), ": has no effect: ", k.note));
  if (k.treatment != Treatment::unused || is_default) return;
  const Settings::Entry* stage = settings_.find("zero_optimization.stage");
  if (!is_for_stage_3(k) || stage == nullptr || stage->value == 3) unused_.push_back(object.path(k.key));
}

void SettingsReader::add(const JsonObject& object, const KeySpec& k, json value, std::string origin,
                         bool given) {
  settings_.add({object.path(k.key), &k, std::move(value), std::move(origin), given});
}

}  // namespace rz::ds
