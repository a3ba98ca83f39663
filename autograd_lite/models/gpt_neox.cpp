#include "autograd_lite/models/gpt_neox.h"

namespace rz {
namespace {

struct NamedActivation {
  std::string_view name;
  Var (*function)(Tape&, Var);
};
/// Hugging Face's names: one function has several.
constexpr NamedActivation activations[] = {
    {"gelu", nn::gelu_erf}, {"gelu_python", nn::gelu_erf},   {"gelu_new", nn::gelu}, {"gelu_fast", nn::gelu},
    {"silu", nn::silu},     {"gelu_pytorch_tanh", nn::gelu}, {"relu", nn::relu}};

const NamedActivation* find_activation(std::string_view name) {
  for (const NamedActivation& a : activations)
    if (a.name == name) return &a;
  return nullptr;
}

std::size_t rotated_channels(const GptNeoxConfig& c) {
  return static_cast<std::size_t>(static_cast<double>(c.hidden_size / c.num_attention_heads) * c.rotary_pct);
}

}  // namespace

void check(const GptNeoxConfig& c) {
  check_sizes({{"vocab_size", c.vocab_size},
               {"hidden_size", c.hidden_size},
               {"intermediate_size", c.intermediate_size},
               {"num_hidden_layers", c.num_hidden_layers},
               {"num_attention_heads", c.num_attention_heads},
               {"max_position_embeddings", c.max_position_embeddings}});
  require(c.hidden_size % c.num_attention_heads == 0, Errc::config, "hidden_size is ", c.hidden_size,
          ", which num_attention_heads ", c.num_attention_heads, " does not divide");
  std::string known;
  for (const NamedActivation& a : activations) known += concat(known.empty() ? "" : ", ", a.name);
  require(find_activation(c.hidden_act), Errc::config, "hidden_act is \"", c.hidden_act,
          "\", expected one of ", known);
  check_number("rotary_pct", c.rotary_pct, c.rotary_pct > 0 && c.rotary_pct <= 1, "0 < rotary_pct <= 1");
  const std::size_t rotated = rotated_channels(c);
  require(rotated > 0 && rotated % 2 == 0, Errc::config, "rotary_pct is ", c.rotary_pct, ", which is ",
          rotated, " of the ", c.hidden_size / c.num_attention_heads,
          " channels of a head, expected an even number, since rotary embedding turns pairs of channels");
  check_number("layer_norm_eps", c.layer_norm_eps, c.layer_norm_eps > 0, "more than 0");
  check_number("initializer_range", c.initializer_range, c.initializer_range >= 0, "0 or more");
  check_probability("attention_dropout", c.attention_dropout);
  check_probability("hidden_dropout", c.hidden_dropout);
}

namespace gpt_neox {
namespace {

constexpr auto weight_layout = ops::WeightLayout::out_in;

float norm_epsilon(const GptNeoxConfig& c) { return static_cast<float>(c.layer_norm_eps); }

void initialize(nn::Linear& layer, const GptNeoxConfig& c) {
  layer.weight.initial = {Initial::normal, static_cast<float>(c.initializer_range)};
  if (layer.with_bias) layer.bias.initial = {Initial::constant, 0};
}

}  // namespace

Attention::Attention(Module& parent, const std::string& name, const GptNeoxConfig& c, std::size_t l)
    : Module(parent, name),
      layer(l),
      head_size(c.hidden_size / c.num_attention_heads),
      dropout(static_cast<float>(c.attention_dropout)),
      query_key_value(*this, "query_key_value", c.hidden_size, 3 * c.hidden_size, weight_layout,
                      c.attention_bias),
      dense(*this, "dense", c.hidden_size, c.hidden_size, weight_layout, c.attention_bias) {
  initialize(query_key_value, c);
  initialize(dense, c);
}

Var Attention::operator()(Tape& tape, Var x, const ops::RotaryTables& tables, const Tensor& document_starts,
                          KvCache* cache) {
  const Var projected = query_key_value(tape, x);
  const Shape of_all = tape.value(projected).shape(), shape = of_all.with_last(of_all[2] / 3);
  const std::size_t size = head_size, heads = shape[2] / size;  // of this rank
  ops::AttentionOptions options{.heads = static_cast<int>(heads), .causal = true};
  const Var all = nn::reshape(tape, projected, {shape[0], shape[1], heads, 3 * size});
  const std::vector<Var> parts = nn::split(tape, all, {size, size, size}, -1);
  const Tensor positions = cache ? cache->next_positions() : Tensor();
  const auto rotated = [&](Var part) {
    return nn::rotary(tape, nn::reshape(tape, part, shape), options.heads, tables, 0, positions);
  };
  const Var q = rotated(parts[0]), k = rotated(parts[1]), v = nn::reshape(tape, parts[2], shape);
  if (cache)
    return dense(tape, cache->attention(tape, layer, tape.value(q), tape.value(k), tape.value(v), options));
  options.document_starts = document_starts;
  const float p = training() ? dropout : 0;
  return dense(tape, nn::attention(tape, q, k, v, options, p, query_key_value.exchange.part));
}

Mlp::Mlp(Module& parent, const std::string& name, const GptNeoxConfig& c)
    : Module(parent, name),
      activation(find_activation(c.hidden_act)->function),
      dense_h_to_4h(*this, "dense_h_to_4h", c.hidden_size, c.intermediate_size),
      dense_4h_to_h(*this, "dense_4h_to_h", c.intermediate_size, c.hidden_size) {
  initialize(dense_h_to_4h, c);
  initialize(dense_4h_to_h, c);
}

Var Mlp::operator()(Tape& tape, Var x) {
  return dense_4h_to_h(tape, activation(tape, dense_h_to_4h(tape, x)));
}

Layer::Layer(Module& parent, const std::string& name, const GptNeoxConfig& c, std::size_t layer)
    : Module(parent, name),
      parallel(c.use_parallel_residual),
      input_layernorm(*this, "input_layernorm", c.hidden_size, norm_epsilon(c)),
      post_attention_layernorm(*this, "post_attention_layernorm", c.hidden_size, norm_epsilon(c)),
      attention(*this, "attention", c, layer),
      mlp(*this, "mlp", c),
      post_attention_dropout(*this, "post_attention_dropout", c.hidden_dropout),
      post_mlp_dropout(*this, "post_mlp_dropout", c.hidden_dropout) {
  one_scope();
}

Var Layer::operator()(Tape& tape, Var x, const ops::RotaryTables& tables, const Tensor& document_starts,
                      KvCache* cache) {
  const Var attended =
      post_attention_dropout(tape, attention(tape, input_layernorm(tape, x), tables, document_starts, cache));
  if (parallel) {
    const Var made = post_mlp_dropout(tape, mlp(tape, post_attention_layernorm(tape, x)));
    return nn::add(tape, nn::add(tape, made, attended), x);
  }
  const auto [residual, norm] = post_attention_layernorm.add_and_norm(tape, x, attended);
  return nn::add(tape, residual, post_mlp_dropout(tape, mlp(tape, norm)));
}

Model::Model(Module& parent, const std::string& name, const GptNeoxConfig& c)
    : Module(parent, name),
      embed_in(*this, "embed_in", c.vocab_size, c.hidden_size, static_cast<float>(c.initializer_range)),
      emb_dropout(*this, "emb_dropout", c.hidden_dropout),
      layers(*this, "layers"),
      final_layer_norm(*this, "final_layer_norm", c.hidden_size, norm_epsilon(c)) {
  for (std::size_t i = 0; i < c.num_hidden_layers; ++i) layers.append(c, i);
}

}  // namespace gpt_neox

GptNeox::GptNeox(const GptNeoxConfig& c)
    : config_((check(c), c)),
      model_(*this, "gpt_neox", c),
      rotary_(rotated_channels(c), c.max_position_embeddings, c.rope) {
  register_head();
}

GptNeox::GptNeox(Module& parent, const std::string& name, const GptNeoxConfig& c)
    : LanguageModel(parent, name),
      config_((check(c), c)),
      model_(*this, "gpt_neox", c),
      rotary_(rotated_channels(c), c.max_position_embeddings, c.rope) {
  register_head();
}

ModelFacts GptNeox::facts() const {
  const GptNeoxConfig& c = config_;
  return {.model_type = "gpt_neox",
          .name = "GPT-NeoX",
          .layers = c.num_hidden_layers,
          .heads = c.num_attention_heads,
          .head_size = c.hidden_size / c.num_attention_heads,
          .channels = c.hidden_size,
          .vocabulary = c.vocab_size,
          .positions = rotary_.max_positions(),
          .length_matters_from = rotary_.length_matters_from()};
}

ParallelPlan GptNeox::parallel_plan() const {
  using enum ParallelStyle;
  const std::size_t head = config_.hidden_size / config_.num_attention_heads;
  ParallelPlan plan{{"gpt_neox.embed_in", vocabulary},
                    {"gpt_neox.layers.*.attention.query_key_value", column, 1, 3 * head},
                    {"gpt_neox.layers.*.attention.dense", row, 1, head},
                    {"gpt_neox.layers.*.mlp.dense_h_to_4h", column},
                    {"gpt_neox.layers.*.mlp.dense_4h_to_h", row},
                    {"gpt_neox.layers.*.{input,post_attention}_layernorm", sequence},
                    {"gpt_neox.layers.*.{post_attention,post_mlp}_dropout", sequence},
                    {"gpt_neox.{emb_dropout,final_layer_norm}", sequence}};
  if (!config_.tie_word_embeddings) plan.push_back({"embed_out", vocabulary});
  return plan;
}

std::unique_ptr<LanguageModel> GptNeox::without_values() const { return std::make_unique<GptNeox>(config_); }

void GptNeox::register_head() {
  LanguageModel::register_head(model_, model_.final_layer_norm, model_.embed_in, config_.tie_word_embeddings,
                               config_.initializer_range, "embed_out");
}

Var GptNeox::hidden(Tape& tape, const Tensor& tokens, const Tensor& document_starts, KvCache* cache) {
  const ops::RotaryTables tables =
      rotary_.tables(cache ? cache->positions() : tokens.shape()[1], tape.stream());
  Var x = model_.emb_dropout(tape, model_.embed_in(tape, tokens));
  for (gpt_neox::Layer& layer : model_.layers)
    x = layer.in_block(tape, x, [&tape, l = &layer, tables, document_starts, cache](Var in) {
      return (*l)(tape, in, tables, document_starts, cache);
    });
  return x;
}

}  // namespace rz
