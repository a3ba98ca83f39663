#include "sharding/huggingface/llama_config.h"

#include <nlohmann/json.hpp>
#include <optional>

#include "comm/core/error.h"
#include "sharding/huggingface/config_values.h"
#include "sharding/io/json.h"

namespace rz {
namespace {

/// Where a family has a window of keys.
enum class Window {
  none,
  all_layers,   ///< without the key, too
  last_layers,  ///< from max_window_layers, if use_sliding_window is true
};

/// What distinguishes the families of this shape: their names, values of absent keys, keys that they have.
struct Variant {
  std::string_view model_type, name;  ///< name: for people
  const char* architecture;
  std::int64_t bos = -1, eos = -1;  ///< bos_token_id, eos_token_id; -1: none
  std::int64_t kv_heads = 0;        ///< 0: as many as heads
  std::int64_t head_dim = 0;        ///< 0: hidden_size / heads
  std::int64_t positions = 2048;    ///< max_position_embeddings
  Window window = Window::none;
  bool attention_bias = false;  ///< the key is read
  bool mlp_bias = false;        ///< the key is read
  bool qkv_bias = false;        ///< always
  bool qk_norm = false;         ///< always
};
constexpr Variant variants[] = {
    {.model_type = "llama",
     .name = "Llama",
     .architecture = "LlamaForCausalLM",
     .bos = 1,
     .eos = 2,
     .attention_bias = true,
     .mlp_bias = true},
    {.model_type = "mistral",
     .name = "Mistral",
     .architecture = "MistralForCausalLM",
     .bos = 1,
     .eos = 2,
     .kv_heads = 8,
     .positions = 4096 * 32,
     .window = Window::all_layers},
    {.model_type = "qwen2",
     .name = "Qwen2",
     .architecture = "Qwen2ForCausalLM",
     .kv_heads = 32,
     .positions = 32768,
     .window = Window::last_layers,
     .qkv_bias = true},
    {.model_type = "qwen3",
     .name = "Qwen3",
     .architecture = "Qwen3ForCausalLM",
     .kv_heads = 32,
     .head_dim = 128,
     .positions = 32768,
     .window = Window::last_layers,
     .attention_bias = true,
     .qk_norm = true},
};

const Variant* find_variant(std::string_view model_type) {
  for (const Variant& v : variants)
    if (v.model_type == model_type) return &v;
  return nullptr;
}

std::string known_variants() {
  std::string names;
  for (const Variant& v : variants) names += concat(names.empty() ? "\"" : " or \"", v.model_type, '"');
  return names;
}

void read_window(const JsonObject& o, const Variant& of, LlamaConfig& c) {
  if (of.window == Window::none) return;
  const bool of_all = of.window == Window::all_layers;
  const bool none = o.has("sliding_window") && o.at("sliding_window").is_null();
  if (none || (!of_all && !o.boolean("use_sliding_window", false))) return;
  c.sliding_window = size_at(o, "sliding_window", 4096, max_positions);
  if (!of_all) c.max_window_layers = static_cast<std::size_t>(o.integer("max_window_layers", 28, 0, 1 << 16));
}

std::vector<bool> sliding_layers(const LlamaConfig& c) {
  std::vector<bool> all;
  for (std::size_t l = 0; l < c.num_hidden_layers; ++l)
    all.push_back(c.sliding_window && l >= c.max_window_layers);
  return all;
}

/// Null is as many as heads, another number than that of an absent key.
std::int64_t key_value_heads(const JsonObject& o, const Variant& of, std::int64_t heads) {
  return of.kv_heads && !o.has("num_key_value_heads") ? of.kv_heads : heads;
}

void refuse_partial_rotation(const JsonObject& o) {
  if (o.number("partial_rotary_factor", 1, 0, 1) != 1)
    o.fail_at("partial_rotary_factor", "must be 1: all channels of a head are rotated here");
}

void refuse_variants(const JsonObject& o) {
  // Two names of one function.
  if (o.text("hidden_act", "silu") != "silu" && o.text("hidden_act", "") != "swish")
    o.fail_at("hidden_act", concat("must be \"silu\", found ", to_display(o.at("hidden_act"))));
  refuse_other_models(o);
  refuse_partial_rotation(o);
  for (const char* key : {"rope_scaling", "rope_parameters"})
    if (is_given(o, key)) refuse_partial_rotation(o.object(key));
}

LlamaConfig llama_config(const JsonObject& o) {
  const std::string type = o.text("model_type", "llama");
  const Variant* const found = find_variant(type);
  if (!found)
    o.fail_at("model_type", concat("must be ", known_variants(), ", found ", to_display(o.at("model_type"))));
  const Variant& of = *found;
  LlamaConfig c;
  c.model_type = of.model_type, c.name = of.name;
  refuse_variants(o);
  c.vocab_size = size_at(o, "vocab_size", (std::int64_t{1} << 31) - 1);
  c.hidden_size = size_at(o, "hidden_size", 1 << 20);
  c.intermediate_size = size_at(o, "intermediate_size", 1 << 22);
  c.num_hidden_layers = size_at(o, "num_hidden_layers", 1 << 16);
  c.num_attention_heads = size_at(o, "num_attention_heads", 1 << 16);
  const auto heads = static_cast<std::int64_t>(c.num_attention_heads);
  c.num_key_value_heads = size_at(o, "num_key_value_heads", key_value_heads(o, of, heads), 1 << 16);
  if (of.head_dim > 0 && o.has("head_dim") && !is_given(o, "head_dim"))
    o.fail_at("head_dim",
              concat("is null, which no model of this family has; give the number, or leave it out for ",
                     of.head_dim));
  if (!is_given(o, "head_dim") && of.head_dim == 0 && c.hidden_size % c.num_attention_heads != 0)
    o.fail_at("hidden_size", concat("is ", c.hidden_size, ", which num_attention_heads ",
                                    c.num_attention_heads, " does not divide; give head_dim"));
  c.head_dim = size_at(o, "head_dim",
                       of.head_dim ? of.head_dim : static_cast<std::int64_t>(c.hidden_size) / heads, 1 << 16);
  c.max_position_embeddings = size_at(o, "max_position_embeddings", of.positions, max_positions);
  c.rms_norm_eps = o.number("rms_norm_eps", 1e-6, 0, 1);
  c.rope = rope_of(o, c.max_position_embeddings, {"rope_theta", 10000}, {"partial_rotary_factor", 1}).options;
  c.tie_word_embeddings = o.boolean("tie_word_embeddings", false);
  c.o_bias = of.attention_bias && o.boolean("attention_bias", false);
  c.qkv_bias = of.qkv_bias || c.o_bias;
  c.mlp_bias = of.mlp_bias && o.boolean("mlp_bias", false);
  c.qk_norm = of.qk_norm;
  read_window(o, of, c);
  check_layer_types(o, sliding_layers(c));
  c.attention_dropout = o.number("attention_dropout", 0, 0, 1);
  c.initializer_range = o.number("initializer_range", 0.02, 0, 1);
  c.pad_token_id = special_token(o, "pad_token_id", c.vocab_size);
  c.bos_token_id = special_token(o, "bos_token_id", c.vocab_size, of.bos);
  c.eos_token_id = special_tokens(o, "eos_token_id", c.vocab_size, of.eos);
  try {
    check(c);
  } catch (const Error& e) {
    fail(e.code(), o.file(), ": ", e.what());
  }
  return c;
}

std::unique_ptr<LanguageModel> make_llama(const JsonObject& config, std::vector<std::string>*) {
  return std::make_unique<Llama>(llama_config(config));
}

std::string llama_json(const LanguageModel& model) {
  return to_json(dynamic_cast<const Llama&>(model).config());
}

constexpr ModelFamily family(std::string_view model_type) {
  return {.model_type = model_type,
          .make = make_llama,
          .config_json = llama_json,
          // Files before transformers 4.32 have the frequencies of rotary embedding.
          .names = {"model.", {{{"rotary_emb.inv_freq", 1, ""}}}, "lm_head.weight", "embed_tokens.weight"},
          .target_modules = {"q_proj", "v_proj"}};
}

}  // namespace

constinit const ModelFamily llama_family = family("llama"), mistral_family = family("mistral"),
                            qwen2_family = family("qwen2"), qwen3_family = family("qwen3");

LlamaConfig read_llama_config(const std::string& given) {
  const std::string path = config_file(given);
  const nlohmann::json document = parse_json(read_text_file(path), path, JsonDialect::relaxed);
  return llama_config(JsonObject(document, path));
}

std::string to_json(const LlamaConfig& c) {
  const Variant* const of = find_variant(c.model_type);
  require(of, Errc::config, "model_type is ", c.model_type, ", expected ", known_variants());
  nlohmann::ordered_json all{
      {"model_type", c.model_type},
      {"architectures", {of->architecture}},
      {"hidden_act", "silu"},
      {"vocab_size", c.vocab_size},
      {"hidden_size", c.hidden_size},
      {"intermediate_size", c.intermediate_size},
      {"num_hidden_layers", c.num_hidden_layers},
      {"num_attention_heads", c.num_attention_heads},
      {"num_key_value_heads", c.num_key_value_heads},
      {"head_dim", c.head_dim},
      {"max_position_embeddings", c.max_position_embeddings},
      {"rms_norm_eps", c.rms_norm_eps},
      {"rope_theta", c.rope.theta},
      {"rope_scaling", scaling_json(c.rope)},
      {"tie_word_embeddings", c.tie_word_embeddings},
      {"attention_dropout", c.attention_dropout},
      {"initializer_range", c.initializer_range},
      {"bos_token_id", token_or_null(c.bos_token_id)},
      {"eos_token_id", tokens_or_null(c.eos_token_id)},
  };
  if (c.pad_token_id) all["pad_token_id"] = *c.pad_token_id;
  if (of->attention_bias) all["attention_bias"] = c.o_bias;
  if (of->mlp_bias) all["mlp_bias"] = c.mlp_bias;
  if (of->window == Window::last_layers)
    all["use_sliding_window"] = c.sliding_window > 0, all["max_window_layers"] = c.max_window_layers;
  if (of->window != Window::none)
    all["sliding_window"] = c.sliding_window ? nlohmann::ordered_json(c.sliding_window) : nullptr;
  return all.dump(2) + "\n";
}

}  // namespace rz
