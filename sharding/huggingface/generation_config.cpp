#include "sharding/huggingface/generation_config.h"

#include <filesystem>
#include <nlohmann/json.hpp>
#include <utility>

#include "comm/core/error.h"
#include "sharding/huggingface/config_values.h"
#include "sharding/huggingface/model_family.h"
#include "sharding/io/json.h"

namespace rz {
namespace {

/// Keys that change texts and have no counterpart, with the value that changes nothing.
constexpr std::pair<const char*, double> other_searches[] = {
    {"num_beams", 1},           {"penalty_alpha", 0},
    {"typical_p", 1},           {"no_repeat_ngram_size", 0},
    {"length_penalty", 1},      {"encoder_repetition_penalty", 1},
    {"epsilon_cutoff", 0},      {"eta_cutoff", 0},
    {"diversity_penalty", 0},   {"num_beam_groups", 1},
    {"guidance_scale", 1},      {"min_length", 0},
    {"min_new_tokens", 0},      {"renormalize_logits", 0},
    {"suppress_tokens", 0},     {"begin_suppress_tokens", 0},
    {"forced_bos_token_id", 0}, {"forced_eos_token_id", 0},
    {"bad_words_ids", 0},       {"sequence_bias", 0}};

void warn_of_other_searches(const JsonObject& o, std::vector<std::string>& warnings) {
  for (const auto& [key, neutral] : other_searches) {
    if (!is_given(o, key)) continue;
    const nlohmann::json& value = o.at(key);
    const bool changes_nothing = (value.is_number() && value.get<double>() == neutral) ||
                                 (value.is_boolean() && !value.get<bool>()) ||
                                 (value.is_array() && value.empty());
    if (!changes_nothing)
      warnings.push_back(concat(o.file(), ": ", key, ": ", to_display(value), " has no effect here"));
  }
}

double number_or(const JsonObject& o, const char* key, double absent, double min, double max) {
  return is_given(o, key) ? o.number(key, absent, min, max) : absent;
}

}  // namespace

GenerationConfig generation_config_from_pretrained(const std::string& folder, std::size_t vocabulary,
                                                   std::vector<std::string>* warnings) {
  namespace fs = std::filesystem;
  const fs::path config = config_file(folder), own = config.parent_path() / "generation_config.json";
  const std::string path = (fs::exists(own) ? own : config).string();
  const nlohmann::json document = parse_json(read_text_file(path), path, JsonDialect::relaxed);
  const JsonObject o(document, path);
  GenerationConfig c{.temperature = 0};
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
  if (warnings) warn_of_other_searches(o, *warnings);
  return c;
}

}  // namespace rz
