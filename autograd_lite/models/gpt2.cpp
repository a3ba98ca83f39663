#include "autograd_lite/models/gpt2.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "autograd_lite/nn/init.h"
#include "comm/core/integer_math.h"

namespace rz {
namespace {

float deviation(const Gpt2Config& c) { return static_cast<float>(c.initializer_range); }

/// Each block adds to the residual stream twice, hence 2 n_layer additions.
float residual_deviation(const Gpt2Config& c) {
  return deviation(c) / std::sqrt(2 * static_cast<float>(c.n_layer));
}

float epsilon(const Gpt2Config& c) { return static_cast<float>(c.layer_norm_epsilon); }

/// As GPT-2's Conv1D.
void initialize(nn::Linear& layer, float weight_deviation) {
  layer.weight.initial = {Initial::normal, weight_deviation};
  layer.bias.initial = {Initial::constant, 0};
}
constexpr auto conv1d = ops::WeightLayout::in_out;

void require_probability(const char* key, double p) {
  require(p >= 0 && p < 1, Errc::config, key, " is ", p, ", expected 0 <= ", key, " < 1");
}

}  // namespace

void check(const Gpt2Config& c) {
  const auto positive = [](const char* key, std::size_t value) {
    require(value > 0, Errc::config, key, " is 0, expected at least 1");
  };
  positive("n_layer", c.n_layer);
  positive("n_head", c.n_head);
  positive("n_embd", c.n_embd);
  positive("n_positions", c.n_positions);
  positive("vocab_size", c.vocab_size);
  require(c.vocab_size < (std::size_t{1} << 31), Errc::config, "vocab_size is ", c.vocab_size,
          ", expected less than 2^31");
  require(c.n_embd % c.n_head == 0, Errc::config, "n_embd is ", c.n_embd, ", which n_head ", c.n_head,
          " does not divide");
  require(c.layer_norm_epsilon > 0 && std::isfinite(c.layer_norm_epsilon), Errc::config,
          "layer_norm_epsilon is ", c.layer_norm_epsilon, ", expected more than 0");
  require(c.initializer_range >= 0 && std::isfinite(c.initializer_range), Errc::config,
          "initializer_range is ", c.initializer_range, ", expected 0 or more");
  require_probability("embd_pdrop", c.embd_pdrop);
  require_probability("resid_pdrop", c.resid_pdrop);
  require_probability("attn_pdrop", c.attn_pdrop);
}

namespace gpt2 {

Attention::Attention(Module& parent, const std::string& name, const Gpt2Config& c)
    : Module(parent, name),
      heads(static_cast<int>(c.n_head)),
      probability_dropout(static_cast<float>(c.attn_pdrop)),
      c_attn(*this, "c_attn", c.n_embd, 3 * c.n_embd, conv1d),
      c_proj(*this, "c_proj", c.n_embd, c.n_embd, conv1d),
      resid_dropout(*this, "resid_dropout", c.resid_pdrop) {
  initialize(c_attn, deviation(c));
  initialize(c_proj, residual_deviation(c));
}

Var Attention::operator()(Tape& tape, Var x) {
  const Var y = nn::causal_attention(tape, c_attn(tape, x), heads, training() ? probability_dropout : 0);
  return resid_dropout(tape, c_proj(tape, y));
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

Block::Block(Module& parent, const std::string& name, const Gpt2Config& c)
    : Module(parent, name),
      ln_1(*this, "ln_1", c.n_embd, epsilon(c)),
      attn(*this, "attn", c),
      ln_2(*this, "ln_2", c.n_embd, epsilon(c)),
      mlp(*this, "mlp", c) {
  one_scope();
}

Var Block::operator()(Tape& tape, Var x) {
  const auto [residual, norm] = ln_2.add_and_norm(tape, x, attn(tape, ln_1(tape, x)));
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
  for (std::size_t i = 0; i < c.n_layer; ++i) h.append(c);
}

Var Transformer::operator()(Tape& tape, const Tensor& tokens) {
  Var x = wte.in_scope(tape, [&] {
    const Var table = tape.parameter(wte.weight);
    return drop(tape, nn::embedding_with_positions(tape, tokens, table, tape.parameter(wpe.weight)));
  });
  for (Block& block : h) x = block.in_block(tape, x, [&tape, b = &block](Var in) { return (*b)(tape, in); });
  return x;
}

}  // namespace gpt2

Gpt2::Gpt2(const Gpt2Config& c) : config_((check(c), c)), transformer_(*this, "transformer", c) {
  register_head();
}

Gpt2::Gpt2(Module& parent, const std::string& name, const Gpt2Config& c)
    : Module(parent, name), config_((check(c), c)), transformer_(*this, "transformer", c) {
  register_head();
}

void Gpt2::register_head() {
  if (config_.tie_word_embeddings) {
    Scope& scope = transformer_.register_scope("head", std::vector<Module*>{&transformer_.ln_f});
    scope.parameters.push_back(&transformer_.wte.weight);
    head_scope_ = &scope;
    return;
  }
  lm_head_.emplace(*this, "lm_head", config_.n_embd, config_.vocab_size, ops::WeightLayout::out_in,
                   /*with_bias=*/false);
  lm_head_->weight.initial = {Initial::normal, deviation(config_)};
  head_scope_ = &transformer_.register_scope("head", std::vector<Module*>{&transformer_.ln_f, &*lm_head_});
}

Var Gpt2::hidden(Tape& tape, const Tensor& tokens) {
  if (tokens.shape().dims() != 2 || tokens.shape()[1] > config_.n_positions)
    fail(Errc::invalid_argument, "GPT-2: tokens are ", name(tokens.shape()), ", expected [batch, at most ",
         config_.n_positions, "] (n_positions)");
  return transformer_(tape, tokens);
}

template <class F>
Var Gpt2::head(Tape& tape, const F& use_logits, Var x) {
  return tape.scope(*head_scope_, [&] {
    const Var norm = transformer_.ln_f(tape, x);
    const Var table = tape.parameter(lm_head_ ? lm_head_->weight : transformer_.wte.weight);
    return use_logits(nn::linear_aligned(tape, norm, table, ops::WeightLayout::out_in));
  });
}

Gpt2::Output Gpt2::forward(Tape& tape, const Tensor& tokens, const Tensor& targets) {
  Output output;
  const auto use_logits = [&](Var logits) {
    output.logits = logits;
    if (!targets.defined()) return logits;
    output.loss = nn::cross_entropy(tape, logits, targets);
    return output.loss.sum;
  };
  head(tape, use_logits, hidden(tape, tokens));
  return output;
}

Var Gpt2::logits_at(Tape& tape, const Tensor& tokens, std::size_t position) {
  const Var x = nn::narrow(tape, hidden(tape, tokens), 1, position, 1);
  return head(
      tape, [](Var logits) { return logits; }, x);
}

namespace {

/// The tokens of the k largest logits in ascending order; all tokens if k is 0. Among equal logits, lower
/// tokens win.
std::vector<std::int32_t> top_candidates(std::span<const float> logits, std::size_t k) {
  std::vector<std::int32_t> tokens(logits.size());
  std::iota(tokens.begin(), tokens.end(), 0);
  if (k == 0 || k >= tokens.size()) return tokens;
  const auto larger = [&](std::int32_t a, std::int32_t b) {
    const float x = logits[static_cast<std::size_t>(a)], y = logits[static_cast<std::size_t>(b)];
    return x > y || (x == y && a < b);
  };
  std::ranges::nth_element(tokens, tokens.begin() + static_cast<std::ptrdiff_t>(k), larger);
  tokens.resize(k);
  std::ranges::sort(tokens);
  return tokens;
}

}  // namespace

std::int32_t pick_token(std::span<const float> logits, double temperature, std::size_t top_k, double u) {
  const auto likeliest = std::max_element(logits.begin(), logits.end());
  const auto best = static_cast<std::int32_t>(likeliest - logits.begin());
  if (temperature == 0) return best;
  const auto weight = [&](std::int32_t token) {
    return std::exp((double{logits[static_cast<std::size_t>(token)]} - *likeliest) / temperature);
  };
  const auto tokens = top_candidates(logits, top_k);
  double total = 0;
  for (const auto token : tokens) total += weight(token);
  double left = u * total;
  for (const auto token : tokens)
    if ((left -= weight(token)) < 0) return token;
  return best;
}

namespace {

/// x in f32 on the host.
Tensor in_f32(Tape& tape, const Tensor& x) {
  if (x.dtype() == DType::f32) return x.on_host(tape.stream());
  const Tensor wide = tape.empty(x.shape());
  ops::copy(wide, x, tape.stream());
  return wide.on_host(tape.stream());
}

}  // namespace

std::vector<std::int32_t> generate(Gpt2& model, Tape& tape, std::span<const std::int32_t> prompt,
                                   std::size_t n, const Sampling& how) {
  require(!prompt.empty(), Errc::invalid_argument,
          "generate: the prompt is empty, expected a token at least");
  require(how.temperature >= 0, Errc::invalid_argument, "generate: temperature is ", how.temperature,
          ", expected 0 or more");
  // Pads windows behind the last token, where attention does not see, to a multiple of `grain`. Few distinct
  // sizes let the pool reuse its blocks.
  constexpr std::size_t grain = 32;
  const std::size_t max_context = model.config().n_positions;
  std::vector<std::int32_t> text(prompt.begin(), prompt.end());
  const Tape::NoGrad no_grad(tape);
  const EvalMode evaluating(model);
  for (std::size_t i = 0; i < n; ++i) {
    tape.reset();
    const std::size_t used = std::min(text.size(), max_context);
    const std::size_t padded = std::min(round_up(used, grain), max_context);
    std::vector<std::int32_t> window(text.end() - static_cast<std::ptrdiff_t>(used), text.end());
    window.resize(padded);
    const Tensor tokens = tape.empty({1, padded}, DType::i32);
    tokens.assign(std::span<const std::int32_t>(window), tape.stream());
    const Tensor logits = in_f32(tape, tape.value(model.logits_at(tape, tokens, used - 1)));
    text.push_back(pick_token({logits.data<float>(), logits.count()}, how.temperature, how.top_k,
                              random_uniform(how.seed, "generate", i)));
  }
  tape.reset();
  return {text.begin() + static_cast<std::ptrdiff_t>(prompt.size()), text.end()};
}

}  // namespace rz
