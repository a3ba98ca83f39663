#include <filesystem>

#include "comm/core/error.h"
#include "sharding/config/typed.h"

namespace rz::ds {
namespace {

std::string checkpoint_key(const char* key) { return concat("ringzero.checkpoint.", key); }

/// A folder, "true" or empty. The words true and false come from command lines.
std::string resumed_folder(const Settings& s, const std::string& file) {
  const std::string path = checkpoint_key("resume_from_checkpoint");
  const nlohmann::json& value = s.at(path);
  if (value.is_boolean()) return value.get<bool>() ? "true" : "";
  require(value.is_string(), Errc::config, file, ": ", path, ": expected true, false or a folder, found ",
          to_display(value));
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
void require_output_dir(const Settings& s, const std::string& file) {
  const auto needs = [&](const char* key, bool set) {
    require(!set, Errc::config, file, ": ", checkpoint_key(key), ": needs a folder; set ",
            checkpoint_key("output_dir"));
  };
  for (const char* key : {"save_steps", "save_minutes", "save_total_limit"})
    needs(key, s.integer(checkpoint_key(key)) != 0);
  for (const char* key : {"async_save", "load_best_model_at_end"}) needs(key, s.boolean(checkpoint_key(key)));
  needs("resume_from_checkpoint", resumed_folder(s, file) == "true");
}

/// Hugging Face's names of metrics begin with "eval_", which may be left out.
std::string evaluated_metric(const Settings& s, const std::string& file) {
  const std::string path = checkpoint_key("metric_for_best_model"), name = s.text(path);
  require(!name.empty(), Errc::config, file, ": ", path, ": is empty; name a metric, e.g. eval_loss");
  return name.starts_with("eval_") ? name : "eval_" + name;
}

}  // namespace

CheckpointConfig typed_checkpoint(Settings& s, const std::string& file) {
  const auto at = checkpoint_key;
  const std::string resumed = resumed_folder(s, file);
  if (s.text(at("output_dir")).empty() && !resumed.empty() && resumed != "true")
    s.replace(at("output_dir"), folder_of_checkpoints(resumed), "resume_from_checkpoint");
  CheckpointConfig c;
  c.output_dir = s.text(at("output_dir"));
  if (!c.saves()) require_output_dir(s, file);
  c.save_steps = s.integer(at("save_steps"));
  c.save_minutes = s.integer(at("save_minutes"));
  c.save_total_limit = s.integer(at("save_total_limit"));
  c.async_save = s.boolean(at("async_save"));
  c.signals = s.boolean(at("signals"));
  c.stop_before_allocation_end = s.boolean(at("stop_before_allocation_end"));
  c.allocation_margin = s.integer(at("allocation_margin"));
  c.resume_from_checkpoint = resumed == "true" ? c.output_dir : resumed;
  c.resume_required = !resumed.empty() && resumed != "true";
  c.eval_steps = s.integer(at("eval_steps"));
  c.metric_for_best_model = evaluated_metric(s, file);
  const auto& greater = s.at(at("greater_is_better"));
  c.greater_is_better = greater.is_null() ? !c.metric_for_best_model.ends_with("loss") : greater.get<bool>();
  c.load_best_model_at_end = s.boolean(at("load_best_model_at_end"));
  c.early_stopping_patience = s.optional_integer(at("early_stopping_patience"));
  c.early_stopping_threshold = s.number(at("early_stopping_threshold"));
  return c;
}

}  // namespace rz::ds
