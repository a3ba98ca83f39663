#pragma once
/// How a model of Hugging Face is meant to be sampled from: generation_config.json.

#include <string>
#include <vector>

#include "autograd_lite/models/generate.h"

namespace rz {

/// The options of generate() in a folder's generation_config.json, as GenerationConfig.from_pretrained();
/// without this file those of its config.json, which has the tokens that end a text. Absent keys have Hugging
/// Face's defaults: greedy (a temperature of 0) unless `do_sample` is true, and then the 50 likeliest tokens.
/// `folder` may be one of checkpoints. Tokens >= `vocabulary` are left out. Keys of other ways to search,
/// such as num_beams, have no effect and come as lines in `warnings` if they ask for one. Errc::config,
/// "FILE: key: reason", for a value out of range.
GenerationConfig generation_config_from_pretrained(const std::string& folder, std::size_t vocabulary,
                                                   std::vector<std::string>* warnings = nullptr);

}  // namespace rz
