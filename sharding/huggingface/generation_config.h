#pragma once
/// How a model of Hugging Face is meant to be sampled from: generation_config.json.

#include <cstddef>
#include <string>

#include "../../autograd_lite/models/generate.h"

namespace rz {

/// The options of generate() in a folder's generation_config.json, as GenerationConfig.from_pretrained();
/// without this file those of its config.json. Absent keys have Hugging Face's defaults: greedy (a
/// temperature of 0) unless `do_sample` is true, and then the 50 likeliest tokens. `folder` may be one of
/// checkpoints. Tokens of eos_token_id that are >= `vocabulary` are left out. Errc::config, "FILE: key:
/// reason", for a value out of range, and for a key that would change texts and is not applied, such as
/// num_beams and stop_strings, or that is not known, unless its value changes nothing. `max_new_tokens`:
/// where the keys are absent.
GenerationConfig generation_config_from_pretrained(const std::string& folder, std::size_t vocabulary,
                                                   std::size_t max_new_tokens = 20);
/// The same of one file.
GenerationConfig read_generation_config(const std::string& path, std::size_t vocabulary,
                                        std::size_t max_new_tokens = 20);

}  // namespace rz
