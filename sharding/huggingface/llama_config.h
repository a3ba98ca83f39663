#pragma once
/// The config.json of Llama, Mistral, Qwen2 and Qwen3 in Hugging Face's format.

#include <string>

#include "../../autograd_lite/models/llama.h"
#include "model_family.h"

namespace rz {

/// `path` as for config_file(). Reads the spellings of transformers 4 (rope_theta, rope_scaling) and 5
/// (rope_parameters), of which rope_scaling is used where both are. Errc::config, "FILE: key: reason", for a
/// key that is missing or invalid, or requests what these models lack here. Keys without effect here are
/// ignored.
LlamaConfig read_llama_config(const std::string& path);
/// JSON that read_llama_config and Hugging Face accept.
std::string to_json(const LlamaConfig&);

extern const ModelFamily llama_family, mistral_family, qwen2_family, qwen3_family;

}  // namespace rz
