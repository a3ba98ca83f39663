#pragma once
/// The tokenizer.json of byte-level tokenizers that are made here.

#include <nlohmann/json_fwd.hpp>
#include <string>

namespace rz {

/// `use_regex`: GPT-2's pattern splits texts; otherwise a text is one word.
std::string byte_level_tokenizer_json(const nlohmann::ordered_json& vocabulary,
                                      const nlohmann::ordered_json& merges,
                                      const nlohmann::ordered_json& added_tokens, bool use_regex);

}  // namespace rz
