#include "autograd_lite/models/gpt2.h"

#include <cmath>

namespace rz {
namespace {

float deviation(const Gpt2Config& c) { return static_cast<float>(c.initializer_range); }

/// Each block adds to the residual stream twice, hence 2 n_layer additions.
float residual_deviation(const Gpt2Config& c) {
  return deviation(c) / std::sqrt(2 * static_cast<float>(c.n_layer));
}

float epsilon(const Gpt2Config& c) { return static_cast<float>(c.layer_norm_epsilon); }

/// Initializes a layer as GPT-2's Conv1D.
void initialize(nn::Linear& layer, float weight_deviation) {
  layer.weight.initial = {Initial::normal, weight_deviation};
  layer.bias.initial = {Initial::constant, 0};
}
constexpr auto conv1d = ops::WeightLayout::in_out;

}  // namespace

void check(const Gpt2Config& c) {
  check_sizes({{"n_layer", c.n_layer},
               {"n_head", c.n_head},
               {"n_embd", c.n_embd},
               {"n_positions", c.n_positions},
               {"vocab_size", c.vocab_size}});
  require(c.n_embd % c.n_head == 0, Errc::config, "n_embd is ", c.n_embd, ", which n_head ", c.n_head,
          " does not divide");
  check_number("layer_norm_epsilon", c.layer_norm_epsilon, c.layer_norm_epsilon > 0, "more than 0");
  check_number("initializer_range", c.initializer_range, c.initializer_range >= 0, "0 or more");
  check_probability("embd_pdrop", c.embd_pdrop);
  check_probability("resid_pdrop", c.resid_pdrop);
  check_probability("attn_pdrop", c.attn_pdrop);
}

namespace gpt2 {

Attention::Attention(Module& parent, const std::string& name, const Gpt2Config& c, std::size_t l)
    : Module(parent, name),
      layer(l),
      head_size(c.n_embd / c.n_head),
      probability_dropout(static_cast<float>(c.attn_pdrop)),
      c_attn(*this, "c_attn", c.n_embd, 3 * c.n_embd, conv1d),
      c_proj(*this, "c_proj", c.n_embd, c.n_embd, conv1d),
      resid_dropout(*this, "resid_dropout", c.resid_pdrop) {
  initialize(c_attn, deviation(c));
  initialize(c_proj, residual_deviation(c));
}

Var Attention::operator()(Tape& tape, Var x, const Tensor& document_starts, KvCache* cache) {
  const Var qkv = c_attn(tape, x);
  const int heads = static_cast<int>(tape.value(qkv).shape()[2] / 3 / head_size);  // of this rank
  if (!cache) {
    const Var y =
        nn::self_attention(tape, qkv, {.heads = heads, .causal = true, .document_starts = document_starts},
                           training() ? probability_dropout : 0, c_attn.exchange.part);
    return resid_dropout(tape, c_proj(tape, y));
  }
  const Tensor all = tape.value(qkv);
  const std::size_t channels = all.shape()[2] / 3;
  const auto part = [&](std::size_t n) {
    const Tensor copied = tape.empty(all.shape().with_last(channels), all.dtype());
    ops::copy(copied, all.columns(n * channels, channels), tape.stream());
    return copied;
  };
  return c_proj(tape,
                cache->attention(tape, layer, part(0), part(1), part(2), {.heads = heads, .causal = true}));
}

Mlp::Mlp(Module& parent, const std::string& name, const Gpt2Config& c)
    : Module(parent, name),
      c_fc(*this, "c_fc", c.n_embd, 4 * c.n_embd, conv1d),
      c_proj(*this, "c_proj", 4 * c.n_embd, c.n_embd, conv1d),
      dropout(*this, "dropout", c.resid_pdrop) {
  initialize(c_fc, deviation(c));
  initialize(c_proj, residual_deviation(c));
}

Var Mlp::operator()(Tape& tape, Var x) { return dropout(tape, c_proj(tape, c_fc.gelu(tape, x))); }

Block::Block(Module& parent, const std::string& name, const Gpt2Config& c, std::size_t layer)
    : Module(parent, name),
      ln_1(*this, "ln_1", c.n_embd, epsilon(c)),
      attn(*this, "attn", c, layer),
      ln_2(*this, "ln_2", c.n_embd, epsilon(c)),
      mlp(*this, "mlp", c) {
  one_scope();
}

Var Block::operator()(Tape& tape, Var x, const Tensor& document_starts, KvCache* cache) {
  const auto [residual, norm] = ln_2.add_and_norm(tape, x, attn(tape, ln_1(tape, x), document_starts, cache));
  return nn::add(tape, residual, mlp(tape, norm));
}

Transformer::Transformer(Module& parent, const std::string& name, const Gpt2Config& c)
    : Module(parent, name),
      wte(*this, "wte", c.vocab_size, c.n_embd, deviation(c)),
      wpe(*this, "wpe", c.n_positions, c.n_embd, deviation(c)),
      drop(*this, "drop", c.embd_pdrop),
      h(*this, "h"),
      ln_f(*this, "ln_f", c.n_embd, epsilon(c)) {
  register_scope("embeddings", std::vector<Module*>{&wte, &wpe});
  for (std::size_t i = 0; i < c.n_layer; ++i) h.append(c, i);
}

/// In the scope of both tables. Ranks that share wte add the positions to the tokens that they get from it.
Var Transformer::embedded(Tape& tape, const Tensor& tokens, KvCache* cache) {
  if (cache) {
    const Var positions = tape.parameter(wpe.weight);
    return nn::add(tape, wte(tape, tokens), nn::embedding(tape, cache->next_positions(), positions));
  }
  const Var positions = Exchange::through(wpe.exchange.parameter, tape, tape.parameter(wpe.weight));
  if (!wte.exchange.output)
    return nn::embedding_with_positions(tape, tokens, tape.parameter(wte.weight), positions);
  const Var x = wte(tape, tokens);
  const std::size_t length = tape.value(x).shape()[1];
  const auto rank = static_cast<std::size_t>(wte.exchange.part.rank);
  const std::size_t first = length == tokens.shape()[1] ? 0 : rank * length;
  return nn::add(tape, x, nn::narrow(tape, positions, 0, first, length));
}

Var Transformer::operator()(Tape& tape, const Tensor& tokens, const Tensor& document_starts, KvCache* cache) {
  Var x = wte.in_scope(tape, [&] {
    const Var sum = embedded(tape, tokens, cache);
    return cache ? sum : drop(tape, sum);
  });
  for (Block& block : h)
    x = block.in_block(tape, x, [&tape, b = &block, document_starts, cache](Var in) {
      return (*b)(tape, in, document_starts, cache);
    });
  return x;
}

}  // namespace gpt2

Gpt2::Gpt2(const Gpt2Config& c) : config_((check(c), c)), transformer_(*this, "transformer", c) {
  register_head();
}

Gpt2::Gpt2(Module& parent, const std::string& name, const Gpt2Config& c)
    : LanguageModel(parent, name), config_((check(c), c)), transformer_(*this, "transformer", c) {
  register_head();
}

ModelFacts Gpt2::facts() const {
  const Gpt2Config& c = config_;
  return {.model_type = "gpt2",
          .name = "GPT-2",
          .layers = c.n_layer,
          .heads = c.n_head,
          .head_size = c.n_embd / c.n_head,
          .channels = c.n_embd,
          .vocabulary = c.vocab_size,
          .positions = c.n_positions,
          .position_elements = c.n_positions * c.n_embd};
}

ParallelPlan Gpt2::parallel_plan() const {
  using enum ParallelStyle;
  const std::size_t head = config_.n_embd / config_.n_head;
  ParallelPlan plan{{"transformer.wte", vocabulary},
                    {"transformer.h.*.attn.c_attn", column, 3, head},
                    {"transformer.h.*.attn.c_proj", row, 1, head},
                    {"transformer.h.*.mlp.c_fc", column},
                    {"transformer.h.*.mlp.c_proj", row},
                    {"transformer.{wpe,drop,ln_f}", sequence},
                    {"transformer.h.*.{ln_1,ln_2}", sequence},
                    {"transformer.h.*.{attn.resid_dropout,mlp.dropout}", sequence}};
  if (!config_.tie_word_embeddings) plan.push_back({"lm_head", vocabulary});
  return plan;
}

std::unique_ptr<LanguageModel> Gpt2::without_values() const { return std::make_unique<Gpt2>(config_); }

void Gpt2::register_head() {
  LanguageModel::register_head(transformer_, transformer_.ln_f, transformer_.wte, config_.tie_word_embeddings,
                               config_.initializer_range);
}

Var Gpt2::hidden(Tape& tape, const Tensor& tokens, const Tensor& document_starts, KvCache* cache) {
  return transformer_(tape, tokens, document_starts, cache);
}

}  // namespace rz
