#pragma once
/// Families of language models in Hugging Face's format: their config.json, and names in their files.

#include <array>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "../../autograd_lite/models/language_model.h"

namespace rz {

class JsonObject;

/// Names of a family in its files of weights.
struct NameTable {
  std::string_view prefix;  ///< which names may lack, in the files or in the model
  /// Tensors of a file that are no weights. All three must hold.
  struct Ignored {
    std::string_view ending;  ///< of the name
    std::size_t dims;         ///< 0: one element
    std::string_view layer;   ///< beside whose parameters it is; empty: anywhere
  };
  std::array<Ignored, 3> ignored;
  std::string_view head, table;  ///< a model without a parameter `head` has `table` in its place
};

struct ModelFamily {
  std::string_view model_type;  ///< as in config.json, and in ModelFacts
  /// A model whose parameters have no memory. Errc::config, "FILE: key: reason", for a key that is missing or
  /// invalid, or requests what the family lacks here; `warnings` gets lines on keys whose absence changes
  /// results.
  std::unique_ptr<LanguageModel> (*make)(const JsonObject& config, std::vector<std::string>* warnings);
  std::string (*config_json)(const LanguageModel&);  ///< what make() and Hugging Face accept
  NameTable names;
  /// LoRA's layers where none are given: TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING of PEFT.
  std::array<std::string_view, 2> target_modules{};
};

/// The file of a configuration: `path`, or config.json in this folder, or, in a folder of checkpoints, that
/// of the one that `latest` names.
std::string config_file(const std::string& path);

}  // namespace rz
