#pragma once
/// The tokenizer of models whose tokens are bytes, in Hugging Face's format.

#include <cstddef>
#include <string>

namespace rz {

/// tokenizer.json: the token of a byte is its value, and there are no others. AutoTokenizer reads it.
std::string byte_tokenizer_json();

/// Writes tokenizer.json and tokenizer_config.json beside a model that save_pretrained() has written, of
/// texts of at most `positions` tokens.
void save_byte_tokenizer(const std::string& folder, std::size_t positions);
/// Removes these files if they are those of save_byte_tokenizer(), e.g. of a former model in the folder.
void remove_byte_tokenizer(const std::string& folder);

}  // namespace rz
