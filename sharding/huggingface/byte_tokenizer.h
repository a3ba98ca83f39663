#pragma once
/// The tokenizer of models whose tokens are bytes, in Hugging Face's format.

#include <string>

#include "autograd_lite/models/gpt2.h"

namespace rz {

/// tokenizer.json: the token of a byte is its value, and there are no others. AutoTokenizer reads it.
std::string byte_tokenizer_json();

/// Writes tokenizer.json and tokenizer_config.json beside a model that save_pretrained() has written.
void save_byte_tokenizer(const std::string& folder, const Gpt2Config&);
/// Removes these files if they are those of save_byte_tokenizer(), e.g. of a former model in the folder.
void remove_byte_tokenizer(const std::string& folder);

}  // namespace rz
