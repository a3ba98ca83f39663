#include "sharding/huggingface/generation_config.h"

#include <algorithm>
#include <filesystem>
#include <iterator>
#include <nlohmann/json.hpp>
#include <string_view>
#include <utility>

#include "comm/core/error.h"
#include "sharding/huggingface/config_values.h"
#include "sharding/huggingface/model_family.h"
#include "sharding/io/json.h"

namespace rz {
namespace {

/// Keys that are read.
constexpr std::string_view applied_keys[] = {
    "eos_token_id", "repetition_penalty", "max_new_tokens", "do_sample", "temperature", "top_k", "top_p",
    "min_p"};

/// Keys that do not change the text of one prompt: what is returned, how fast it is made, what the file is.
constexpr std::string_view without_effect[] = {"_from_model_config",
                                               "_name_or_path",
                                               "_commit_hash",
                                               "transformers_version",
                                               "bos_token_id",
                                               "pad_token_id",
                                               "decoder_start_token_id",
                                               "num_return_sequences",
                                               "output_attentions",
                                               "output_hidden_states",
                                               "output_scores",
                                               "output_logits",
                                               "return_dict_in_generate",
                                               "use_cache",
                                               "cache_implementation",
                                               "cache_config",
                                               "return_legacy_cache",
                                               "low_memory",
                                               "compile_config",
                                               "disable_compile",
                                               "prefill_chunk_size",
                                               "continuous_batching_config",
                                               "trust_remote_code",
                                               "early_stopping",
                                               "prompt_lookup_num_tokens",
                                               "max_matching_ngram_size",
                                               "num_assistant_tokens",
                                               "num_assistant_tokens_schedule",
                                               "assistant_confidence_threshold",
                                               "assistant_early_exit",
                                               "assistant_lookbehind",
                                               "target_lookbehind",
                                               "is_assistant",
                                               "use_model_defaults"};

/// Other keys, with the value that changes nothing. One that is not here, or none, has no such number.
constexpr std::pair<std::string_view, double> neutral_values[] = {{"num_beams", 1},
                                                                  {"typical_p", 1},
                                                                  {"length_penalty", 1},
                                                                  {"encoder_repetition_penalty", 1},
                                                                  {"num_beam_groups", 1},
                                                                  {"guidance_scale", 1},
                                                                  {"top_h", 1},
                                                                  {"max_length", 20},
                                                                  {"penalty_alpha", 0},
                                                                  {"no_repeat_ngram_size", 0},
                                                                  {"encoder_no_repeat_ngram_size", 0},
                                                                  {"epsilon_cutoff", 0},
                                                                  {"eta_cutoff", 0},
                                                                  {"diversity_penalty", 0},
                                                                  {"min_length", 0},
                                                                  {"min_new_tokens", 0}};

bool changes_nothing(std::string_view key, const nlohmann::json& value) {
  if (value.is_null() || value == false) return true;
  if (value.is_array() || value.is_object()) return value.empty();
  const auto neutral = std::ranges::find(neutral_values, key, &std::pair<std::string_view, double>::first);
  return neutral != std::end(neutral_values) && value.is_number() && value.get<double>() == neutral->second;
}

/// Keys that would change texts, also those that are not known here.
void warn_of_other_keys(const JsonObject& o, std::vector<std::string>& warnings) {
  for (const std::string& key : o.keys())
    if (std::ranges::find(applied_keys, key) == std::end(applied_keys) &&
        std::ranges::find(without_effect, key) == std::end(without_effect) &&
        !changes_nothing(key, o.at(key)))
      warnings.push_back(concat(o.file(), ": ", key, ": ", to_display(o.at(key)), " has no effect here"));
}

double number_or(const JsonObject& o, const char* key, double absent, double min, double max) {
  return is_given(o, key) ? o.number(key, absent, min, max) : absent;
}

}  // namespace

GenerationConfig generation_config_from_pretrained(const std::string& folder, std::size_t vocabulary,
                                                   std::vector<std::string>* warnings,
                                                   std::size_t max_new_tokens) {
  namespace fs = std::filesystem;
  const fs::path config = config_file(folder), own = config.parent_path() / "generation_config.json";
  const std::string path = (fs::exists(own) ? own : config).string();
  const nlohmann::json document = parse_json(read_text_file(path), path, JsonDialect::relaxed);
  const JsonObject o(document, path);
  GenerationConfig c{.max_new_tokens = max_new_tokens, .temperature = 0};
  for (const std::size_t token : special_tokens(o, "eos_token_id", vocabulary))
    c.eos_token_id.push_back(static_cast<std::int32_t>(token));
  if (path == config) return c;
  constexpr double largest = 1e6;
  c.repetition_penalty = number_or(o, "repetition_penalty", 1, 1e-6, largest);
  if (is_given(o, "max_new_tokens")) c.max_new_tokens = size_at(o, "max_new_tokens", max_positions);
  if (is_given(o, "do_sample") && o.boolean("do_sample", false)) {
    c.temperature = number_or(o, "temperature", 1, 1e-6, largest);
    c.top_k = is_given(o, "top_k") ? static_cast<std::size_t>(o.integer("top_k", 50, 0, max_positions)) : 50;
    c.top_p = number_or(o, "top_p", 1, 1e-6, 1);
    c.min_p = number_or(o, "min_p", 0, 0, 1);
  }
  if (warnings) warn_of_other_keys(o, *warnings);
  return c;
}

}  // namespace rz
