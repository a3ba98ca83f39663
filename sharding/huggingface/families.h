#pragma once
/// The language models that are known by their config.json.

#include <memory>
#include <string>
#include <vector>

#include "model_family.h"

namespace rz {

/// The family of a model.
const ModelFamily& family_of(const LanguageModel&);

/// Names in the files of all families.
std::vector<NameTable> name_tables();

/// The model of a configuration, as AutoModelForCausalLM.from_config(): the family that its model_type names,
/// GPT-2 if there is none. `path` as for config_file(). Errors and warnings are those of ModelFamily::make.
std::unique_ptr<LanguageModel> language_model_from_config(const std::string& path,
                                                          std::vector<std::string>* warnings = nullptr);
/// JSON that language_model_from_config() and Hugging Face accept. In its folder AutoTokenizer reads a
/// tokenizer.json, and fails without one.
std::string config_json(const LanguageModel&);

}  // namespace rz
