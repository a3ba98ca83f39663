#pragma once
/// Hugging Face's config.json of a GPT-2.

#include <string>

#include "autograd_lite/models/gpt2.h"

namespace rz::train_gpt {

/// Errc::config, "FILE: key: what", for what is missing, wrong, or would need what this GPT-2 does not do.
/// Keys that change nothing here are ignored.
Gpt2Config read_model_config(const std::string& path);
/// JSON that read_model_config and Hugging Face read.
std::string to_json(const Gpt2Config&);

}  // namespace rz::train_gpt
