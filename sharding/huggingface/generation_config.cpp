#include "sharding/huggingface/generation_config.h"

#include <filesystem>
#include <nlohmann/json.hpp>

#include "comm/core/error.h"
#include "sharding/huggingface/config_values.h"
#include "sharding/huggingface/model_family.h"
#include "sharding/io/foreign_keys.h"
#include "sharding/io/json.h"

namespace rz {
namespace {

/// Refused is what would change texts and is not applied. Without effect is what does not change the text of
/// one prompt: what is returned, how fast it is made, what the file is.
constexpr ForeignKeys generation_keys[] = {
    {"eos_token_id repetition_penalty max_new_tokens max_length no_repeat_ngram_size bad_words_ids "
     "min_new_tokens suppress_tokens do_sample temperature top_k top_p min_p"},
    {"_from_model_config _name_or_path _commit_hash transformers_version bos_token_id pad_token_id "
     "decoder_start_token_id num_return_sequences output_attentions output_hidden_states output_scores "
     "output_logits return_dict_in_generate use_cache cache_implementation cache_config "
     "return_legacy_cache low_memory compile_config disable_compile prefill_chunk_size "
     "continuous_batching_config trust_remote_code early_stopping prompt_lookup_num_tokens "
     "max_matching_ngram_size num_assistant_tokens num_assistant_tokens_schedule "
     "assistant_confidence_threshold assistant_early_exit assistant_lookbehind target_lookbehind "
     "is_assistant use_model_defaults",
     Treatment::accepted},
    {"num_beams typical_p length_penalty encoder_repetition_penalty num_beam_groups guidance_scale "
     "top_h",
     Treatment::refused, "", "[1]"},
    {"penalty_alpha encoder_no_repeat_ngram_size epsilon_cutoff eta_cutoff diversity_penalty "
     "min_length",
     Treatment::refused, "", "[0]"},
    {"stop_strings max_time sequence_bias force_words_ids constraints renormalize_logits "
     "forced_bos_token_id forced_eos_token_id remove_invalid_values exponential_decay_length_penalty "
     "begin_suppress_tokens forced_decoder_ids token_healing watermarking_config dola_layers",
     Treatment::refused}};

/// Of a file that is about generation alone, keys that are not known here are refused too.
void refuse_other_keys(const JsonObject& o, bool is_of_generation) {
  for (const std::string& key : o.keys()) {
    const ForeignKeys* const row = find_keys(generation_keys, key);
    if ((row || is_of_generation) && !is_accepted(row, o.at(key)))
      o.fail_at(key, concat("is ", to_display(o.at(key)),
                            ", and this key is not applied here; take it out of a copy of the file, and give "
                            "that one: generate --generation-config FILE"));
  }
}

std::vector<std::int32_t> tokens_of(const JsonObject& o, const char* key, const nlohmann::json& list,
                                    std::size_t vocabulary) {
  std::vector<std::int32_t> tokens;
  if (!list.is_array()) o.fail_at(key, concat("must be a list of tokens, found ", to_display(list)));
  for (const nlohmann::json& token : list) {
    if (!token.is_number_unsigned() || token.get<std::uint64_t>() >= vocabulary)
      o.fail_at(key, concat("must have tokens below ", vocabulary, ", found ", to_display(token)));
    tokens.push_back(token.get<std::int32_t>());
  }
  return tokens;
}

double number_or(const JsonObject& o, const char* key, double absent, double min, double max) {
  return is_given(o, key) ? o.number(key, absent, min, max) : absent;
}

}  // namespace

GenerationConfig read_generation_config(const std::string& path, std::size_t vocabulary,
                                        std::size_t max_new_tokens) {
  constexpr double largest = 1e6;
  const nlohmann::json document = parse_json(read_text_file(path), path, JsonDialect::relaxed);
  const JsonObject o(document, path);
  refuse_other_keys(o, !o.has("model_type"));
  const auto size_or = [&](const char* key, std::int64_t absent) {
    return is_given(o, key) ? static_cast<std::size_t>(o.integer(key, absent, 0, max_positions))
                            : static_cast<std::size_t>(absent);
  };
  GenerationConfig c{.max_new_tokens = max_new_tokens, .temperature = 0};
  for (const std::size_t token : special_tokens(o, "eos_token_id", vocabulary))
    c.eos_token_id.push_back(static_cast<std::int32_t>(token));
  c.repetition_penalty = number_or(o, "repetition_penalty", 1, 1e-6, largest);
  if (is_given(o, "max_new_tokens")) {
    c.max_new_tokens = size_at(o, "max_new_tokens", max_positions);
  } else if (is_given(o, "max_length")) {
    c.max_length = size_at(o, "max_length", max_positions);
    c.max_new_tokens = c.max_length;
  }
  c.no_repeat_ngram_size = size_or("no_repeat_ngram_size", 0);
  if (is_given(o, "bad_words_ids")) {
    if (!o.at("bad_words_ids").is_array()) o.fail_at("bad_words_ids", "must be a list of lists of tokens");
    for (const nlohmann::json& word : o.at("bad_words_ids"))
      c.bad_words_ids.push_back(tokens_of(o, "bad_words_ids", word, vocabulary));
  }
  c.min_new_tokens = size_or("min_new_tokens", 0);
  if (is_given(o, "suppress_tokens"))
    c.suppress_tokens = tokens_of(o, "suppress_tokens", o.at("suppress_tokens"), vocabulary);
  if (is_given(o, "do_sample") && o.boolean("do_sample", false)) {
    c.temperature = number_or(o, "temperature", 1, 1e-6, largest);
    c.top_k = size_or("top_k", 50);
    c.top_p = number_or(o, "top_p", 1, 1e-6, 1);
    c.min_p = number_or(o, "min_p", 0, 0, 1);
  }
  return c;
}

GenerationConfig generation_config_from_pretrained(const std::string& folder, std::size_t vocabulary,
                                                   std::size_t max_new_tokens) {
  namespace fs = std::filesystem;
  const fs::path config = config_file(folder), own = config.parent_path() / "generation_config.json";
  return read_generation_config(fs::exists(own) ? own.string() : config.string(), vocabulary, max_new_tokens);
}

}  // namespace rz
