#pragma once
/// The config.json of a GPT-2 in Hugging Face's format.

#include <string>
#include <vector>

#include "../../autograd_lite/models/gpt2.h"
#include "model_family.h"

namespace rz {

/// `path` as for config_file(). Errc::config, "FILE: key: reason", for a key that is missing or invalid, or
/// requests a feature that this GPT-2 lacks. Keys without effect here are ignored. Absent rates of dropout
/// are 0, where Hugging Face has 0.1: `warnings` gets a line on it.
Gpt2Config read_gpt2_config(const std::string& path, std::vector<std::string>* warnings = nullptr);
/// JSON that read_gpt2_config and Hugging Face accept. In its folder AutoTokenizer reads a tokenizer.json,
/// and fails without one.
std::string to_json(const Gpt2Config&);

/// The masks of attention are in the files of GPT-2.
extern const ModelFamily gpt2_family;

}  // namespace rz
