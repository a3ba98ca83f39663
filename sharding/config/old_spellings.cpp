// Older spellings of keys.

#include "comm/core/error.h"
#include "sharding/config/settings.h"
#include "sharding/io/text.h"

namespace rz::ds {
namespace {

using nlohmann::json;

json same(const json& value) { return value; }
/// `on` for true, nothing for false; any other value stays, and is refused at the new key.
json switched(const json& value, const json& on) {
  const json plain = without_quotes(value);
  return plain == true ? on : plain == false ? json() : value;
}
json on_cpu(const json& value) { return switched(value, {{"device", "cpu"}}); }
json as_fp32(const json& value) { return switched(value, "fp32"); }
json dropped(const json&) { return json(); }
json enabled(const json& value) { return {{"enabled", value}}; }
json universal(const json& value) { return {{"load_universal", value}}; }

struct Renamed {
  const char* section;  // "" is the whole configuration
  const char* old_key;
  const char* key;             // in the same section; "" if there is none
  json (*value)(const json&);  // null: the key is left out
};

constexpr const char* zero = "zero_optimization";
const Renamed renamed_keys[] = {
    {"", "bfloat16", "bf16", same},
    {"", "fp16_enabled", "fp16", enabled},
    {"", "fp32_allreduce", "communication_data_type", as_fp32},
    {"", "load_universal_checkpoint", "checkpoint", universal},
    {"", "seq_parallel_comm_data_type", "seq_parallel_communication_data_type", same},
    {"", "use_data_before_expert_parallel_", "use_data_before_expert_parallelism", same},
    {zero, "cpu_offload", "offload_optimizer", on_cpu},
    {zero, "cpu_offload_param", "offload_param", on_cpu},
    {zero, "cpu_offload_params", "offload_param", on_cpu},
    {zero, "cpu_offload_use_pin_memory", "", dropped},
    {zero, "stage3_gather_fp16_weights_on_model_save", "stage3_gather_16bit_weights_on_model_save", same},
    {zero, "gather_fp16_weights_on_model_save", "stage3_gather_16bit_weights_on_model_save", same},
};

class Renamer {
 public:
  Renamer(const std::string& file, std::vector<std::string>& warnings, ConfigErrors& errors)
      : file_(file), warnings_(warnings), errors_(errors) {}

  void zero_as_bool(json& document) {
    json& section = document[zero];
    warn(zero,
         concat("as true or false is an old spelling; write {\"stage\": ", section == true ? 1 : 0, "}"));
    section = {{"stage", section == true ? 1 : 0}};
    if (!document.contains("allgather_size")) return;
    section["allgather_bucket_size"] = document["allgather_size"];
    document.erase("allgather_size");
  }

  void rename(json& object, const Renamed& r) {
    if (!object.contains(r.old_key)) return;
    const std::string old_path = path(r.section, r.old_key);
    const json value = r.value(object[r.old_key]);
    object.erase(r.old_key);
    if (*r.key == '\0') return warn(old_path, "is an old spelling without effect; remove it");
    warn(old_path, concat("is an old spelling; write ", path(r.section, r.key)));
    if (!value.is_null()) put(object, r.section, old_path, r.key, value);
  }

  /// Keys of stage 3 may be written without their prefix.
  void add_prefix(json& object) {
    for (const KeySpec& k : find_object(zero)->keys) {
      const std::string key = k.key;
      if (!key.starts_with("stage3_") || !object.contains(key.substr(7))) continue;
      const json value = object[key.substr(7)];
      object.erase(key.substr(7));
      put(object, zero, path(zero, key.substr(7)), key, value);
    }
  }

  std::map<std::string, std::string> sources;

 private:
  static std::string path(const std::string& section, const std::string& key) {
    return section.empty() ? key : section + "." + key;
  }
  void warn(const std::string& at, const std::string& what) {
    warnings_.push_back(escaped(concat(file_, ": ", at, ": ", what)));
  }
  void put(json& object, const std::string& section, const std::string& old_path, const std::string& key,
           const json& value) {
    const std::string now = path(section, key);
    const bool once = errors_.collect(ConfigErrors::Kind::value, now, [&] {
      require(!object.contains(key), Errc::config, escaped(file_), ": ", old_path,
              ": is another spelling of ", now, ", which is given too; remove one");
    });
    if (!once) return;
    object[key] = value;
    const std::string origin = "file, as " + old_path;
    sources[now] = origin;
    if (value.is_object())
      for (const auto& [inner, ignored] : value.items()) sources[path(now, inner)] = origin;
  }

  const std::string& file_;
  std::vector<std::string>& warnings_;
  ConfigErrors& errors_;
};

}  // namespace

std::map<std::string, std::string> rename_old_spellings(json& document, const std::string& file,
                                                        std::vector<std::string>& warnings,
                                                        ConfigErrors& errors) {
  Renamer renamer(file, warnings, errors);
  if (document.contains(zero) && document[zero].is_boolean()) renamer.zero_as_bool(document);
  for (const Renamed& r : renamed_keys) {
    if (*r.section == '\0') {
      renamer.rename(document, r);
    } else if (document.contains(r.section) && document[r.section].is_object()) {
      renamer.rename(document[r.section], r);
    }
  }
  if (document.contains(zero) && document[zero].is_object()) renamer.add_prefix(document[zero]);
  return std::move(renamer.sources);
}

}  // namespace rz::ds
