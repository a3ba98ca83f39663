#include "sharding/huggingface/gpt2_config.h"

#include <nlohmann/json.hpp>

#include "comm/core/error.h"
#include "sharding/huggingface/config_values.h"
#include "sharding/io/json.h"

namespace rz {
namespace {

std::size_t positions(const JsonObject& o) {
  constexpr std::int64_t max_value = 1 << 24;
  const char* const key = spelling(o, "n_positions", "max_position_embeddings");
  return size_at(o, is_given(o, key) || !is_given(o, "n_ctx") ? key : "n_ctx", max_value);
}

void require_text(const JsonObject& o, const char* key, const char* value) {
  if (o.has(key) && o.text(key, "") != value)
    o.fail_at(key, concat("must be \"", value, "\", found ", to_display(o.at(key))));
}

void require_flag(const JsonObject& o, const char* key, bool value) {
  if (o.boolean(key, value) != value)
    o.fail_at(
        key, concat("is ", !value, ", which this GPT-2 lacks: its results would be others than the model's"));
}

/// Throws for variants that change results and are not implemented here.
void refuse_variants(const JsonObject& o, const Gpt2Config& c) {
  require_text(o, "model_type", "gpt2");
  refuse_other_models(o);
  check_layer_types(o, std::vector<bool>(c.n_layer));
  // Two names of one function.
  if (o.text("activation_function", "gelu_new") != "gelu_pytorch_tanh")
    require_text(o, "activation_function", "gelu_new");
  require_flag(o, "scale_attn_weights", true);
  require_flag(o, "scale_attn_by_inverse_layer_idx", false);
  require_flag(o, "add_cross_attention", false);
  if (o.has("n_inner") && !o.at("n_inner").is_null() && o.at("n_inner") != 4 * c.n_embd)
    o.fail_at("n_inner",
              concat("must be null or 4 · n_embd = ", 4 * c.n_embd, ", found ", to_display(o.at("n_inner"))));
}

/// Training with other rates gives another model.
void warn_of_dropout(const JsonObject& o, std::vector<std::string>& warnings) {
  std::string absent;
  for (const char* key : {"embd_pdrop", "attn_pdrop", "resid_pdrop"})
    if (!o.has(key)) absent += concat(absent.empty() ? "" : ", ", key);
  if (!absent.empty())
    warnings.push_back(
        concat(o.file(), ": ", absent, ": absent, which is 0 here and 0.1 in Hugging Face; give the rate"));
}

Gpt2Config gpt2_config(const JsonObject& o, std::vector<std::string>* warnings) {
  constexpr std::int64_t last_token = 50256;  // of GPT-2's vocabulary: Hugging Face's default
  Gpt2Config c;
  c.n_layer = size_at(o, spelling(o, "n_layer", "num_hidden_layers"), 1 << 16);
  c.n_head = size_at(o, spelling(o, "n_head", "num_attention_heads"), 1 << 16);
  c.n_embd = size_at(o, spelling(o, "n_embd", "hidden_size"), 1 << 20);
  c.n_positions = positions(o);
  c.vocab_size = size_at(o, "vocab_size", (std::int64_t{1} << 31) - 1);
  c.layer_norm_epsilon = o.number("layer_norm_epsilon", 1e-5, 0, 1);
  c.tie_word_embeddings = o.boolean("tie_word_embeddings", true);
  c.initializer_range = o.number("initializer_range", 0.02, 0, 1);
  c.embd_pdrop = o.number("embd_pdrop", 0, 0, 1);
  c.attn_pdrop = o.number("attn_pdrop", 0, 0, 1);
  c.resid_pdrop = o.number("resid_pdrop", 0, 0, 1);
  c.pad_token_id = special_token(o, "pad_token_id", c.vocab_size);
  c.bos_token_id = special_token(o, "bos_token_id", c.vocab_size, last_token);
  c.eos_token_id = special_tokens(o, "eos_token_id", c.vocab_size, last_token);
  refuse_variants(o, c);
  if (warnings) warn_of_dropout(o, *warnings);
  try {
    check(c);
  } catch (const Error& e) {
    fail(e.code(), o.file(), ": ", e.what());
  }
  return c;
}

std::unique_ptr<LanguageModel> make_gpt2(const JsonObject& config, std::vector<std::string>* warnings) {
  return std::make_unique<Gpt2>(gpt2_config(config, warnings));
}

std::string gpt2_json(const LanguageModel& model) {
  return to_json(dynamic_cast<const Gpt2&>(model).config());
}

}  // namespace

constinit const ModelFamily gpt2_family{
    .model_type = "gpt2",
    .make = make_gpt2,
    .config_json = gpt2_json,
    .names = {"transformer.",
              {{{"attn.bias", 4, "c_attn."}, {"attn.masked_bias", 0, "c_attn."}}},
              "lm_head.weight",
              "wte.weight"},
    .target_modules = {"c_attn"}};

Gpt2Config read_gpt2_config(const std::string& given, std::vector<std::string>* warnings) {
  const std::string path = config_file(given);
  const nlohmann::json document = parse_json(read_text_file(path), path, JsonDialect::relaxed);
  return gpt2_config(JsonObject(document, path), warnings);
}

std::string to_json(const Gpt2Config& c) {
  nlohmann::ordered_json all{
      {"model_type", "gpt2"},
      {"architectures", {"GPT2LMHeadModel"}},
      {"activation_function", "gelu_new"},
      {"n_layer", c.n_layer},
      {"n_head", c.n_head},
      {"n_embd", c.n_embd},
      {"n_positions", c.n_positions},
      {"n_ctx", c.n_positions},
      {"vocab_size", c.vocab_size},
      {"layer_norm_epsilon", c.layer_norm_epsilon},
      {"tie_word_embeddings", c.tie_word_embeddings},
      {"initializer_range", c.initializer_range},
      {"embd_pdrop", c.embd_pdrop},
      {"attn_pdrop", c.attn_pdrop},
      {"resid_pdrop", c.resid_pdrop},
      {"bos_token_id", token_or_null(c.bos_token_id)},
      {"eos_token_id", tokens_or_null(c.eos_token_id)},
      // Without it AutoTokenizer makes an empty tokenizer where there is no file of one.
      {"tokenizer_class", "PreTrainedTokenizerFast"},
  };
  if (c.pad_token_id) all["pad_token_id"] = *c.pad_token_id;
  return all.dump(2) + "\n";
}

}  // namespace rz
