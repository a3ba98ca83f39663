#pragma once
/// What the files of an adapter of LoRA are called, and its options: PEFT's adapter_config.json.

#include <string>
#include <string_view>

#include "../../autograd_lite/models/lora.h"
#include "../../autograd_lite/nn/module.h"

namespace rz {

class JsonObject;

inline constexpr const char* adapter_config_name = "adapter_config.json";
inline constexpr const char* adapter_weights_name = "adapter_model.safetensors";
/// PeftModel and LoraModel, which hold the model: names in the file begin with it.
inline constexpr std::string_view adapter_prefix = "base_model.model.";

struct AdapterConfig {
  LoraOptions options;
  bool fan_in_fan_out = false;  ///< the weights of its layers are [in, out]
};
/// The options of an adapter: of FOLDER/adapter_config.json, or of the file itself. Errc::config, "FILE: key:
/// reason", names a key that is wrong, or that requests what add_lora() lacks. Keys that are null, false or
/// empty, and those about its making, are ignored.
LoraOptions read_adapter_config(const std::string& path);
AdapterConfig read_adapter(const std::string& path);
AdapterConfig parse_adapter_config(const JsonObject&);
/// Errc::config, "FILE: key …", if options differ that decide on what A and B mean.
void require_same_options(const LoraOptions& stored, const LoraOptions& own, const std::string& file);
/// A line without its end about the adapter that a folder of a model has beside its weights, which
/// from_pretrained() of transformers applies, and nobody here unless it is named; empty if there is none.
std::string adapter_beside(const std::string& folder);
/// The file of weights of a folder, or the file itself. Errc::config if the folder has none.
std::string adapter_weights(const std::string& path);

/// The text of adapter_config.json for a module with LoRA.
std::string adapter_config_json(Module&, const std::string& base_model_name_or_path = "");

}  // namespace rz
