#include "sharding/huggingface/families.h"

#include <filesystem>
#include <nlohmann/json.hpp>
#include <utility>

#include "comm/core/error.h"
#include "sharding/huggingface/gpt2_config.h"
#include "sharding/huggingface/gpt_neox_config.h"
#include "sharding/huggingface/llama_config.h"
#include "sharding/io/json.h"
#include "sharding/io/text.h"

namespace rz {
namespace {

/// The first is that of a config.json without model_type.
constexpr const ModelFamily* families[] = {&gpt2_family,  &llama_family, &mistral_family,
                                           &qwen2_family, &qwen3_family, &gpt_neox_family};

const ModelFamily* find_family(std::string_view model_type) {
  for (const ModelFamily* f : families)
    if (f->model_type == model_type) return f;
  return nullptr;
}

std::string known_types() {
  std::string names;
  for (const ModelFamily* f : families) names += concat(names.empty() ? "\"" : " or \"", f->model_type, '"');
  return names;
}

}  // namespace

const ModelFamily& family_of(const LanguageModel& model) {
  const std::string_view type = model.facts().model_type;
  const ModelFamily* family = find_family(type);
  require(family, Errc::invalid_argument, "the model_type ", type, " is none of ", known_types());
  return *family;
}

std::vector<NameTable> name_tables() {
  std::vector<NameTable> all;
  for (const ModelFamily* f : families) all.push_back(f->names);
  return all;
}

std::unique_ptr<LanguageModel> language_model_from_config(const std::string& given,
                                                          std::vector<std::string>* warnings) {
  std::error_code unreadable;
  require(
      std::filesystem::exists(given, unreadable), Errc::config, escaped(given),
      ": no such file or folder; give config.json, or the folder of a model on this machine (of a name on "
      "Hugging Face's hub: huggingface-cli download NAME --local-dir FOLDER)");
  const std::string path = config_file(given);
  const nlohmann::json document = parse_json(read_text_file(path), path, JsonDialect::relaxed);
  const JsonObject config(document, path);
  const ModelFamily* family = find_family(config.text("model_type", std::string(families[0]->model_type)));
  if (!family)
    config.fail_at("model_type",
                   concat("must be ", known_types(), ", found ", to_display(config.at("model_type"))));
  std::unique_ptr<LanguageModel> model = family->make(config, warnings);
  namespace fs = std::filesystem;
  const fs::path name = fs::is_directory(given) ? fs::path(given) : fs::path(given).parent_path();
  LanguageModel::Origin origin{.folder = fs::absolute(path).parent_path().string(),
                               .name = name.empty() ? "." : name.string()};
  for (const std::string_view name : family->target_modules)
    if (!name.empty()) origin.target_modules.emplace_back(name);
  model->set_origin(std::move(origin));
  return model;
}

std::string config_json(const LanguageModel& model) { return family_of(model).config_json(model); }

}  // namespace rz
