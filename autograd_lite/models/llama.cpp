#include "autograd_lite/models/llama.h"

namespace rz {

void check(const LlamaConfig& c) {
  check_sizes({{"vocab_size", c.vocab_size},
               {"hidden_size", c.hidden_size},
               {"intermediate_size", c.intermediate_size},
               {"num_hidden_layers", c.num_hidden_layers},
               {"num_attention_heads", c.num_attention_heads},
               {"num_key_value_heads", c.num_key_value_heads},
               {"max_position_embeddings", c.max_position_embeddings}});
  require(c.head_dim > 0 && c.head_dim % 2 == 0, Errc::config, "head_dim is ", c.head_dim,
          ", expected an even number, since rotary embedding turns pairs of channels");
  require(c.num_attention_heads % c.num_key_value_heads == 0, Errc::config, "num_attention_heads is ",
          c.num_attention_heads, ", which num_key_value_heads ", c.num_key_value_heads, " does not divide");
  check_number("rms_norm_eps", c.rms_norm_eps, c.rms_norm_eps > 0, "more than 0");
  check_number("initializer_range", c.initializer_range, c.initializer_range >= 0, "0 or more");
  check_probability("attention_dropout", c.attention_dropout);
}

namespace llama {
namespace {

void initialize(nn::Linear& layer, const LlamaConfig& c) {
  layer.weight.initial = {Initial::normal, static_cast<float>(c.initializer_range)};
  if (layer.with_bias) layer.bias.initial = {Initial::constant, 0};
}

/// x [B, T, H·D], normalised over the D channels of a head if there is a norm.
Var norm_of_heads(Tape& tape, std::optional<nn::RmsNorm>& norm, Var x) {
  if (!norm) return x;
  const Shape shape = tape.value(x).shape();
  const std::size_t channels = norm->weight.count();
  const Var heads = nn::reshape(tape, x, {shape[0], shape[1], shape[2] / channels, channels});
  return nn::reshape(tape, (*norm)(tape, heads), shape);
}

constexpr auto out_in = ops::WeightLayout::out_in;
float epsilon_of(const LlamaConfig& c) { return static_cast<float>(c.rms_norm_eps); }

}  // namespace

Attention::Attention(Module& parent, const std::string& name, const LlamaConfig& c, std::size_t l)
    : Module(parent, name),
      layer(l),
      head_size(c.head_dim),
      options{.causal = true, .window = l >= c.max_window_layers ? c.sliding_window : 0},
      dropout(static_cast<float>(c.attention_dropout)),
      q_proj(*this, "q_proj", c.hidden_size, c.num_attention_heads * c.head_dim, out_in, c.qkv_bias),
      k_proj(*this, "k_proj", c.hidden_size, c.num_key_value_heads * c.head_dim, out_in, c.qkv_bias),
      v_proj(*this, "v_proj", c.hidden_size, c.num_key_value_heads * c.head_dim, out_in, c.qkv_bias),
      o_proj(*this, "o_proj", c.num_attention_heads * c.head_dim, c.hidden_size, out_in, c.o_bias) {
  for (nn::Linear* projection : {&q_proj, &k_proj, &v_proj, &o_proj}) initialize(*projection, c);
  if (!c.qk_norm) return;
  q_norm.emplace(*this, "q_norm", c.head_dim, epsilon_of(c));
  k_norm.emplace(*this, "k_norm", c.head_dim, epsilon_of(c));
}

Var Attention::operator()(Tape& tape, Var x, const ops::RotaryTables& tables, const Tensor& document_starts,
                          KvCache* cache) {
  const Tensor positions = cache ? cache->next_positions() : Tensor();
  const nn::SharedInput in = q_proj.shared(tape, x);
  const Var q_heads = norm_of_heads(tape, q_norm, q_proj(tape, in));
  const Var k_heads = norm_of_heads(tape, k_norm, k_proj(tape, in));
  const auto heads_of = [&](Var v) { return static_cast<int>(tape.value(v).shape()[2] / head_size); };
  ops::AttentionOptions of_rank = options;
  of_rank.heads = heads_of(q_heads), of_rank.kv_heads = heads_of(k_heads);
  const Var q = nn::rotary(tape, q_heads, of_rank.heads, tables, 0, positions);
  const Var k = nn::rotary(tape, k_heads, of_rank.kv_heads, tables, 0, positions);
  const Var v = v_proj(tape, in);
  if (cache)
    return o_proj(tape, cache->attention(tape, layer, tape.value(q), tape.value(k), tape.value(v), of_rank));
  of_rank.document_starts = document_starts;
  const float p = training() ? dropout : 0;
  return o_proj(tape, nn::attention(tape, q, k, v, of_rank, p, q_proj.exchange.part));
}

Mlp::Mlp(Module& parent, const std::string& name, const LlamaConfig& c)
    : Module(parent, name),
      gate_proj(*this, "gate_proj", c.hidden_size, c.intermediate_size, out_in, c.mlp_bias),
      up_proj(*this, "up_proj", c.hidden_size, c.intermediate_size, out_in, c.mlp_bias),
      down_proj(*this, "down_proj", c.intermediate_size, c.hidden_size, out_in, c.mlp_bias) {
  for (nn::Linear* layer : {&gate_proj, &up_proj, &down_proj}) initialize(*layer, c);
}

Var Mlp::operator()(Tape& tape, Var x) {
  const nn::SharedInput in = gate_proj.shared(tape, x);
  const Var gate = gate_proj(tape, in), up = up_proj(tape, in);
  return down_proj(tape, nn::swiglu(tape, gate, up));
}

DecoderLayer::DecoderLayer(Module& parent, const std::string& name, const LlamaConfig& c, std::size_t layer)
    : Module(parent, name),
      input_layernorm(*this, "input_layernorm", c.hidden_size, epsilon_of(c)),
      self_attn(*this, "self_attn", c, layer),
      post_attention_layernorm(*this, "post_attention_layernorm", c.hidden_size, epsilon_of(c)),
      mlp(*this, "mlp", c) {
  one_scope();
}

Var DecoderLayer::operator()(Tape& tape, Var x, const ops::RotaryTables& tables,
                             const Tensor& document_starts, KvCache* cache) {
  const Var attended = self_attn(tape, input_layernorm(tape, x), tables, document_starts, cache);
  const auto [residual, norm] = post_attention_layernorm.add_and_norm(tape, x, attended);
  return nn::add(tape, residual, mlp(tape, norm));
}

Model::Model(Module& parent, const std::string& name, const LlamaConfig& c)
    : Module(parent, name),
      embed_tokens(*this, "embed_tokens", c.vocab_size, c.hidden_size,
                   static_cast<float>(c.initializer_range)),
      layers(*this, "layers"),
      norm(*this, "norm", c.hidden_size, epsilon_of(c)) {
  for (std::size_t i = 0; i < c.num_hidden_layers; ++i) layers.append(c, i);
}

}  // namespace llama

Llama::Llama(const LlamaConfig& c)
    : config_((check(c), c)),
      model_(*this, "model", c),
      rotary_(c.head_dim, c.max_position_embeddings, c.rope) {
  register_head();
}

Llama::Llama(Module& parent, const std::string& name, const LlamaConfig& c)
    : LanguageModel(parent, name),
      config_((check(c), c)),
      model_(*this, "model", c),
      rotary_(c.head_dim, c.max_position_embeddings, c.rope) {
  register_head();
}

ModelFacts Llama::facts() const {
  const LlamaConfig& c = config_;
  return {.model_type = c.model_type,
          .name = c.name,
          .layers = c.num_hidden_layers,
          .heads = c.num_attention_heads,
          .head_size = c.head_dim,
          .channels = c.hidden_size,
          .vocabulary = c.vocab_size,
          .positions = rotary_.max_positions(),
          .length_matters_from = rotary_.length_matters_from()};
}

ParallelPlan Llama::parallel_plan() const {
  using enum ParallelStyle;
  ParallelPlan plan{{"model.embed_tokens", vocabulary},
                    {"model.layers.*.self_attn.{q,k,v}_proj", column, 1, config_.head_dim},
                    {"model.layers.*.self_attn.o_proj", row, 1, config_.head_dim},
                    {"model.layers.*.mlp.{gate,up}_proj", column},
                    {"model.layers.*.mlp.down_proj", row},
                    {"model.layers.*.*_layernorm", sequence},
                    {"model.norm", sequence}};
  if (config_.qk_norm) plan.push_back({"model.layers.*.self_attn.{q,k}_norm", shared});
  if (!config_.tie_word_embeddings) plan.push_back({"lm_head", vocabulary});
  return plan;
}

std::unique_ptr<LanguageModel> Llama::without_values() const { return std::make_unique<Llama>(config_); }

void Llama::register_head() {
  LanguageModel::register_head(model_, model_.norm, model_.embed_tokens, config_.tie_word_embeddings,
                               config_.initializer_range);
}

Var Llama::hidden(Tape& tape, const Tensor& tokens, const Tensor& document_starts, KvCache* cache) {
  const ops::RotaryTables tables =
      rotary_.tables(cache ? cache->positions() : tokens.shape()[1], tape.stream());
  Var x = model_.embed_tokens(tape, tokens);
  for (llama::DecoderLayer& layer : model_.layers)
    x = layer.in_block(tape, x, [&tape, l = &layer, tables, document_starts, cache](Var in) {
      return (*l)(tape, in, tables, document_starts, cache);
    });
  return x;
}

}  // namespace rz
