#pragma once
/// How a model of Hugging Face is meant to be sampled from: generation_config.json.

#include <string>
#include <vector>

#include "../../autograd_lite/models/generate.h"

namespace rz {

/// The options of generate() in a folder's generation_config.json, as GenerationConfig.from_pretrained();
/// without this file those of its config.json, which has the tokens that end a text. Absent keys have Hugging
/// Face's defaults: greedy (a temperature of 0) unless `do_sample` is true, and then the 50 likeliest tokens.
/// `folder` may be one of checkpoints. Tokens >= `vocabulary` are left out. Other keys that would
/// change texts, such as num_beams and stop_strings, and keys that are unknown, have no effect and come as
/// lines in `warnings`, unless their value changes nothing. Errc::config,
/// "FILE: key: reason", for a value out of range. `max_new_tokens`: where the key is absent.
GenerationConfig generation_config_from_pretrained(const std::string& folder, std::size_t vocabulary,
                                                   std::vector<std::string>* warnings = nullptr,
                                                   std::size_t max_new_tokens = 20);

}  // namespace rz
