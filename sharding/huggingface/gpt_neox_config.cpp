#include "sharding/huggingface/gpt_neox_config.h"

#include <nlohmann/json.hpp>

#include "autograd_lite/models/gpt_neox.h"
#include "comm/core/error.h"
#include "sharding/huggingface/config_values.h"
#include "sharding/io/json.h"

namespace rz {
namespace {

GptNeoxConfig gpt_neox_config(const JsonObject& o) {
  refuse_other_models(o);
  GptNeoxConfig c;
  c.vocab_size = size_at(o, "vocab_size", (std::int64_t{1} << 31) - 1);
  c.hidden_size = size_at(o, "hidden_size", 1 << 20);
  c.intermediate_size = size_at(o, "intermediate_size", 1 << 22);
  c.num_hidden_layers = size_at(o, "num_hidden_layers", 1 << 16);
  c.num_attention_heads = size_at(o, "num_attention_heads", 1 << 16);
  check_layer_types(o, std::vector<bool>(c.num_hidden_layers));
  c.max_position_embeddings = size_at(o, "max_position_embeddings", 2048, max_positions);
  c.hidden_act = o.text("hidden_act", c.hidden_act);
  c.layer_norm_eps = o.number("layer_norm_eps", c.layer_norm_eps, 0, 1);
  const RopeConfig rope =
      rope_of(o, c.max_position_embeddings, {"rotary_emb_base", c.rope.theta}, {"rotary_pct", c.rotary_pct});
  c.rope = rope.options, c.rotary_pct = rope.partial_rotary_factor;
  c.use_parallel_residual = o.boolean("use_parallel_residual", true);
  c.attention_bias = o.boolean("attention_bias", true);
  c.tie_word_embeddings = o.boolean("tie_word_embeddings", false);
  c.attention_dropout = o.number("attention_dropout", 0, 0, 1);
  c.hidden_dropout = o.number("hidden_dropout", 0, 0, 1);
  c.initializer_range = o.number("initializer_range", c.initializer_range, 0, 1);
  c.pad_token_id = special_token(o, "pad_token_id", c.vocab_size);
  c.bos_token_id = special_token(o, "bos_token_id", c.vocab_size, 0);
  c.eos_token_id = special_tokens(o, "eos_token_id", c.vocab_size, 2);
  try {
    check(c);
  } catch (const Error& e) {
    fail(e.code(), o.file(), ": ", e.what());
  }
  return c;
}

std::unique_ptr<LanguageModel> make_gpt_neox(const JsonObject& config, std::vector<std::string>*) {
  return std::make_unique<GptNeox>(gpt_neox_config(config));
}

std::string gpt_neox_json(const LanguageModel& model) {
  const GptNeoxConfig& c = dynamic_cast<const GptNeox&>(model).config();
  nlohmann::ordered_json all{
      {"model_type", "gpt_neox"},
      {"architectures", {"GPTNeoXForCausalLM"}},
      {"hidden_act", c.hidden_act},
      {"vocab_size", c.vocab_size},
      {"hidden_size", c.hidden_size},
      {"intermediate_size", c.intermediate_size},
      {"num_hidden_layers", c.num_hidden_layers},
      {"num_attention_heads", c.num_attention_heads},
      {"max_position_embeddings", c.max_position_embeddings},
      {"layer_norm_eps", c.layer_norm_eps},
      {"rotary_pct", c.rotary_pct},
      {"rotary_emb_base", c.rope.theta},
      {"rope_scaling", scaling_json(c.rope)},
      {"use_parallel_residual", c.use_parallel_residual},
      {"attention_bias", c.attention_bias},
      {"tie_word_embeddings", c.tie_word_embeddings},
      {"attention_dropout", c.attention_dropout},
      {"hidden_dropout", c.hidden_dropout},
      {"initializer_range", c.initializer_range},
      {"bos_token_id", token_or_null(c.bos_token_id)},
      {"eos_token_id", tokens_or_null(c.eos_token_id)},
  };
  if (c.pad_token_id) all["pad_token_id"] = *c.pad_token_id;
  return all.dump(2) + "\n";
}

}  // namespace

constinit const ModelFamily gpt_neox_family{.model_type = "gpt_neox",
                                            .make = make_gpt_neox,
                                            .config_json = gpt_neox_json,
                                            .names = {"gpt_neox.",
                                                      {{{"attention.bias", 4, "query_key_value."},
                                                        {"attention.masked_bias", 0, "query_key_value."},
                                                        {"rotary_emb.inv_freq", 1, ""}}},
                                                      "embed_out.weight",
                                                      "embed_in.weight"},
                                            .target_modules = {"query_key_value"}};

}  // namespace rz
